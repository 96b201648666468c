"""How likely draft tokens are to be accepted: calibrated hazards per position, at three levels.

A hazard is P(position j is accepted | the positions before it were). Its evidence is a bin: the
raw confidence of a lookup draft's token, or, for a model that has not drafted yet, what the lookups
say of the request (``offer_bins``). Counts are kept per (workload, proposer, position bucket, bin)
and pooled over workloads; a Beta posterior shrinks a workload's cell towards the pooled one, and
that towards a prior: a raw confidence taken at its word, moved in log-odds by an offset of its
proposer. The pooled cell is moved by an offset of the workload before a workload's cell leans on
it. Two more offsets then move the log-odds: the request's own, and, at the first position, that of
the token the draft continues. Each offset is a Gaussian belief updated by one Newton
step of the logistic likelihood per observation (assumed-density filtering, Opper 1998), forgetting
by bounded precision. Survival S_j is the running product of hazards.

Observations are censored: with A of V verified tokens accepted, positions 1..A succeeded, A + 1
failed only if A < V, and deeper positions say nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass

import numpy as np
from numpy.typing import NDArray

from autospec.compiled import compiled
from autospec.records import (
    Float32Array,
    Float64Array,
    Int16Array,
    Int32Array,
)

UInt8Array = NDArray[np.uint8]

LAYOUT = "acceptance/1"
POOLED = 0
"""Workload row in which everything is counted together."""

BIN_EDGES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.93, 0.96, 0.98, 0.99, 0.997)
NUM_BINS = len(BIN_EDGES) + 1
NUM_BUCKETS = 8
NUM_TOKEN_BUCKETS = 4096
_UNKNOWN_BIN = 255  # no confidence: what was known before drafting stands
_STEP_ROWS = 16.0  # requests of one step that count in full for what they share
_LEAST_HAZARD = 1e-3
_MOST_OFFSET = 6.0

_LUT_STEPS = 1000
_BIN_OF = np.searchsorted(
    np.array(BIN_EDGES), (np.arange(_LUT_STEPS + 1) + 0.5) / _LUT_STEPS
).astype(np.uint8)
BUCKET_OF = np.array([0, 1, 2, 3, 4, 4, 5, 5, 6, 6, 6, 6] + [7] * 244, dtype=np.uint8)
"""Bucket of each draft position; the last one has no end."""

_MODEL_PRIOR = 0.7  # optimistic: a proposer nobody has seen is worth a look


@dataclass(frozen=True)
class Shrinkage:
    """Strengths of priors and memory: in observations for cells, as precisions for offsets.

    Limits bound the weight of what was seen: older observations fade as new ones of the same kind
    arrive, never because of others.
    """

    prior: float = 4.0
    workload: float = 24.0
    cell_limit: float = 1500.0
    request: float = 16.0
    request_limit: float = 30.0
    token: float = 8.0
    token_limit: float = 200.0
    drift_slack: float = 0.08
    drift_threshold: float = 20.0
    drift_keep: float = 0.1
    proposer: float = 4.0
    proposer_limit: float = 60.0
    label: float = 1.0
    label_limit: float = 60.0

    def as_array(self) -> Float64Array:
        """The fields in order, for the kernels."""
        return np.array(astuple(self), dtype=np.float64)


@compiled
def confidence_bins(
    confidence: Float32Array, limits: Int16Array, bin_of: UInt8Array, bins: UInt8Array, p: int
) -> None:
    """Write the bin of each raw confidence [n, k] into ``bins`` [n, p, k]; NaN counts as 0."""
    steps = bin_of.shape[0] - 1
    for i in range(confidence.shape[0]):
        for j in range(limits[i]):
            c = confidence[i, j]
            bins[i, p, j] = bin_of[int(min(c, 1.0) * steps)] if c > 0.0 else bin_of[0]


@compiled
def draft_bins(
    confidence: Float32Array, limits: Int16Array, bin_of: UInt8Array, bins: UInt8Array
) -> None:
    """``confidence_bins`` of fresh drafts for every proposer [p, n]; NaN is unknown."""
    for p in range(limits.shape[0]):
        confidence_bins(confidence, limits[p], bin_of, bins, p)
        for i in range(confidence.shape[0]):
            for j in range(limits[p, i]):
                if np.isnan(confidence[i, j]):
                    bins[i, p, j] = _UNKNOWN_BIN


@compiled
def offer_bins(
    lookup: NDArray[np.bool_],
    offer_lengths: Int16Array,
    confidence: Float32Array,
    bin_of: UInt8Array,
    bins: UInt8Array,
) -> None:
    """Evidence [n, p, k] before drafting: lookups' confidences [p, n, k], and for models a context.

    The context is the bin of the request's best lookup offer: a request whose tokens continue an
    earlier passage is easier for a model as well.
    """
    for p in range(lookup.shape[0]):
        if lookup[p]:
            confidence_bins(confidence[p], offer_lengths[p], bin_of, bins, p)
    for i in range(bins.shape[0]):
        best = 0
        for p in range(lookup.shape[0]):
            if lookup[p] and offer_lengths[p, i] > 0:
                best = max(best, 1 + bins[i, p, 0] // 3)
        for p in range(lookup.shape[0]):
            if not lookup[p]:
                for j in range(bins.shape[2]):
                    bins[i, p, j] = best


@compiled
def fill_hazards(
    slots: Int32Array,
    workloads: Int32Array,
    token_buckets: Int32Array,
    limits: Int16Array,
    bins: UInt8Array,
    successes: Float64Array,
    trials: Float64Array,
    priors: Float64Array,
    workload_offset: Float64Array,
    request_offset: Float64Array,
    token_offset: Float64Array,
    strengths: Float64Array,
    bucket_of: UInt8Array,
    heads: Int16Array,
    hazards: Float32Array,
) -> None:
    """Posterior hazards [n, p, k] for the first ``limits`` [p, n] positions of every row.

    Those of an unknown bin are left as they are. The first ``heads[p, 1]`` of proposer p are those
    of proposer ``heads[p, 0]``.
    """
    for i in range(slots.shape[0]):
        w = workloads[i]
        for p in range(limits.shape[0]):
            if limits[p, i] == 0:
                continue
            for part in range(2):
                s = p if part == 1 else heads[p, 0]
                start = heads[p, 1] if part == 1 else 0
                stop = limits[p, i] if part == 1 else min(heads[p, 1], limits[p, i])
                if start >= stop:
                    continue
                label = np.exp(workload_offset[w, s, 0])
                offset = request_offset[slots[i], s, 0]
                odds = np.exp(offset)
                first = np.exp(offset + token_offset[s, token_buckets[i], 0])
                for j in range(start, stop):
                    b = bins[i, p, j]
                    if b == _UNKNOWN_BIN:
                        continue
                    q = bucket_of[j]
                    h = (successes[0, s, q, b] + priors[s, b] * strengths[0]) / (
                        trials[0, s, q, b] + strengths[0]
                    )
                    scaled = h * label
                    h = scaled / (scaled + (1.0 - h))
                    h = (successes[w, s, q, b] + h * strengths[1]) / (
                        trials[w, s, q, b] + strengths[1]
                    )
                    scaled = h * (first if j == 0 else odds)
                    h = scaled / (scaled + (1.0 - h))
                    hazards[i, p, j] = min(max(h, _LEAST_HAZARD), 1.0 - _LEAST_HAZARD)


@compiled
def _learn_row(
    w: int,
    p: int,
    start: int,
    num_success: int,
    missed: int,
    miss: float,
    weight: float,
    bins: UInt8Array,
    expected: Float32Array,
    request_offset: Float64Array,
    token_offset: Float64Array,
    successes: Float64Array,
    trials: Float64Array,
    fresh: Float64Array,
    priors: Float64Array,
    proposer_offset: Float64Array,
    workload_offset: Float64Array,
    drift: Float64Array,
    strengths: Float64Array,
    bucket_of: UInt8Array,
) -> int:
    """One censored observation from ``start`` on; returns 1 when it raised a drift alarm.

    After the successes comes, if ``missed`` is 1, a position that counts as accepted by ``miss``.
    ``weight`` is for what the requests of a step share: they are not independent, as when many
    begin at once.
    """
    keep = 1.0 - 1.0 / strengths[2]
    alarm = 0
    for j in range(start, num_success + missed):
        b = bins[j]
        if b == _UNKNOWN_BIN:
            continue
        q = bucket_of[j]
        hit = 1.0 if j < num_success else miss
        prior = priors[p, b]
        information = weight * prior * (1.0 - prior)
        proposer_offset[1] = min(proposer_offset[1] + information, strengths[11])
        proposer_offset[0] += weight * (hit - prior) / proposer_offset[1]
        if w > 0:
            h = (successes[0, p, q, b] + prior * strengths[0]) / (trials[0, p, q, b] + strengths[0])
            scaled = h * np.exp(workload_offset[0])
            pooled = scaled / (scaled + 1.0 - h)
            information = weight * pooled * (1.0 - pooled)
            workload_offset[1] = min(workload_offset[1] + information, strengths[13])
            workload_offset[0] += weight * (hit - pooled) / workload_offset[1]
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
        request_offset[1] = min(request_offset[1] + information, strengths[4])
        request_offset[0] += residual / request_offset[1]
        if j == 0:
            token_offset[1] = min(token_offset[1] + information, strengths[6])
            token_offset[0] += residual / token_offset[1]
        drift[w, p, 0] = max(0.0, drift[w, p, 0] + weight * (residual - strengths[7]))
        drift[w, p, 1] = max(0.0, drift[w, p, 1] - weight * (residual + strengths[7]))
        if max(drift[w, p, 0], drift[w, p, 1]) > strengths[8]:
            drift[w, p, :] = 0.0
            alarm = 1
    proposer_offset[0] = min(max(proposer_offset[0], -_MOST_OFFSET), _MOST_OFFSET)
    workload_offset[0] = min(max(workload_offset[0], -_MOST_OFFSET), _MOST_OFFSET)
    request_offset[0] = min(max(request_offset[0], -_MOST_OFFSET), _MOST_OFFSET)
    token_offset[0] = min(max(token_offset[0], -_MOST_OFFSET), _MOST_OFFSET)
    if alarm:
        for q in range(trials.shape[2]):
            for b in range(trials.shape[3]):
                trials[w, p, q, b] *= strengths[9]
                successes[w, p, q, b] *= strengths[9]
    return alarm


@compiled
def learn_rows(
    slots: Int32Array,
    workloads: Int32Array,
    token_buckets: Int32Array,
    known: NDArray[np.bool_],
    lookup: NDArray[np.bool_],
    proposer: Int16Array,
    verified: Int16Array,
    accepted: Int16Array,
    committed: Int16Array,
    matched: Int16Array,
    offer_lengths: Int16Array,
    asked: Int16Array,
    drafted: Int16Array,
    expected: Float32Array,
    bins: UInt8Array,
    hazards: Float32Array,
    successes: Float64Array,
    trials: Float64Array,
    fresh: Float64Array,
    raw_priors: Float64Array,
    priors: Float64Array,
    proposer_offset: Float64Array,
    workload_offset: Float64Array,
    request_offset: Float64Array,
    token_offset: Float64Array,
    drift: Float64Array,
    scratch: Float64Array,
    strengths: Float64Array,
    bucket_of: UInt8Array,
    heads: Int16Array,
) -> int:
    """Count one step's outcome; returns the number of drift alarms.

    ``known[i]`` is False for a request that ended meanwhile: its workload still learns. A lookup
    proposer learns from what it offered whoever drafted; a model from what was verified of it.
    Where a draft was cut behind its head, to less than was ``asked`` [n] for, the next position
    counts by what was ``expected`` [n, p, k] of it once it was ``drafted`` [n], and as rejected if
    it was not: before drafting, nobody knows how often there will be anything.
    """
    alarms = 0
    weight = min(1.0, _STEP_ROWS / max(slots.shape[0], 1))
    for i in range(slots.shape[0]):
        s = slots[i]
        for p in range(lookup.shape[0]):
            successes_seen = 0
            missed = 0
            miss = 0.0
            if lookup[p] and matched[p, i] >= 0:
                limit = min(offer_lengths[p, i], committed[i])
                successes_seen = min(matched[p, i], limit)
                missed = 1 if successes_seen < limit else 0
            elif proposer[i] == p:
                successes_seen = accepted[i]
                missed = 1 if accepted[i] < verified[i] else 0
                if missed == 0 and 0 < heads[p, 1] <= verified[i] < asked[i]:
                    missed = 1
                    miss = expected[i, p, verified[i]] if verified[i] < drafted[i] else 0.0
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
                    workloads[i],
                    t,
                    start,
                    kept,
                    stop - kept,
                    miss,
                    weight,
                    bins[i, p],
                    hazards[i, p],
                    request_offset[s, t] if known[i] else scratch,
                    token_offset[t, token_buckets[i]],
                    successes,
                    trials,
                    fresh,
                    priors,
                    proposer_offset[t],
                    workload_offset[workloads[i], t],
                    drift,
                    strengths,
                    bucket_of,
                )
    for p in range(lookup.shape[0]):
        odds = np.exp(proposer_offset[p, 0])
        for b in range(priors.shape[1]):
            scaled = raw_priors[p, b] * odds
            priors[p, b] = scaled / (scaled + 1.0 - raw_priors[p, b])
    return alarms


class HazardTable:
    """Counts and posterior hazards of every (workload, proposer), and each request's own record.

    ``lookup`` [p] marks proposers whose drafts exist beforehand, ``by_confidence`` [p] those whose
    evidence is their drafts' confidence. ``num_workloads`` rows include the pooled one; slots
    are the controller's rows per request. Proposer p shares its first ``heads[p, 1]`` positions
    with proposer ``heads[p, 0]``.
    """

    def __init__(
        self,
        lookup: NDArray[np.bool_],
        by_confidence: NDArray[np.bool_],
        num_workloads: int,
        num_slots: int,
        shrinkage: Shrinkage,
        heads: Int16Array | None = None,
    ) -> None:
        cells = (num_workloads, len(lookup), NUM_BUCKETS, NUM_BINS)
        self.lookup = lookup
        self.successes = np.zeros(cells)
        self.trials = np.zeros(cells)
        self.fresh = np.zeros((cells[0], cells[1], 2, cells[2], cells[3]))
        self._raw_priors = np.where(
            by_confidence[:, None], _confidence_prior()[None, :], _MODEL_PRIOR
        )
        self.priors = self._raw_priors.copy()
        self.proposer_offset = np.zeros((len(lookup), 2))
        self.proposer_offset[:, 1] = shrinkage.proposer
        self.workload_offset = np.zeros((num_workloads, len(lookup), 2))
        self.workload_offset[:, :, 1] = shrinkage.label
        self.request_offset = np.zeros((num_slots, len(lookup), 2))  # mean, precision
        self.token_offset = np.zeros((len(lookup), NUM_TOKEN_BUCKETS, 2))
        self.token_offset[:, :, 1] = shrinkage.token
        self.drift = np.zeros((num_workloads, len(lookup), 2))
        self._shrinkage = shrinkage
        self._strengths = shrinkage.as_array()
        self._scratch = np.ones(2)
        self._heads = np.zeros((len(lookup), 2), dtype=np.int16) if heads is None else heads

    def start(self, slot: int) -> None:
        """A new request: nothing is known of it."""
        self.request_offset[slot, :, 0] = 0.0
        self.request_offset[slot, :, 1] = self._shrinkage.request

    def grow(self, num_slots: int) -> None:
        """Make room for more requests."""
        more = np.ones((num_slots - len(self.request_offset), *self.request_offset.shape[1:]))
        self.request_offset = np.concatenate([self.request_offset, more])

    def evidence(
        self,
        offer_lengths: Int16Array,
        offer_confidence: Float32Array,
        bins: UInt8Array,
    ) -> None:
        """Write the evidence bins [n, p, k] of a batch: offers for lookups, context for models."""
        offer_bins(self.lookup, offer_lengths, offer_confidence, _BIN_OF, bins)

    def draft_evidence(
        self, confidence: Float32Array, limits: Int16Array, bins: UInt8Array
    ) -> None:
        """Write the bins of fresh drafts' confidences [n, k], up to the limits [p, n]."""
        draft_bins(confidence, limits, _BIN_OF, bins)

    def hazards(
        self,
        slots: Int32Array,
        workloads: Int32Array,
        token_buckets: Int32Array,
        limits: Int16Array,
        bins: UInt8Array,
        out: Float32Array,
    ) -> None:
        """Write the posterior hazards [n, p, k] of the first ``limits`` [p, n] positions."""
        fill_hazards(
            slots,
            workloads,
            token_buckets,
            limits,
            bins,
            self.successes,
            self.trials,
            self.priors,
            self.workload_offset,
            self.request_offset,
            self.token_offset,
            self._strengths,
            BUCKET_OF,
            self._heads,
            out,
        )

    def learn(
        self,
        slots: Int32Array,
        workloads: Int32Array,
        token_buckets: Int32Array,
        known: NDArray[np.bool_],
        proposer: Int16Array,
        verified: Int16Array,
        accepted: Int16Array,
        committed: Int16Array,
        matched: Int16Array,
        offer_lengths: Int16Array,
        bins: UInt8Array,
        hazards: Float32Array,
        asked: Int16Array | None = None,
        drafted: Int16Array | None = None,
        expected: Float32Array | None = None,
    ) -> int:
        """Count a step's outcome [n]; ``matched`` and ``offer_lengths`` are [p, n].

        ``asked``, ``drafted`` and ``expected`` tell of drafts that were cut (see ``learn_rows``).
        """
        return learn_rows(
            slots,
            workloads,
            token_buckets,
            known,
            self.lookup,
            proposer,
            verified,
            accepted,
            committed,
            matched,
            offer_lengths,
            verified if asked is None else asked,
            verified if drafted is None else drafted,
            hazards if expected is None else expected,
            bins,
            hazards,
            self.successes,
            self.trials,
            self.fresh,
            self._raw_priors,
            self.priors,
            self.proposer_offset,
            self.workload_offset,
            self.request_offset,
            self.token_offset,
            self.drift,
            self._scratch,
            self._strengths,
            BUCKET_OF,
            self._heads,
        )

    def load(
        self, workload: int, proposer: int, successes: Float64Array, trials: Float64Array
    ) -> None:
        """Add saved counts [bucket, bin] to a workload and to the pooled row, weight bounded."""
        heaviest = float(trials.max(initial=0.0))
        scale = min(1.0, self._shrinkage.cell_limit / heaviest) if heaviest > 0 else 0.0
        for row in {POOLED, workload}:
            self.successes[row, proposer] += successes * scale
            self.trials[row, proposer] += trials * scale
        pooled = self.trials[POOLED, proposer]
        fade = min(1.0, self._shrinkage.cell_limit / max(float(pooled.max()), 1.0))
        self.successes[POOLED, proposer] *= fade
        pooled *= fade

    def take_fresh(self, workload: int, proposer: int) -> Mapping[str, Float64Array]:
        """Counts [bucket, bin] since the last call, to be added to a profile."""
        successes, trials = self.fresh[workload, proposer].copy()
        self.fresh[workload, proposer] = 0.0
        return {"successes": successes, "trials": trials}

    def return_fresh(
        self, workload: int, proposer: int, successes: Float64Array, trials: Float64Array
    ) -> None:
        """Take back counts that could not be saved."""
        self.fresh[workload, proposer] += (successes, trials)


def _confidence_prior() -> Float64Array:
    """A raw confidence is taken at its word until it has been seen."""
    edges: Float64Array = np.array((0.0, *BIN_EDGES, 1.0))
    middles: Float64Array = (edges[1:] + edges[:-1]) / 2
    return middles
