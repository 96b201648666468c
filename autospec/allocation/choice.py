"""A choice of proposer and k for every request of a step, and what it is worth."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autospec.compiled import compiled_brief, inlined
from autospec.cost.coefficients import KNOTS, token_seconds
from autospec.cost.shapes import PADDED, SHAPES, STEPPED, round_up
from autospec.records import Float32Array, Float64Array, Int16Array, Int32Array, Int64Array

LEAST_STEP_SECONDS = 1e-12
"""A step that costs nothing has no goodput."""

NUM_BUCKETS = 512
"""Of gains, to sort them."""

_NOTHING_CAPTURED: Int32Array = np.zeros(0, dtype=np.int32)


class Prices(NamedTuple):
    """What the engine charges, in seconds, for one step.

    ``base`` is the target forward without its tokens, ``speculating`` what any draft adds to it,
    ``slopes`` the price of a token in each segment between ``coefficients.KNOTS``, ``draft`` [p, 4]
    what each model charges per step in use, per depth, per drafted and per caught-up token.
    ``shape`` is one of ``shapes.SHAPES``.
    """

    base: float
    speculating: float
    slopes: Float64Array
    draft: Float64Array
    shape: int = SHAPES["packed"]
    captured: Int32Array = _NOTHING_CAPTURED


class Aim(NamedTuple):
    """What is maximized: ``base_value`` is that of plain decoding, ``rate`` the price of a second.

    ``share`` [p] of a proposer's tokens will be verified: what is left after a second look.
    ``hold`` is the relative advantage that another set of models than ``held_depth`` [p] must have.
    """

    base_value: float
    latency: bool
    rate: float
    share: Float64Array
    held_depth: Int16Array
    hold: float


class Choice(NamedTuple):
    """``proposer`` [n], ``k`` [n] and ``depth`` [p].

    ``advantage`` [p] is the value above its price that would be lost without a proposer, ``alone``
    what it would bring without the others.
    """

    proposer: Int16Array
    k: Int16Array
    depth: Int16Array
    advantage: Float64Array
    alone: Float64Array

    @classmethod
    def empty(cls, num_proposers: int, n: int) -> Choice:
        """Room for one."""
        return cls(
            np.full(n, -1, dtype=np.int16),
            np.zeros(n, dtype=np.int16),
            np.zeros(num_proposers, dtype=np.int16),
            np.zeros(num_proposers),
            np.zeros(num_proposers),
        )


class Workspace(NamedTuple):
    """Room to solve steps of up to n requests in: the best choice so far, one on trial, scratch."""

    best: Choice
    trial: Choice
    surplus: Float64Array  # [p, k + 1, n]
    paying: Int16Array  # [p, n], positions worth their price
    best_lookup: Float64Array  # [n]
    worths: Float64Array  # [k + 1]
    capped: Int16Array  # [p, n]
    prices: Float64Array  # [p]
    models: Int64Array  # [p], the first of them
    deepest: Int16Array  # [p]
    pace: Int16Array  # [p]
    depth: Int16Array  # [p]
    counts: Int32Array  # [buckets + 1]
    sorted_gains: Float32Array  # [n * k]
    sorted_rows: Int32Array  # [n * k]
    found_gains: Float32Array  # [n * k]
    found_rows: Int32Array  # [n * k]

    @classmethod
    def empty(cls, num_proposers: int, n: int, positions: int) -> Workspace:
        """Room for up to ``n`` requests and drafts of ``positions`` tokens."""
        depths = np.zeros((3, num_proposers), dtype=np.int16)
        return cls(
            Choice.empty(num_proposers, n),
            Choice.empty(num_proposers, n),
            np.zeros((num_proposers, positions + 1, n)),
            np.zeros((num_proposers, n), dtype=np.int16),
            np.zeros(n),
            np.zeros(positions + 1),
            np.zeros((num_proposers, n), dtype=np.int16),
            np.zeros(num_proposers),
            np.zeros(num_proposers, dtype=np.int64),
            depths[0],
            depths[1],
            depths[2],
            np.zeros(NUM_BUCKETS + 1, dtype=np.int32),
            np.zeros(n * positions, dtype=np.float32),
            np.zeros(n * positions, dtype=np.int32),
            np.zeros(n * positions, dtype=np.float32),
            np.zeros(n * positions, dtype=np.int32),
        )


@inlined
def score_of(value: float, seconds: float, aim: Aim) -> float:
    """What is maximized, of a choice with this sum of gains."""
    if aim.latency:
        return 1.0 / (seconds * max(aim.base_value - value, 1e-9))
    if aim.rate > 0.0:
        return aim.base_value + value - aim.rate * seconds
    return (aim.base_value + value) / seconds


@compiled_brief
def evaluate(
    n: int,
    gains: Float32Array,
    stale: Float64Array,
    lookup: NDArray[np.bool_],
    prices: Prices,
    share: Float64Array,
    choice: Choice,
) -> tuple[float, float]:
    """(sum of gains, seconds) of a choice; its ``depth`` becomes what it really uses."""
    proposer, k, depth, draft = choice.proposer, choice.k, choice.depth, prices.draft
    value = 0.0
    seconds = prices.base
    depth[:] = 0
    verified = 0.0
    longest = 0
    for i in range(n):
        p = proposer[i]
        if p < 0:
            continue
        for j in range(k[i]):
            value += gains[i, p, j]
        verified += share[p] * k[i]
        longest = max(longest, k[i])
        if not lookup[p]:
            depth[p] = max(depth[p], k[i])
            seconds += draft[p, 2] * k[i] + draft[p, 3] * stale[p, i]
    for p in range(depth.shape[0]):
        if depth[p] > 0:
            seconds += draft[p, 0] + draft[p, 1] * depth[p]
    if verified > 0.0:
        seconds += prices.speculating
    tokens = n + verified
    if prices.shape == PADDED:
        tokens = float(n * (1 + longest))
    elif prices.shape == STEPPED:
        tokens = float(round_up(int(np.ceil(tokens)), prices.captured))
    return value, max(seconds + token_seconds(tokens, prices.slopes, KNOTS), LEAST_STEP_SECONDS)


@compiled_brief
def copy_choice(n: int, trial: Choice, best: Choice) -> None:
    """Copy a choice."""
    proposer, k, depth = best.proposer, best.k, best.depth
    advantage, alone = best.advantage, best.alone
    trial_proposer, trial_k, trial_depth = trial.proposer, trial.k, trial.depth
    trial_advantage, trial_alone = trial.advantage, trial.alone
    for i in range(n):
        proposer[i] = trial_proposer[i]
        k[i] = trial_k[i]
    for p in range(depth.shape[0]):
        depth[p] = trial_depth[p]
        advantage[p] = trial_advantage[p]
        alone[p] = trial_alone[p]
