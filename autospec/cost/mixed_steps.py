"""What steps that also prefill tell of decoding, for engines in which hardly any other step comes.

Their times are regressed on what they decoded and on their prompt tokens together, so prefill is
not charged to speculation. With the price of a prompt token eliminated (the Schur complement of its
row), the rest are normal equations like those of other steps, to be added to them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from autospec.compiled import by_reference, compiled_brief
from autospec.cost.regression import CostArrays, set_pace, solve_coefficients, step_features
from autospec.records import Float64Array

_MEMORY_STEPS = 256.0
_IN_A_ROW = 8.0  # such steps before they are all there is to learn from
_SWEEPS = 10
_LARGEST_ERROR = 0.5  # of a step's time, relative to what was expected, that counts in full
_STREAK, _OTHERS, _IS_ADDED, _PRICE = range(4)


class MixedArrays(NamedTuple):
    """Normal equations over f features and, last, prompt tokens; and what of them was added.

    ``state`` holds how many such steps came in a row, how many others had come before, whether
    anything is added, and the price of a prompt token in seconds.
    """

    gram: Float64Array  # [f + 1, f + 1]
    moment: Float64Array  # [f + 1]
    added_gram: Float64Array  # [f, f]
    added_moment: Float64Array  # [f]
    row: Float64Array  # [f + 1], scratch
    state: Float64Array  # [4]


class MixedSteps:
    """The latest steps that also prefill; kernels take them by ``reference``."""

    def __init__(self, size: int) -> None:
        self._arrays = MixedArrays(
            np.zeros((size + 1, size + 1)),
            np.zeros(size + 1),
            np.zeros((size, size)),
            np.zeros(size),
            np.zeros(size + 1),
            np.zeros(4),
        )
        self.reference = by_reference(self._arrays)

    @property
    def are_all(self) -> bool:
        """Whether hardly any other step comes."""
        return bool(self._arrays.state[_STREAK] >= _IN_A_ROW)

    @property
    def prefill_token_seconds(self) -> float:
        """The price of a prompt token that fits best, given what decoding takes."""
        return float(self._arrays.state[_PRICE])

    def forget(self, model: CostArrays) -> None:
        """The times of all steps have changed; ``model`` is by reference."""
        _take_from(model, self.reference)
        self._arrays.gram[:] = 0.0
        self._arrays.moment[:] = 0.0


@compiled_brief
def learn_beside_prefill(
    model: CostArrays,
    mixed: MixedArrays,
    tokens: float,
    requests: float,
    context: float,
    speculating: bool,
    depth: Float64Array,
    draft_tokens: Float64Array,
    catch_up_tokens: Float64Array,
    seconds: float,
    draft_seconds: Float64Array,
    prefill_tokens: float,
) -> None:
    """Learn from a step that also read prompts. ``draft_seconds`` [p] are zeros if not told apart.

    What it tells of decoding is added to the model's normal equations in place of what was added
    before; nothing unless such steps are all there is.
    """
    gram, moment, row, state = mixed.gram, mixed.moment, mixed.row, mixed.state
    drafting = draft_seconds.sum()
    is_told_apart = 0.0 < drafting < seconds
    if is_told_apart:
        seconds -= drafting
    step_features(
        model, tokens, requests, context, speculating, depth, draft_tokens, catch_up_tokens,
        is_told_apart,
    )  # fmt: skip
    f = model.x.shape[0]
    expected = state[_PRICE] * prefill_tokens
    for i in range(f):
        row[i] = model.x[i]
        expected += row[i] * model.beta[i]
    row[f] = prefill_tokens
    others = model.health[0, 2]
    state[_STREAK] = state[_STREAK] + 1.0 if others == state[_OTHERS] else 1.0
    state[_OTHERS] = others
    error = abs(seconds / expected - 1.0) if expected > 0.0 else 0.0
    trust = _LARGEST_ERROR / max(error, _LARGEST_ERROR)
    weight = trust / max(seconds, expected) ** 2
    keep = 1.0 - 1.0 / _MEMORY_STEPS
    for i in range(f + 1):
        weighted = weight * row[i]
        moment[i] = keep * moment[i] + weighted * seconds
        for j in range(f + 1):
            gram[i, j] = keep * gram[i, j] + weighted * row[j]
    _take_from(model, mixed)
    if state[_STREAK] >= _IN_A_ROW:
        _add_to(model, mixed)
        solve_coefficients(
            model.gram, model.moment, model.precision, model.target, model.steady, _SWEEPS
        )
        set_pace(model)
    rest = moment[f]
    for i in range(f):
        rest -= gram[f, i] * model.beta[i]
    state[_PRICE] = max(0.0, float(rest / gram[f, f]))


@compiled_brief
def _add_to(model: CostArrays, mixed: MixedArrays) -> None:
    """Add what such steps tell of decoding to the model's normal equations."""
    gram, moment = mixed.gram, mixed.moment
    f = model.x.shape[0]
    for i in range(f):
        share = gram[i, f] / gram[f, f]
        mixed.added_moment[i] = moment[i] - share * moment[f]
        model.moment[i] += mixed.added_moment[i]
        for j in range(f):
            mixed.added_gram[i, j] = gram[i, j] - share * gram[j, f]
            model.gram[i, j] += mixed.added_gram[i, j]
    mixed.state[_IS_ADDED] = 1.0


@compiled_brief
def _take_from(model: CostArrays, mixed: MixedArrays) -> None:
    """Take out of the model's normal equations what was added."""
    if mixed.state[_IS_ADDED] == 0.0:
        return
    for i in range(model.x.shape[0]):
        model.moment[i] -= mixed.added_moment[i]
        for j in range(model.x.shape[0]):
            model.gram[i, j] -= mixed.added_gram[i, j]
    mixed.state[_IS_ADDED] = 0.0
