from __future__ import annotations

import json

import numpy as np
import pytest

from autospec.allocation.choice import Prices
from autospec.allocation.gains import throughput_gains
from autospec.cost.coefficients import KNOTS
from autospec.octave import octave_of
from autospec.policy.appended import (
    Appended,
    appended_gains,
    expect_appended,
    note_appended,
)
from autospec.records import Float32Array, Float64Array, ProposerInfo

PROPOSERS = (
    ProposerInfo("head", "sequential", 2),
    ProposerInfo("both", "parallel", 6, head="head", head_k=2),
)
ROWS = 4
LIMITS = np.array([[2] * ROWS, [6] * ROWS], dtype=np.int16)
OCTAVE = octave_of(ROWS)
RATE = 100.0
SLOPE = 0.001  # a token costs a tenth of one at that rate


def plan(appended: Appended) -> tuple[Float32Array, Float32Array]:
    """Gains [n, p, k] before and after."""
    before, after, _ = planned(appended)
    return before, after


def planned(appended: Appended) -> tuple[Float32Array, Float32Array, Float64Array]:
    """The same, and the sums of gains [p, n] of what is appended."""
    hazards = np.full((ROWS, 2, 6), 0.5, dtype=np.float32)
    gains = np.zeros_like(hazards)
    throughput_gains(hazards, LIMITS, np.ones(hazards.shape[1]), np.ones(ROWS), gains)
    before = gains.copy()
    prices = Prices(0.01, 0.0, np.full(len(KNOTS), SLOPE), np.zeros((2, 4)))
    gross = np.zeros(LIMITS.shape)
    appended_gains(appended.arrays, OCTAVE, ROWS, LIMITS, prices, RATE, gains, gross)
    return before, gains, gross


def share(before: Float32Array, after: Float32Array) -> float:
    """Of the appended gain, what is left above the price."""
    left = after[0, 1, 2:] - RATE * SLOPE
    return float(left.sum() / before[0, 1, 2:].sum())


def step(appended: Appended, verified: list[int], accepted: list[int]) -> None:
    """One step in which every row drafts with the composite."""
    proposer = np.ones(ROWS, dtype=np.int16)
    expect_appended(appended.arrays, OCTAVE, ROWS, proposer, planned(appended)[2])
    note_appended(
        appended.arrays,
        OCTAVE,
        proposer,
        np.array(verified, dtype=np.int16),
        np.array(accepted, dtype=np.int16),
    )


def serve(appended: Appended, verified: int, accepted: int, steps: int = 200) -> float:
    """The share that is learned when every row drafts alike."""
    for _ in range(steps):
        step(appended, [verified] * ROWS, [accepted] * ROWS)
    return share(*plan(appended))


def test_only_what_is_appended_is_rewritten() -> None:
    before, after = plan(Appended(PROPOSERS))
    assert after[:, 0].tolist() == before[:, 0].tolist()
    assert after[:, 1, :2].tolist() == before[:, 1, :2].tolist()
    assert (after[:, 1, 2:] > RATE * SLOPE).all()


def test_without_its_head_it_is_a_proposer_like_others() -> None:
    assert not Appended(PROPOSERS[1:]).any
    assert not Appended(PROPOSERS[:1]).any


def test_the_share_is_what_came_above_its_cost() -> None:
    # expected behind the head: (1/8 + 1/16 + 1/32 + 1/64) tokens a row
    expected = 0.125 + 0.0625 + 0.03125 + 0.015625
    assert serve(Appended(PROPOSERS), 2, 2) == pytest.approx(0.0, abs=0.05)  # nothing followed
    assert serve(Appended(PROPOSERS), 6, 2) == pytest.approx(0.0, abs=0.05)  # in vain
    mixed = Appended(PROPOSERS)
    for _ in range(400):
        step(mixed, [4, 2, 2, 2], [3, 2, 1, 0])
    came = (1.0 - 2 * RATE * SLOPE) / (ROWS * expected)
    assert share(*plan(mixed)) == pytest.approx(came, rel=0.05)


def test_state_survives_json() -> None:
    appended, again = Appended(PROPOSERS), Appended(PROPOSERS)
    serve(appended, 4, 3)
    again.restore(json.loads(json.dumps(appended.state())))
    assert plan(again)[1].tolist() == plan(appended)[1].tolist()
