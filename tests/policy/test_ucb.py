from __future__ import annotations

import math

import numpy as np
import pytest

from autospec.policy.ucb import Ucb, UcbOptions, confidence_radius
from tests.policy.steps import names, outcome, policy_of, view

OPTIONS = UcbOptions(proposers=("draft",), ks=(2, 4), off=False, exploration=1.0, delta=0.05)


def test_radius() -> None:
    radius = confidence_radius(np.array([3.0, 1.0]), rounds=4, arms=2, delta=0.05)
    assert radius[0] == pytest.approx(
        0.5 * math.sqrt(4.0 / 9.0 * (1.0 + 2.0 * math.log(2.0 * 16.0 * 2.0 / 0.05)))
    )
    assert radius[1] == pytest.approx(
        0.5 * math.sqrt(2.0 * (1.0 + 2.0 * math.log(2.0 * 16.0 * math.sqrt(2.0) / 0.05)))
    )


def test_each_arm_once_then_the_highest_bound() -> None:
    policy = policy_of(Ucb, OPTIONS)
    seconds = {2: 1.0, 4: 1.5}
    ks = []
    for _ in range(3):
        decision = policy.decide(view(1))
        ks.append(int(decision.k[0]))
        policy.learn(outcome(decision, [2], seconds=seconds[ks[-1]]))
    # rates 3 and 2; one try each has the same radius, so k = 2 is next
    assert ks == [2, 4, 2]
    # with 2 tries against 1 the radius of k = 4 is larger: 3 + 3 r(2) < 2 + 3 r(1)
    r = confidence_radius(np.array([2.0, 1.0]), 3, 2, 0.05)
    assert 3.0 + 3.0 * r[0] < 2.0 + 3.0 * r[1]
    assert names(policy.decide(view(1))) == [("draft", 4)]


def test_an_arm_is_its_tokens_over_its_seconds_not_a_mean_of_ratios() -> None:
    policy = policy_of(Ucb, OPTIONS.model_copy(update={"exploration": 0.0}))
    # k = 2: 2 tokens in 1 s, 2 in 10 s -> 4/11, though the mean of 2 and 0.2 is 1.1
    # k = 4: 1 token in 2 s -> 1/2
    for k, accepted, seconds in ((2, 1, 1.0), (4, 0, 2.0), (2, 1, 10.0)):
        decision = policy.decide(view(1))
        assert decision.k[0] == k
        policy.learn(outcome(decision, [accepted], seconds=seconds))
    assert names(policy.decide(view(1))) == [("draft", 4)]


def test_the_best_arm_is_played_most() -> None:
    policy = policy_of(Ucb, UcbOptions(exploration=0.2))
    rng = np.random.default_rng(0)
    pulls = 0
    for _ in range(2000):
        decision = policy.decide(view(1))
        good = names(decision) == [("draft", 4)]
        pulls += good
        policy.learn(
            outcome(decision, [int(rng.integers(0, 3)) + 2 * good] if decision.k[0] else [0])
        )
    assert pulls > 1500


def test_a_step_is_a_round_for_every_request() -> None:
    policy = policy_of(Ucb, OPTIONS)
    policy.learn(outcome(policy.decide(view(5))))
    assert policy.state()["pulls"] == [5.0, 0.0]
