"""The mathematics of acceptance: evidence bins, posterior hazards, and how they learn.

What the numbers mean is in ``hazard_table``. Kernels see one step's rows: ``n`` requests, ``p``
proposers, ``k`` positions.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autospec.compiled import compiled_brief, inlined
from autospec.records import (
    Float32Array,
    Float64Array,
    Int16Array,
    Int32Array,
    Int64Array,
)

UInt8Array = NDArray[np.uint8]

BIN_EDGES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.93, 0.96, 0.98, 0.99, 0.997)
NUM_BINS = len(BIN_EDGES) + 1
NUM_BUCKETS = 8
NUM_TOKEN_BUCKETS = 4096
BUCKET_OF = np.array([0, 1, 2, 3, 4, 4, 5, 5, 6, 6, 6, 6] + [7] * 244, dtype=np.uint8)
"""Bucket of each draft position; the last one has no end."""

_UNKNOWN_BIN = 255  # no confidence: what was known before drafting stands
_STEP_ROWS = 16.0  # requests of one step that count in full for what they share
_LEAST_HAZARD = 1e-3
_MOST_OFFSET = 6.0
_LUT_STEPS = 1000
_BIN_OF = np.searchsorted(
    np.array(BIN_EDGES), (np.arange(_LUT_STEPS + 1) + 0.5) / _LUT_STEPS
).astype(np.uint8)


class HazardArrays(NamedTuple):
    """Everything a table of hazards holds: w workloads, q position buckets, b bins, t tokens.

    Offsets are (mean, precision). ``scratch`` takes the offset of requests that have ended,
    ``strengths`` are those of ``Shrinkage``, in order. ``cell`` is the hazard of a cell without the
    request's and the token's offsets, as of the ``cell_call``-th of the ``calls`` that asked.
    ``odds`` is scratch: what these offsets make of the odds at later positions, at the first.
    """

    lookup: NDArray[np.bool_]  # [p]
    heads: Int16Array  # [p, 2]
    successes: Float64Array  # [w, p, q, b]
    trials: Float64Array  # [w, p, q, b]
    fresh: Float64Array  # [w, p, 2, q, b]
    raw_priors: Float64Array  # [p, b]
    priors: Float64Array  # [p, b]
    proposer_offset: Float64Array  # [p, 2]
    workload_offset: Float64Array  # [w, p, 2]
    request_offset: Float64Array  # [slots, p, 2]
    token_offset: Float64Array  # [p, t, 2]
    drift: Float64Array  # [w, p, 2]
    scratch: Float64Array  # [2]
    strengths: Float64Array
    cell: Float64Array  # [w, p, q, b]
    cell_call: Int64Array  # [w, p, q, b]
    calls: Int64Array  # [1]
    odds: Float64Array  # [p, 2]


class Rows(NamedTuple):
    """Where the requests of a step are kept: slots, workloads and last tokens' buckets, all [n]."""

    slots: Int32Array
    workloads: Int32Array
    token_buckets: Int32Array


class Verified(NamedTuple):
    """What a step brought: of ``asked`` tokens ``drafted``, then verified, accepted, committed.

    ``known[i]`` is False for a request that has ended meanwhile; all are [n].
    """

    known: NDArray[np.bool_]
    proposer: Int16Array
    asked: Int16Array
    drafted: Int16Array
    verified: Int16Array
    accepted: Int16Array
    committed: Int16Array


@compiled_brief
def confidence_bins(confidence: Float32Array, limits: Int16Array, bins: UInt8Array, p: int) -> None:
    """Write the bin of each raw confidence [n, k] into ``bins`` [n, p, k]; NaN counts as 0."""
    for i in range(confidence.shape[0]):
        for j in range(limits[i]):
            c = confidence[i, j]
            bins[i, p, j] = _BIN_OF[int(min(c, 1.0) * _LUT_STEPS)] if c > 0.0 else _BIN_OF[0]


@compiled_brief
def draft_bins(confidence: Float32Array, limits: Int16Array, bins: UInt8Array) -> None:
    """``confidence_bins`` of fresh drafts for every proposer [p, n]; NaN is unknown."""
    for p in range(limits.shape[0]):
        confidence_bins(confidence, limits[p], bins, p)
        for i in range(confidence.shape[0]):
            for j in range(limits[p, i]):
                if np.isnan(confidence[i, j]):
                    bins[i, p, j] = _UNKNOWN_BIN


