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

from autospec.acceptance.hazards import (
    BIN_EDGES,
    NUM_BINS,
    NUM_BUCKETS,
    NUM_TOKEN_BUCKETS,
    HazardArrays,
)
from autospec.records import Float64Array, Int16Array

LAYOUT = "acceptance/1"
POOLED = 0
"""Workload row in which everything is counted together."""

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
        raw_priors = np.where(by_confidence[:, None], _confidence_prior()[None, :], _MODEL_PRIOR)
        self.arrays = HazardArrays(
            lookup,
            np.zeros((len(lookup), 2), dtype=np.int16) if heads is None else heads,
            np.zeros(cells),
            np.zeros(cells),
            np.zeros((cells[0], cells[1], 2, cells[2], cells[3])),
            raw_priors,
            raw_priors.copy(),
            _unmoved((len(lookup),), shrinkage.proposer),
            _unmoved((num_workloads, len(lookup)), shrinkage.label),
            np.zeros((num_slots, len(lookup), 2)),
            _unmoved((len(lookup), NUM_TOKEN_BUCKETS), shrinkage.token),
            np.zeros((num_workloads, len(lookup), 2)),
            np.ones(2),
            shrinkage.as_array(),
            np.zeros(cells),
            np.zeros(cells, dtype=np.int64),
            np.zeros(1, dtype=np.int64),
            np.zeros((len(lookup), 2)),
        )
        self._shrinkage = shrinkage

    def start(self, slot: int) -> None:
        """A new request: nothing is known of it."""
        self.arrays.request_offset[slot, :, 0] = 0.0
        self.arrays.request_offset[slot, :, 1] = self._shrinkage.request

    def grow(self, num_slots: int) -> None:
        """Make room for more requests."""
        known = self.arrays.request_offset
        more = np.ones((num_slots - len(known), *known.shape[1:]))
        self.arrays = self.arrays._replace(request_offset=np.concatenate([known, more]))

    def load(
        self, workload: int, proposer: int, successes: Float64Array, trials: Float64Array
    ) -> None:
        """Add saved counts [bucket, bin] to a workload and to the pooled row, weight bounded."""
        heaviest = float(trials.max(initial=0.0))
        scale = min(1.0, self._shrinkage.cell_limit / heaviest) if heaviest > 0 else 0.0
        for row in {POOLED, workload}:
            self.arrays.successes[row, proposer] += successes * scale
            self.arrays.trials[row, proposer] += trials * scale
        pooled = self.arrays.trials[POOLED, proposer]
        fade = min(1.0, self._shrinkage.cell_limit / max(float(pooled.max()), 1.0))
        self.arrays.successes[POOLED, proposer] *= fade
        pooled *= fade

    def take_fresh(self, workload: int, proposer: int) -> Mapping[str, Float64Array]:
        """Counts [bucket, bin] since the last call, to be added to a profile."""
        successes, trials = self.arrays.fresh[workload, proposer].copy()
        self.arrays.fresh[workload, proposer] = 0.0
        return {"successes": successes, "trials": trials}

    def return_fresh(
        self, workload: int, proposer: int, successes: Float64Array, trials: Float64Array
    ) -> None:
        """Take back counts that could not be saved."""
        self.arrays.fresh[workload, proposer] += (successes, trials)


def _unmoved(shape: tuple[int, ...], precision: float) -> Float64Array:
    """Offsets of nothing yet [..., (mean, precision)]."""
    offsets = np.zeros((*shape, 2))
    offsets[..., 1] = precision
    return offsets


def _confidence_prior() -> Float64Array:
    """A raw confidence is taken at its word until it has been seen."""
    edges: Float64Array = np.array((0.0, *BIN_EDGES, 1.0))
    middles: Float64Array = (edges[1:] + edges[:-1]) / 2
    return middles
