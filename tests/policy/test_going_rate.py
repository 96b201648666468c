from __future__ import annotations

import json

import numpy as np
import pytest
from numpy.typing import NDArray

from autospec.octave import octave_of
from autospec.policy.going_rate import GoingRate, knows_all, note_rate, tokens_per_second


def rows(*numbers: int) -> NDArray[np.int32]:
    return np.array(numbers, dtype=np.int32)


def note(rate: GoingRate, steps: int, committed: int, plain_steps: float, n: int = 4) -> None:
    """Steps in which each of ``n`` requests of one workload commits as many tokens."""
    for _ in range(steps):
        note_step(rate, rows(*[1] * n), [committed] * n, plain_steps)


def note_step(
    rate: GoingRate, workloads: NDArray[np.int32], committed: list[int], plain_steps: float
) -> None:
    if not knows_all(rate.arrays, workloads):
        rate.grow(workloads)
    tokens = np.array(committed, dtype=np.int16)
    note_rate(rate.arrays, octave_of(len(tokens)), workloads, tokens, plain_steps)


def price_of(
    rate: GoingRate,
    workloads: NDArray[np.int32],
    plain_seconds: float,
    weights: NDArray[np.float64],
) -> float:
    octave = octave_of(len(workloads))
    return tokens_per_second(rate.arrays, octave, workloads, plain_seconds, weights)


def going(rate: GoingRate, requests: int, plain_seconds: float) -> float:
    return price_of(rate, rows(*[1] * requests), plain_seconds, np.ones(requests))


def test_it_is_the_goodput_in_units_of_plain_decoding() -> None:
    """Steps of twice a plain step's time that bring three tokens a request: 1.5 times plain."""
    rate = GoingRate()
    note(rate, 100, committed=3, plain_steps=2.0)
    assert going(rate, 4, 0.05) == pytest.approx(1.5 * 4 / 0.05)
    assert going(rate, 3, 0.05) == pytest.approx(1.5 * 3 / 0.05)  # the same octave


def test_it_is_a_ratio_of_sums() -> None:
    """A mean of ratios would say (8 / 1 + 1 / 2) / 2."""
    rate = GoingRate()
    for _ in range(50):
        note(rate, 1, 8, 1.0, n=1)
        note(rate, 1, 1, 2.0, n=1)
    assert going(rate, 1, 1.0) == pytest.approx(9 / 3, rel=0.01)


def test_too_little_seen_is_zero() -> None:
    rate = GoingRate()
    assert going(rate, 4, 0.05) == 0.0
    note(rate, 5, 2, 1.0)
    assert going(rate, 4, 0.05) == 0.0
    note(rate, 20, 2, 1.0)
    assert going(rate, 4, 0.05) > 0.0
    assert going(rate, 4, 0.0) == 0.0
    assert going(rate, 64, 0.05) == 0.0  # another load


def test_it_follows_a_change() -> None:
    rate = GoingRate()
    note(rate, 3000, committed=3, plain_steps=1.0)
    note(rate, 2000, committed=1, plain_steps=1.0)
    assert going(rate, 4, 1.0) == pytest.approx(4.0, rel=0.1)


def test_state_survives_json() -> None:
    rate, again = GoingRate(), GoingRate()
    note(rate, 30, 2, 1.5)
    again.restore(json.loads(json.dumps(rate.state())))
    note(rate, 5, 1, 1.0)
    note(again, 5, 1, 1.0)
    assert going(again, 4, 0.1) == going(rate, 4, 0.1)


def test_a_loss_does_not_make_time_cheap() -> None:
    """Plain decoding is always to be had: else losing steps would justify the next ones."""
    rate = GoingRate()
    note(rate, 100, committed=2, plain_steps=5.0)
    assert going(rate, 4, 0.05) == pytest.approx(4 / 0.05)


def test_an_easy_workload_does_not_make_time_dear_for_a_hard_one() -> None:
    """After a long time of easy requests a hard one is served by what its own kind brings."""
    rate = GoingRate()
    for workload, committed in ((1, 6), (2, 2)):
        for _ in range(400):
            note_step(rate, rows(workload), [committed], 1.0)
    weights = np.zeros(1)
    assert price_of(rate, rows(2), 0.1, weights) == pytest.approx(2 / 0.1)
    assert weights.tolist() == [1.0]


def test_in_one_batch_a_hard_requests_token_weighs_more() -> None:
    rate = GoingRate()
    for _ in range(100):
        note_step(rate, rows(1, 2), [6, 2], 1.0)
    weights = np.zeros(3)
    price = price_of(rate, rows(1, 2, 7), 0.1, weights)
    assert price == 0.0  # three requests are another load
    price = price_of(rate, rows(1, 2), 0.1, weights[:2])
    assert price == pytest.approx(2 * 4 / 0.1)
    assert weights[:2].tolist() == pytest.approx([4 / 6, 4 / 2])
    # One of an unknown workload counts as the mean of the others.
    assert price_of(rate, rows(1, 9), 0.1, weights[:2]) == pytest.approx(2 * 6 / 0.1)
    assert weights[:2].tolist() == [1.0, 1.0]
