"""What a second is worth: long-run goodput, relative to plain decoding, by load and workload."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from autospec.compiled import compiled_brief
from autospec.octave import NUM_OCTAVES
from autospec.records import Float64Array, Int16Array, Int32Array

_WINDOW_STEPS = 512.0
_LEAST_STEPS = 12.0
_MOST_WEIGHT = 8.0


class RateArrays(NamedTuple):
    """Committed tokens, what they took in plain steps, and steps, by octave of load and workload.

    ``rows`` [w] is scratch.
    """

    tokens: Float64Array  # [octave, w]
    worth: Float64Array  # [octave, w]
    steps: Float64Array  # [octave, w]
    rows: Float64Array  # [w]

    @classmethod
    def empty(cls, num_workloads: int) -> RateArrays:
        """Nothing seen yet."""
        sums = np.zeros((3, NUM_OCTAVES, num_workloads))
        return cls(sums[0], sums[1], sums[2], np.zeros(num_workloads))


@compiled_brief
def knows_all(rate: RateArrays, workloads: Int32Array) -> bool:
    """Whether there is room for all of these workloads."""
    most = -1
    for i in range(workloads.shape[0]):
        most = max(most, workloads[i])
    return bool(most < rate.rows.shape[0])


@compiled_brief
def note_rate(
    rate: RateArrays,
    octave: int,
    workloads: Int32Array,
    committed: Int16Array,
    plain_steps: float,
) -> None:
    """A step of rows [n] took as long as ``plain_steps`` plain ones."""
    tokens, worth, steps = rate.tokens[octave], rate.worth[octave], rate.steps[octave]
    rows = rate.rows
    keep = 1.0 - 1.0 / _WINDOW_STEPS
    rows[:] = 0.0
    for i in range(workloads.shape[0]):
        w = workloads[i]
        if rows[w] == 0.0:
            tokens[w] *= keep
            worth[w] *= keep
            steps[w] = steps[w] * keep + 1.0
        rows[w] += 1.0
        tokens[w] += committed[i]
        worth[w] += plain_steps


@compiled_brief
def tokens_per_second(
    rate: RateArrays,
    octave: int,
    workloads: Int32Array,
    plain_seconds: float,
    weights: Float64Array,
) -> float:
    """The going rate of a batch; 0 while too little was seen of it. Fills ``weights`` [n].

    Never below plain decoding's, which is always to be had: else a loss would make time look
    cheap, and so justify itself.
    """
    tokens, worth, steps = rate.tokens[octave], rate.worth[octave], rate.steps[octave]
    n = workloads.shape[0]
    total = 0.0
    known = 0
    for i in range(n):
        w = workloads[i]
        weights[i] = 0.0
        if w < steps.shape[0] and steps[w] >= _LEAST_STEPS:
            weights[i] = max(1.0, tokens[w] / worth[w])
            total += weights[i]
            known += 1
    if known == 0 or not plain_seconds > 0.0:
        weights[:] = 1.0
        return 0.0
    mean = total / known
    for i in range(n):
        own = weights[i] if weights[i] > 0.0 else mean
        weights[i] = min(max(mean / own, 1.0 / _MOST_WEIGHT), _MOST_WEIGHT)
    return float(mean * n / plain_seconds)


class GoingRate:
    """Committed tokens of a row per plain-equivalent of time, by octave of load and workload.

    A second of a step holds up all of its rows, and each of them is held up by the tokens it would
    have made meanwhile. A token saves its request the time that it takes there to make one: a
    request that is hard to draft for, and so stays long, gains more by it than an easy one. So a
    token weighs the mean rate of the batch over the rate of its own workload.
    """

    def __init__(self) -> None:
        self.arrays = RateArrays.empty(1)

    def grow(self, workloads: Int32Array) -> None:
        """Make room for all of these workloads."""
        old = self.arrays
        self.arrays = RateArrays.empty(2 * (int(workloads.max()) + 1))
        for array, before in zip(self.arrays[:3], old[:3], strict=True):
            array[:, : before.shape[1]] = before

    def state(self) -> Mapping[str, Any]:
        """Everything, as JSON."""
        return {
            "tokens": self.arrays.tokens.tolist(),
            "worth": self.arrays.worth.tolist(),
            "steps": self.arrays.steps.tolist(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved ``state``."""
        self.arrays = RateArrays.empty(len(state["tokens"][0]))
        self.arrays.tokens[:] = state["tokens"]
        self.arrays.worth[:] = state["worth"]
        self.arrays.steps[:] = state["steps"]
