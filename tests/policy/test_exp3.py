from __future__ import annotations

import math

import numpy as np
import pytest

from autospec.policy.exp3 import Exp3, Exp3Options, losses
from tests.policy.steps import names, outcome, policy_of, view

OPTIONS = Exp3Options(proposers=("draft",), ks=(2, 4), off=False)


def test_losses_are_shares_of_the_range_of_rates() -> None:
    tokens = np.array([6.0, 4.0, 1.0, 0.0])
    seconds = np.array([2.0, 2.0, 1.0, 0.0])
    # rates 3, 2, 1 and an arm not tried: 0, 1/2 and 1 of ten rounds, and nothing
    assert losses(tokens, seconds, 10).tolist() == [0.0, 5.0, 10.0, 0.0]
    assert losses(np.zeros(2), np.zeros(2), 0).tolist() == [0.0, 0.0]


def test_weights_by_hand() -> None:
    policy = policy_of(Exp3, OPTIONS)
    assert policy.probabilities().tolist() == [0.5, 0.5]
    for arm, tokens in ((0, 3.0), (1, 2.0)):
        policy.credit(arm, tokens, 1.0, 1)
    # after the first, chances were still 1/2 each: sums of 6 tokens in 2 s and 4 in 2 s
    assert policy.state()["tokens"] == [6.0, 4.0]
    assert policy.state()["seconds"] == [2.0, 2.0]
    # losses of two rounds: 0 and 2; eta = sqrt(ln 2 / (2 x 2))
    odds = math.exp(-2.0 * math.sqrt(math.log(2.0) / 4.0))
    assert policy.probabilities().tolist() == pytest.approx([1 / (1 + odds), odds / (1 + odds)])
    policy.credit(1, 2.0, 1.0, 1)
    assert policy.state()["seconds"][1] == pytest.approx(2.0 + (1 + odds) / odds)


def test_the_best_arm_is_played_most() -> None:
    policy = policy_of(Exp3, OPTIONS)
    played = []
    for _ in range(1000):
        decision = policy.decide(view(1))
        good = names(decision) == [("draft", 4)]
        played.append(good)
        policy.learn(outcome(decision, [3 if good else 1]))
    assert sum(played[500:]) > 450
