"""How likely draft tokens are to be accepted: calibrated hazards per position, at three levels.

A hazard is P(position j is accepted | the positions before it were). Its evidence is a bin: the raw
confidence of a lookup draft's token, or, for a model that has not drafted yet, what is known of the
request (``context_bins``). Counts are kept per (workload, proposer, position bucket, bin) and pooled
over workloads; a Beta posterior shrinks a workload's cell towards the pooled one, and that towards
a prior. A request's own record then moves the odds by (observed + m) / (expected + m), successes and
failures apart. Survival S_j is the running product of hazards.

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
NUM_CONTEXTS = 10
"""Evidence bins in use for a model before it drafts; see ``context_bins``."""

_LUT_STEPS = 1000
_BIN_OF = np.searchsorted(
    np.array(BIN_EDGES), (np.arange(_LUT_STEPS + 1) + 0.5) / _LUT_STEPS
).astype(np.uint8)
_BUCKET_OF = np.array([0, 1, 2, 3, 4, 4, 5, 5, 6, 6, 6, 6] + [7] * 244, dtype=np.uint8)

_MODEL_PRIOR = 0.7  # optimistic: a proposer nobody has seen is worth a look


@dataclass(frozen=True, slots=True)
class Shrinkage:
    """Strengths of the priors and of memory, all in observations.

    ``cell_limit`` and ``request_limit`` bound the weight of what was seen: older observations fade
    as new ones of the same kind arrive, never because of others.
    """

    prior: float = 4.0
    workload: float = 24.0
    request: float = 6.0
    cell_limit: float = 1500.0
    request_limit: float = 48.0
    drift_slack: float = 0.08
    drift_threshold: float = 20.0
    drift_keep: float = 0.1

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
def context_bins(
    slots: Int32Array,
    lookup: NDArray[np.bool_],
    offer_lengths: Int16Array,
    bins: UInt8Array,
    streak: Int16Array,
) -> None:
    """Evidence for models before they draft: the best lookup offer, and the last outcome.

    A request whose tokens continue an earlier passage is easier for a model as well; so is one
    whose last draft was kept whole. Bin = 2 * level of the best first confidence + kept whole.
    """
    for i in range(slots.shape[0]):
        best = 0
        for p in range(lookup.shape[0]):
            if lookup[p] and offer_lengths[p, i] > 0:
                b = bins[i, p, 0]
                level = 1 + (1 if b >= 4 else 0) + (1 if b >= 7 else 0) + (1 if b >= 11 else 0)
                best = max(best, level)
        context = 2 * best + (1 if streak[slots[i]] > 0 else 0)
        for p in range(lookup.shape[0]):
            if not lookup[p]:
                for j in range(bins.shape[2]):
                    bins[i, p, j] = context


@compiled
def fill_hazards(
    slots: Int32Array,
    workloads: Int32Array,
    limits: Int16Array,
    bins: UInt8Array,
    successes: Float64Array,
    trials: Float64Array,
    priors: Float64Array,
    record: Float64Array,
    strengths: Float64Array,
    bucket_of: UInt8Array,
    hazards: Float32Array,
) -> None:
    """Posterior hazards [n, p, k] for the first ``limits`` [p, n] positions of every row."""
    for i in range(slots.shape[0]):
        s = slots[i]
        w = workloads[i]
        for p in range(limits.shape[0]):
            up = (record[s, p, 0] + strengths[2]) / (record[s, p, 1] + strengths[2])
            down = (record[s, p, 2] + strengths[2]) / (record[s, p, 3] + strengths[2])
            for j in range(limits[p, i]):
                b = bins[i, p, j]
                q = bucket_of[j]
                h = (successes[0, p, q, b] + priors[p, b] * strengths[0]) / (
                    trials[0, p, q, b] + strengths[0]
                )
                h = (successes[w, p, q, b] + h * strengths[1]) / (trials[w, p, q, b] + strengths[1])
                scaled = h * up
                hazards[i, p, j] = scaled / (scaled + (1.0 - h) * down)


@compiled
def _learn_row(
    w: int,
    p: int,
    num_success: int,
    failed: bool,
    bins: UInt8Array,
    expected: Float32Array,
    record: Float64Array,
    successes: Float64Array,
    trials: Float64Array,
    fresh: Float64Array,
    drift: Float64Array,
    strengths: Float64Array,
    bucket_of: UInt8Array,
) -> int:
    """One censored observation; returns 1 when it raised a drift alarm."""
    keep = 1.0 - 1.0 / strengths[3]
    alarm = 0
    total = num_success + (1 if failed else 0)
    for j in range(total):
        b = bins[j]
        q = bucket_of[j]
        hit = 1.0 if j < num_success else 0.0
        for level in range(2):
            row = w if level == 1 else 0
            if level == 1 and w == 0:
                continue
            trials[row, p, q, b] = trials[row, p, q, b] * keep + 1.0
            successes[row, p, q, b] = successes[row, p, q, b] * keep + hit
        fresh[w, p, 0, q, b] += hit
        fresh[w, p, 1, q, b] += 1.0
        h = expected[j]
        record[0] += hit
        record[1] += h
        record[2] += 1.0 - hit
        record[3] += 1.0 - h
        residual = hit - h
        drift[w, p, 0] = max(0.0, drift[w, p, 0] + residual - strengths[5])
        drift[w, p, 1] = max(0.0, drift[w, p, 1] - residual - strengths[5])
        if max(drift[w, p, 0], drift[w, p, 1]) > strengths[6]:
            drift[w, p, 0] = 0.0
            drift[w, p, 1] = 0.0
            alarm = 1
    weight = record[1] + record[3]
    if weight > strengths[4]:
        fade = strengths[4] / weight
        for c in range(4):
            record[c] *= fade
    if alarm:
        for q in range(trials.shape[2]):
            for b in range(trials.shape[3]):
                trials[w, p, q, b] *= strengths[7]
                successes[w, p, q, b] *= strengths[7]
    return alarm


@compiled
def learn_rows(
    slots: Int32Array,
    workloads: Int32Array,
    known: NDArray[np.bool_],
    lookup: NDArray[np.bool_],
    proposer: Int16Array,
    verified: Int16Array,
    accepted: Int16Array,
    committed: Int16Array,
    matched: Int16Array,
    offer_lengths: Int16Array,
    bins: UInt8Array,
    hazards: Float32Array,
    successes: Float64Array,
    trials: Float64Array,
    fresh: Float64Array,
    record: Float64Array,
    drift: Float64Array,
    streak: Int16Array,
    scratch: Float64Array,
    strengths: Float64Array,
    bucket_of: UInt8Array,
) -> int:
    """Count one step's outcome; returns the number of drift alarms.

    ``known[i]`` is False for a request that ended meanwhile: its workload still learns. A lookup
    proposer learns from what it offered whoever drafted; a model from what was verified of it.
    """
    alarms = 0
    for i in range(slots.shape[0]):
        s = slots[i]
        for p in range(lookup.shape[0]):
            successes_seen = 0
            failed = False
            if lookup[p] and matched[p, i] >= 0:
                limit = min(offer_lengths[p, i], committed[i])
                successes_seen = min(matched[p, i], limit)
                failed = successes_seen < limit
            elif proposer[i] == p:
                successes_seen = accepted[i]
                failed = accepted[i] < verified[i]
            if successes_seen == 0 and not failed:
                continue
            alarms += _learn_row(
                workloads[i],
                p,
                successes_seen,
                failed,
                bins[i, p],
                hazards[i, p],
                record[s, p] if known[i] else scratch,
                successes,
                trials,
                fresh,
                drift,
                strengths,
                bucket_of,
            )
        if known[i] and verified[i] > 0 and proposer[i] >= 0 and not lookup[proposer[i]]:
            streak[s] = 1 if accepted[i] == verified[i] else 0
    return alarms


class HazardTable:
    """Counts and posterior hazards of every (workload, proposer), and each request's own record.

    ``lookup`` [p] marks proposers whose drafts exist beforehand, ``by_confidence`` [p] those whose
    evidence is their drafts' confidence. ``num_workloads`` rows include the pooled one; slots
    are the controller's rows per request.
    """

    def __init__(
        self,
        lookup: NDArray[np.bool_],
        by_confidence: NDArray[np.bool_],
        num_workloads: int,
        num_slots: int,
        shrinkage: Shrinkage,
    ) -> None:
        cells = (num_workloads, len(lookup), NUM_BUCKETS, NUM_BINS)
        self.lookup = lookup
        self.successes = np.zeros(cells)
        self.trials = np.zeros(cells)
        self.fresh = np.zeros((cells[0], cells[1], 2, cells[2], cells[3]))
        self.priors = np.where(by_confidence[:, None], _confidence_prior()[None, :], _MODEL_PRIOR)
        self.record = np.zeros((num_slots, len(lookup), 4))
        self.drift = np.zeros((num_workloads, len(lookup), 2))
        self.streak = np.zeros(num_slots, dtype=np.int16)
        self._strengths = shrinkage.as_array()
        self._scratch = np.zeros(4)

    def start(self, slot: int) -> None:
        """A new request: its record is empty."""
        self.record[slot] = 0.0
        self.streak[slot] = 0

    def grow(self, num_slots: int) -> None:
        """Make room for more requests."""
        self.record = np.concatenate(
            [self.record, np.zeros((num_slots - len(self.record), *self.record.shape[1:]))]
        )
        self.streak = np.concatenate(
            [self.streak, np.zeros(num_slots - len(self.streak), dtype=np.int16)]
        )

    def evidence(
        self,
        slots: Int32Array,
        offer_lengths: Int16Array,
        offer_confidence: Float32Array,
        bins: UInt8Array,
    ) -> None:
        """Write the evidence bins [n, p, k] of a batch: offers for lookups, context for models."""
        for p in np.flatnonzero(self.lookup):
            confidence_bins(offer_confidence[p], offer_lengths[p], _BIN_OF, bins, p)
        context_bins(slots, self.lookup, offer_lengths, bins, self.streak)

    def draft_evidence(
        self, confidence: Float32Array, limits: Int16Array, bins: UInt8Array
    ) -> None:
        """Write the bins of fresh drafts' confidences [n, k], up to each proposer's limits [p, n]."""
        for p in range(limits.shape[0]):
            confidence_bins(confidence, limits[p], _BIN_OF, bins, p)

    def hazards(
        self,
        slots: Int32Array,
        workloads: Int32Array,
        limits: Int16Array,
        bins: UInt8Array,
        out: Float32Array,
    ) -> None:
        """Write the posterior hazards [n, p, k] of the first ``limits`` [p, n] positions."""
        fill_hazards(
            slots,
            workloads,
            limits,
            bins,
            self.successes,
            self.trials,
            self.priors,
            self.record,
            self._strengths,
            _BUCKET_OF,
            out,
        )

    def learn(
        self,
        slots: Int32Array,
        workloads: Int32Array,
        known: NDArray[np.bool_],
        proposer: Int16Array,
        verified: Int16Array,
        accepted: Int16Array,
        committed: Int16Array,
        matched: Int16Array,
        offer_lengths: Int16Array,
        bins: UInt8Array,
        hazards: Float32Array,
    ) -> int:
        """Count a step's outcome [n]; ``matched`` and ``offer_lengths`` are [p, n]."""
        return learn_rows(
            slots,
            workloads,
            known,
            self.lookup,
            proposer,
            verified,
            accepted,
            committed,
            matched,
            offer_lengths,
            bins,
            hazards,
            self.successes,
            self.trials,
            self.fresh,
            self.record,
            self.drift,
            self.streak,
            self._scratch,
            self._strengths,
            _BUCKET_OF,
        )

    def load(self, workload: int, proposer: int, successes: Float64Array, trials: Float64Array) -> None:
        """Add saved counts [bucket, bin] to a workload and to the pooled row, weight bounded."""
        heaviest = float(trials.max(initial=0.0))
        scale = min(1.0, self._strengths[3] / heaviest) if heaviest > 0 else 0.0
        for row in {POOLED, workload}:
            self.successes[row, proposer] += successes * scale
            self.trials[row, proposer] += trials * scale

    def take_fresh(self, workload: int, proposer: int) -> Mapping[str, Float64Array]:
        """Counts [bucket, bin] since the last call, to be added to a profile."""
        successes, trials = self.fresh[workload, proposer].copy()
        self.fresh[workload, proposer] = 0.0
        return {"successes": successes, "trials": trials}


def survivals(hazards: Float64Array) -> Float64Array:
    """S_j [k]: the running product of hazards [k]."""
    return np.cumprod(hazards)


def _confidence_prior() -> Float64Array:
    """A raw confidence is taken at its word until it has been seen."""
    edges = np.array((0.0, *BIN_EDGES, 1.0))
    return (edges[1:] + edges[:-1]) / 2
