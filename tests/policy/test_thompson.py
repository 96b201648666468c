from __future__ import annotations

import math

import numpy as np
import pytest

from autospec.policy.thompson import Thompson, ThompsonOptions, rate_and_deviation
from tests.policy.steps import names, outcome, policy_of, view

OPTIONS = ThompsonOptions(proposers=("draft",), ks=(2, 4), off=False, discount=0.5)


def sums_of(steps: list[tuple[float, float]]) -> list[float]:
    return [
        float(len(steps)),
        sum(t for t, _ in steps),
        sum(s for _, s in steps),
        sum(t * t for t, _ in steps),
        sum(t * s for t, s in steps),
        sum(s * s for _, s in steps),
    ]


def test_posterior() -> None:
    sums = np.array([sums_of([(1.0, 1.0), (3.0, 1.0)]), sums_of([(4.0, 2.0)] * 4)]).T
    rate, deviation = rate_and_deviation(sums)
    assert rate.tolist() == [2.0, 2.0]
    # residuals -1 and 1 of a mean of 2 tokens: squares 1/4 + 1/4, over 6 steps in all
    noise = 0.5 / 6.0
    expected = [2.0 * math.sqrt(noise / 2.0), 2.0 * math.sqrt(noise / 4.0)]
    assert deviation.tolist() == pytest.approx(expected)


def test_every_step_discounts_all_arms() -> None:
    policy = policy_of(Thompson, OPTIONS)
    policy.credit(0, 3.0, 1.0, 1)
    policy.credit(1, 2.0, 1.0, 1)
    assert policy.state()["sums"][0] == [0.5, 1.0]
    assert policy.state()["sums"][1] == [1.5, 2.0]
    policy.credit(1, 2.0, 1.0, 1)
    # nothing of arm 0 is left above half a step: it is new again
    assert names(policy.decide(view(1))) == [("draft", 2)]


def test_the_best_arm_is_found_again_when_it_changes() -> None:
    policy = policy_of(Thompson, OPTIONS.model_copy(update={"discount": 0.98}))
    rng = np.random.default_rng(1)
    for best in (2, 4):
        played = []
        for _ in range(400):
            decision = policy.decide(view(1))
            played.append(decision.k[0] == best)
            kept = int(rng.integers(0, 2)) + (1 if played[-1] else 0)
            policy.learn(outcome(decision, [kept]))
        assert sum(played[200:]) > 160
