from __future__ import annotations

import json

import pytest

from autospec.policy.going_rate import GoingRate


def note(rate: GoingRate, steps: int, committed: float, plain_steps: float, n: int = 4) -> None:
    for _ in range(steps):
        rate.note(n, committed, plain_steps)


def test_it_is_the_goodput_in_units_of_plain_decoding() -> None:
    """Steps of twice a plain step's time that bring three tokens a request: 1.5 times plain."""
    rate = GoingRate()
    note(rate, 100, committed=12.0, plain_steps=2.0)
    assert rate.tokens_per_second(4, 0.05) == pytest.approx(1.5 * 4 / 0.05)
    assert rate.tokens_per_second(3, 0.05) == pytest.approx(1.5 * 3 / 0.05)  # the same octave


def test_it_is_a_ratio_of_sums() -> None:
    """A mean of ratios would say (8 / 1 + 1 / 2) / 2."""
    rate = GoingRate()
    for _ in range(50):
        rate.note(1, 8.0, 1.0)
        rate.note(1, 1.0, 2.0)
    assert rate.tokens_per_second(1, 1.0) == pytest.approx(9 / 3, rel=0.01)


def test_too_little_seen_is_zero() -> None:
    rate = GoingRate()
    assert rate.tokens_per_second(4, 0.05) == 0.0
    note(rate, 5, 8.0, 1.0)
    assert rate.tokens_per_second(4, 0.05) == 0.0
    note(rate, 20, 8.0, 1.0)
    assert rate.tokens_per_second(4, 0.05) > 0.0
    assert rate.tokens_per_second(4, 0.0) == 0.0
    assert rate.tokens_per_second(64, 0.05) == 0.0  # another load


def test_it_follows_a_change() -> None:
    rate = GoingRate()
    note(rate, 3000, committed=12.0, plain_steps=1.0)
    note(rate, 2000, committed=4.0, plain_steps=1.0)
    assert rate.tokens_per_second(4, 1.0) == pytest.approx(4.0, rel=0.1)


def test_state_survives_json() -> None:
    rate, again = GoingRate(), GoingRate()
    note(rate, 30, 9.0, 1.5)
    again.restore(json.loads(json.dumps(rate.state())))
    note(rate, 5, 1.0, 1.0)
    note(again, 5, 1.0, 1.0)
    assert again.tokens_per_second(4, 0.1) == rate.tokens_per_second(4, 0.1)


def test_a_loss_does_not_make_time_cheap() -> None:
    """Plain decoding is always to be had: else losing steps would justify the next ones."""
    rate = GoingRate()
    note(rate, 100, committed=8.0, plain_steps=5.0)
    assert rate.tokens_per_second(4, 0.05) == pytest.approx(4 / 0.05)
