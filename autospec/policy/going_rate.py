"""What a second is worth: long-run goodput, relative to plain decoding, by load and workload."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from autospec.compiled import compiled
from autospec.octave import NUM_OCTAVES, octave_of
from autospec.records import Float64Array, Int16Array, Int32Array

_WINDOW_STEPS = 512.0
_LEAST_STEPS = 12.0
_MOST_WEIGHT = 8.0


@compiled
def _note(
    workloads: Int32Array,
    committed: Int16Array,
    plain_steps: float,
    tokens: Float64Array,
    worth: Float64Array,
    steps: Float64Array,
    rows: Float64Array,
) -> None:
    """Fade and add a step to the workloads [w] that take part in it; ``rows`` [w] is scratch."""
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


@compiled
def _weigh(
    workloads: Int32Array,
    tokens: Float64Array,
    worth: Float64Array,
    steps: Float64Array,
    weights: Float64Array,
) -> float:
    """Mean rate of the rows [n] that are known, 0 without any; ``weights`` are mean over own."""
    total = 0.0
    known = 0
    for i in range(workloads.shape[0]):
        w = workloads[i]
        weights[i] = 0.0
        if steps[w] >= _LEAST_STEPS:
            weights[i] = max(1.0, tokens[w] / worth[w])
            total += weights[i]
            known += 1
    if known == 0:
        weights[:] = 1.0
        return 0.0
    mean = total / known
    for i in range(workloads.shape[0]):
        own = weights[i] if weights[i] > 0.0 else mean
        weights[i] = min(max(mean / own, 1.0 / _MOST_WEIGHT), _MOST_WEIGHT)
    return mean


class GoingRate:
    """Committed tokens of a row per plain-equivalent of time, by octave of load and workload.

    A second of a step holds up all of its rows, and each of them is held up by the tokens it would
    have made meanwhile. A token saves its request the time that it takes there to make one: a
    request that is hard to draft for, and so stays long, gains more by it than an easy one. So a
    token weighs the mean rate of the batch over the rate of its own workload.
    """

    def __init__(self) -> None:
        self._make(1)

    def note(self, workloads: Int32Array, committed: Int16Array, plain_steps: float) -> None:
        """A step took as long as ``plain_steps`` plain ones; rows are [n]."""
        most = int(workloads.max(initial=0)) + 1
        if most > self._tokens.shape[1]:
            self._grow(most)
        octave = octave_of(len(workloads))
        _note(
            workloads, committed, plain_steps, self._tokens[octave], self._worth[octave],
            self._steps[octave], self._rows,
        )  # fmt: skip

    def tokens_per_second(
        self, workloads: Int32Array, plain_seconds: float, weights: Float64Array
    ) -> float:
        """The going rate of a batch; 0 while too little was seen of it. Fills ``weights`` [n].

        Never below plain decoding's, which is always to be had: else a loss would make time look
        cheap, and so justify itself.
        """
        if not plain_seconds > 0.0:
            weights[:] = 1.0
            return 0.0
        most = int(workloads.max(initial=0)) + 1
        if most > self._tokens.shape[1]:
            self._grow(most)
        n = len(workloads)
        octave = octave_of(n)
        mean = _weigh(
            workloads, self._tokens[octave], self._worth[octave], self._steps[octave], weights
        )
        return mean * n / plain_seconds

    def _make(self, num_workloads: int) -> None:
        self._tokens = np.zeros((NUM_OCTAVES, num_workloads))
        self._worth = np.zeros((NUM_OCTAVES, num_workloads))
        self._steps = np.zeros((NUM_OCTAVES, num_workloads))
        self._rows = np.zeros(num_workloads)

    def _grow(self, num_workloads: int) -> None:
        old = self._tokens, self._worth, self._steps
        known = self._tokens.shape[1]
        self._make(2 * num_workloads)
        for array, before in zip((self._tokens, self._worth, self._steps), old, strict=True):
            array[:, :known] = before

    def state(self) -> Mapping[str, Any]:
        """Everything, as JSON."""
        return {
            "tokens": self._tokens.tolist(),
            "worth": self._worth.tolist(),
            "steps": self._steps.tolist(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved ``state``."""
        self._make(len(state["tokens"][0]))
        self._tokens[:] = state["tokens"]
        self._worth[:] = state["worth"]
        self._steps[:] = state["steps"]