@compiled_brief
def offer_bins(
    lookup: NDArray[np.bool_],
    offer_lengths: Int16Array,
    reach: Int16Array,
    confidence: Float32Array,
    bins: UInt8Array,
) -> None:
    """Evidence [n, p, k] before drafting: lookups' confidences [p, n, k], and for models a context.

    It is filled up to ``reach`` [p, n].
    The context is the bin of the request's best lookup offer: a request whose tokens continue an
    earlier passage is easier for a model as well.
    """
    for p in range(lookup.shape[0]):
        if lookup[p]:
            confidence_bins(confidence[p], offer_lengths[p], bins, p)
    for i in range(bins.shape[0]):
        best = 0
        for p in range(lookup.shape[0]):
            if lookup[p] and offer_lengths[p, i] > 0:
                best = max(best, 1 + bins[i, p, 0] // 3)
        for p in range(lookup.shape[0]):
            if not lookup[p]:
                for j in range(reach[p, i]):
                    bins[i, p, j] = best


@inlined
def _fill_odds(table: HazardArrays, slot: int, p: int, token_bucket: int) -> None:
    """The factors on a proposer's odds that come of a request and of its last token."""
    offset = table.request_offset[slot, p, 0]
    table.odds[p, 0] = np.exp(offset)
    table.odds[p, 1] = np.exp(offset + table.token_offset[p, token_bucket, 0])


@compiled_brief
def fill_hazards(
    table: HazardArrays, rows: Rows, limits: Int16Array, bins: UInt8Array, hazards: Float32Array
) -> None:
    """Posterior hazards [n, p, k] for the first ``limits`` [p, n] positions of every row.

    Those of an unknown bin are left as they are. The first ``heads[p, 1]`` of proposer p are those
    of proposer ``heads[p, 0]``.
    """
    successes, trials, heads, priors = table.successes, table.trials, table.heads, table.priors
    workload_offset = table.workload_offset
    odds, cell, cell_call = table.odds, table.cell, table.cell_call
    prior_strength, workload_strength = table.strengths[0], table.strengths[1]
    table.calls[0] += 1
    call = table.calls[0]
    for i in range(rows.slots.shape[0]):
        w = rows.workloads[i]
        for p in range(limits.shape[0]):  # apart from the positions, which would wait for each
            if limits[p, i] > 0:
                _fill_odds(table, rows.slots[i], p, rows.token_buckets[i])
                if heads[p, 1] > 0:
                    _fill_odds(table, rows.slots[i], heads[p, 0], rows.token_buckets[i])
        for p in range(limits.shape[0]):
            if limits[p, i] == 0:
                continue
            for part in range(2):
                s = p if part == 1 else heads[p, 0]
                start = heads[p, 1] if part == 1 else 0
                stop = limits[p, i] if part == 1 else min(heads[p, 1], limits[p, i])
                if start >= stop:
                    continue
                later, first = odds[s, 0], odds[s, 1]
                label = 0.0
                for j in range(start, stop):
                    b = bins[i, p, j]
                    if b == _UNKNOWN_BIN:
                        continue
                    q = BUCKET_OF[j]
                    if cell_call[w, s, q, b] != call:
                        if label == 0.0:
                            label = np.exp(workload_offset[w, s, 0])
                        h = (successes[0, s, q, b] + priors[s, b] * prior_strength) / (
                            trials[0, s, q, b] + prior_strength
                        )
                        scaled = h * label
                        h = scaled / (scaled + (1.0 - h))
                        cell[w, s, q, b] = (successes[w, s, q, b] + h * workload_strength) / (
                            trials[w, s, q, b] + workload_strength
                        )
                        cell_call[w, s, q, b] = call
                    h = cell[w, s, q, b]
                    scaled = h * (first if j == 0 else later)
                    h = scaled / (scaled + (1.0 - h))
                    hazards[i, p, j] = min(max(h, _LEAST_HAZARD), 1.0 - _LEAST_HAZARD)


@inlined
def _move(offset: Float64Array, information: float, residual: float, limit: float) -> None:
    """Correct an offset (mean, precision), whose precision stays within ``limit``."""
    offset[1] = min(offset[1] + information, limit)
    offset[0] = min(max(offset[0] + residual / offset[1], -_MOST_OFFSET), _MOST_OFFSET)


@inlined
def _learn_row(
    table: HazardArrays,
    w: int,
    p: int,
    token_bucket: int,
    start: int,
    num_success: int,
    missed: int,
    miss: float,
    weight: float,
    bins: UInt8Array,
    expected: Float32Array,
    request_offset: Float64Array,
) -> int:
    """One censored observation from ``start`` on; returns 1 when it raised a drift alarm.

    After the successes comes, if ``missed`` is 1, a position that counts as accepted by ``miss``.
    ``weight`` is for what the requests of a step share: they are not independent, as when many
    begin at once. ``bins`` and what was ``expected`` are the row's [k].
    """
    strengths, successes, trials = table.strengths, table.successes, table.trials
    fresh, drift = table.fresh, table.drift
    proposer_offset = table.proposer_offset[p]
    workload_offset = table.workload_offset[w, p]
    token_offset = table.token_offset[p, token_bucket]
    keep = 1.0 - 1.0 / strengths[2]
    label = np.exp(workload_offset[0])
    # What a row tells of an offset is added up: one correction for each, not one for each position.
    proposer_information = proposer_residual = 0.0
    workload_information = workload_residual = 0.0
    request_information = request_residual = 0.0
    high, low = drift[w, p, 0], drift[w, p, 1]
    alarm = 0
    for j in range(start, num_success + missed):
        b = bins[j]
        if b == _UNKNOWN_BIN:
            continue
        q = BUCKET_OF[j]
        hit = 1.0 if j < num_success else miss
        prior = table.priors[p, b]
        proposer_information += prior * (1.0 - prior)
        proposer_residual += hit - prior
        if w > 0:
            h = (successes[0, p, q, b] + prior * strengths[0]) / (trials[0, p, q, b] + strengths[0])
            scaled = h * label
            pooled = scaled / (scaled + 1.0 - h)
            workload_information += pooled * (1.0 - pooled)
            workload_residual += hit - pooled
        trials[0, p, q, b] = trials[0, p, q, b] * keep + 1.0
        successes[0, p, q, b] = successes[0, p, q, b] * keep + hit
        if w > 0:
            trials[w, p, q, b] = trials[w, p, q, b] * keep + 1.0
            successes[w, p, q, b] = successes[w, p, q, b] * keep + hit
        fresh[w, p, 0, q, b] += hit
        fresh[w, p, 1, q, b] += 1.0
        h = expected[j]
        residual = hit - h
        information = h * (1.0 - h)
        request_information += information
        request_residual += residual
        if j == 0:
            _move(token_offset, information, residual, strengths[6])
        high = max(0.0, high + weight * (residual - strengths[7]))
        low = max(0.0, low - weight * (residual + strengths[7]))
        if max(high, low) > strengths[8]:
            high = low = 0.0
            alarm = 1
    drift[w, p, 0], drift[w, p, 1] = high, low
    _move(proposer_offset, weight * proposer_information, weight * proposer_residual, strengths[11])
    _move(workload_offset, weight * workload_information, weight * workload_residual, strengths[13])
    _move(request_offset, request_information, request_residual, strengths[4])
    if alarm:
        for q in range(trials.shape[2]):
            for b in range(trials.shape[3]):
                trials[w, p, q, b] *= strengths[9]
                successes[w, p, q, b] *= strengths[9]
    return alarm


@compiled_brief
def learn_rows(
    table: HazardArrays,
    rows: Rows,
    step: Verified,
    matched: Int16Array,
    offer_lengths: Int16Array,
    expected: Float32Array,
    bins: UInt8Array,
    hazards: Float32Array,
) -> int:
    """Count one step's outcome; returns the number of drift alarms.

    The workload of a request that is not known any more still learns. A lookup proposer learns
    from what it offered whoever drafted; a model from what was verified of it.
    Where a draft was cut behind its head, to less than was asked for, the next position counts by
    what was ``expected`` [n, p, k] of it once it was drafted, and as rejected if it was not: before
    drafting, nobody knows how often there will be anything.
    """
    lookup, heads, priors = table.lookup, table.heads, table.priors
    opened = HazardArrays(
        lookup, heads, table.successes, table.trials, table.fresh, table.raw_priors, priors,
        table.proposer_offset, table.workload_offset, table.request_offset, table.token_offset,
        table.drift, table.scratch, table.strengths, table.cell, table.cell_call, table.calls,
        table.odds,
    )  # fmt: skip
    raw_priors = opened.raw_priors
    alarms = 0
    weight = min(1.0, _STEP_ROWS / max(rows.slots.shape[0], 1))
    slots, workloads, token_buckets = rows.slots, rows.workloads, rows.token_buckets
    for i in range(slots.shape[0]):
        s = slots[i]
        for p in range(lookup.shape[0]):
            successes_seen = 0
            missed = 0
            miss = 0.0
            if lookup[p] and matched[p, i] >= 0:
                limit = min(offer_lengths[p, i], step.committed[i])
                successes_seen = min(matched[p, i], limit)
                missed = 1 if successes_seen < limit else 0
            elif step.proposer[i] == p:
                verified = step.verified[i]
                successes_seen = step.accepted[i]
                missed = 1 if step.accepted[i] < verified else 0
                if missed == 0 and 0 < heads[p, 1] <= verified < step.asked[i]:
                    missed = 1
                    miss = expected[i, p, verified] if verified < step.drafted[i] else 0.0
            if successes_seen == 0 and missed == 0:
                continue
            for part in range(2):
                t = p if part == 1 else heads[p, 0]
                start = heads[p, 1] if part == 1 else 0
                stop = successes_seen + missed
                if part == 0:
                    stop = min(stop, heads[p, 1])
                if start >= stop:
                    continue
                kept = min(successes_seen, stop)
                alarms += _learn_row(
                    opened,
                    workloads[i],
                    t,
                    token_buckets[i],
                    start,
                    kept,
                    stop - kept,
                    miss,
                    weight,
                    bins[i, p],
                    hazards[i, p],
                    opened.request_offset[s, t] if step.known[i] else opened.scratch,
                )
    for p in range(lookup.shape[0]):
        odds = np.exp(opened.proposer_offset[p, 0])
        for b in range(priors.shape[1]):
            scaled = raw_priors[p, b] * odds
            priors[p, b] = scaled / (scaled + 1.0 - raw_priors[p, b])
    return alarms
