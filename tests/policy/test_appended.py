from __future__ import annotations

import json

import numpy as np
import pytest

from autospec.allocation.gains import throughput_gains
from autospec.cost.coefficients import KNOTS
from autospec.octave import octave_of
from autospec.policy.appended import (
    Appended,
    fold_appended,
    note_appended,
    unfold_appended,
)
from autospec.policy.promise import APPENDED, NUM_PROMISES, PRICE
from autospec.records import Float32Array, Float64Array, Int16Array, ProposerInfo

PROPOSERS = (
    ProposerInfo("head", "sequential", 2),
    ProposerInfo("both", "parallel", 6, head="head", head_k=2),
)
ROWS = 4
LIMITS = np.array([[2] * ROWS, [6] * ROWS], dtype=np.int16)
OCTAVE = octave_of(ROWS)
RATE = 100.0
SLOPE = 0.001  # a token costs a tenth of one at that rate
SLOPES, DRAFT = np.full(len(KNOTS), SLOPE), np.zeros((2, 4))
GUESS = 1.0 / (1.0 + 14.0 * RATE * SLOPE)
BEHIND = 0.125 + 0.0625 + 0.03125 + 0.015625  # tokens a row, expected behind the head


def plan(
    appended: Appended, limits: Int16Array = LIMITS, rate: float = RATE
) -> tuple[Float32Array, Float32Array, Float64Array, Int16Array]:
    """Gains [n, p, k] before and after, what is appended [p, n], the limits without it [p, n]."""
    hazards = np.full((ROWS, 2, 6), 0.5, dtype=np.float32)
    gains = np.zeros_like(hazards)
    throughput_gains(hazards, limits, np.ones(hazards.shape[1]), np.ones(ROWS), gains)
    before = gains.copy()
    gross, within = np.zeros(limits.shape), np.zeros_like(limits)
    fold_appended(appended.arrays, OCTAVE, ROWS, limits, gains, SLOPES, DRAFT, rate, gross, within)
    return before, gains, gross, within


def unfold(appended: Appended, k: list[int]) -> tuple[list[int], Float64Array]:
    """What is drafted if the policy takes ``k`` [n] tokens of each head, and what is promised."""
    taken, proposer = np.array(k, dtype=np.int16), np.ones(ROWS, dtype=np.int16)
    gross, promised = plan(appended)[2], np.zeros((NUM_PROMISES, 2))
    unfold_appended(
        appended.arrays, ROWS, LIMITS, SLOPES, DRAFT, RATE, gross, proposer, taken, promised
    )
    drafted: list[int] = taken.tolist()
    return drafted, promised


def share(appended: Appended, rate: float = RATE) -> float:
    """Of the appended gain, what counts as the head's."""
    before, after, gross, _ = plan(appended, rate=rate)
    return float((after[0, 1, :2].sum() - before[0, 1, :2].sum()) / gross[1, 0])


def step(appended: Appended, verified: list[int], accepted: list[int]) -> None:
    """One step in which every row drafts with the composite."""
    proposer = np.ones(ROWS, dtype=np.int16)
    _, promised = unfold(appended, [2] * ROWS)
    note_appended(
        appended.arrays,
        OCTAVE,
        proposer,
        np.array(verified, dtype=np.int16),
        np.array(accepted, dtype=np.int16),
        promised,
    )


def serve(appended: Appended, verified: int, accepted: int, steps: int = 1000) -> float:
    """The share that is learned when every row drafts alike."""
    for _ in range(steps):
        step(appended, [verified] * ROWS, [accepted] * ROWS)
    return share(appended)


def test_what_is_appended_counts_with_the_whole_head() -> None:
    appended = Appended(PROPOSERS)
    before, after, gross, within = plan(appended)
    assert after[:, 0].tolist() == before[:, 0].tolist()
    assert gross[0].tolist() == [0.0] * ROWS
    assert gross[1].tolist() == [pytest.approx(BEHIND)] * ROWS
    assert within.tolist() == [[2] * ROWS] * 2
    assert share(appended) == pytest.approx(GUESS)


def test_little_is_expected_to_be_left_where_tokens_are_dear() -> None:
    assert share(Appended(PROPOSERS), rate=0.0) == pytest.approx(1.0)
    assert share(Appended(PROPOSERS), rate=10 * RATE) == pytest.approx(1.0 / 15.0)


def test_gains_never_increase_with_the_position() -> None:
    appended = Appended(PROPOSERS)
    for _ in range(50):
        step(appended, [6] * ROWS, [6] * ROWS)  # far more than was expected: the share is 1
    before, after, _, _ = plan(appended)
    assert after[0, 1, 0] >= after[0, 1, 1]
    assert after[0, 1, :2].sum() == pytest.approx(before[0, 1].sum())


def test_no_room_behind_the_head_changes_nothing() -> None:
    limits = np.array([[2] * ROWS, [2] * ROWS], dtype=np.int16)
    before, after, gross, within = plan(Appended(PROPOSERS), limits)
    assert after.tolist() == before.tolist()
    assert not gross.any()
    assert within.tolist() == limits.tolist()


def test_only_whole_heads_go_on() -> None:
    drafted, promised = unfold(Appended(PROPOSERS), [2, 1, 0, 2])
    assert drafted == [6, 1, 0, 6]
    assert promised[APPENDED].tolist() == [0.0, pytest.approx(2 * BEHIND)]
    assert promised[PRICE].tolist() == [pytest.approx(RATE * SLOPE)] * 2


def test_where_nothing_is_asked_for_what_is_known_gives_way_to_the_guess() -> None:
    appended = Appended(PROPOSERS)
    serve(appended, 4, 4)
    proposer, two = np.ones(ROWS, dtype=np.int16), np.full(ROWS, 2, dtype=np.int16)
    assert share(appended) == 1.0
    _, promised = unfold(appended, [1] * ROWS)
    for _ in range(2000):
        note_appended(appended.arrays, OCTAVE, proposer, two, two, promised)
    assert share(appended) == pytest.approx(GUESS, rel=0.01)


def test_without_its_head_it_is_a_proposer_like_others() -> None:
    assert not Appended(PROPOSERS[1:]).any
    assert not Appended(PROPOSERS[:1]).any


def test_the_share_is_what_came_above_its_cost() -> None:
    assert serve(Appended(PROPOSERS), 2, 2) == pytest.approx(0.0, abs=0.05)  # nothing followed
    assert serve(Appended(PROPOSERS), 6, 2) == pytest.approx(0.0, abs=0.05)  # in vain
    mixed = Appended(PROPOSERS)
    for _ in range(4000):
        step(mixed, [4, 2, 2, 2], [3, 2, 1, 0])
    came = (1.0 - 2 * RATE * SLOPE) / (ROWS * BEHIND)
    assert share(mixed) == pytest.approx(came, rel=0.05)


def test_state_survives_json() -> None:
    appended, again = Appended(PROPOSERS), Appended(PROPOSERS)
    serve(appended, 4, 3)
    again.restore(json.loads(json.dumps(appended.state())))
    assert plan(again)[1].tolist() == plan(appended)[1].tolist()
