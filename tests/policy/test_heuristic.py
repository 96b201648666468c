from __future__ import annotations

import numpy as np

from autospec.policy.heuristic import Heuristic, HeuristicOptions, next_k
from tests.policy.steps import names, outcome, policy_of, view


def test_two_more_after_a_full_success_else_one_less() -> None:
    k = np.array([4.0, 4.0, 1.0, 4.0, 7.0])
    verified = np.array([4, 4, 1, 0, 7], dtype=np.int16)
    accepted = np.array([4, 3, 0, 0, 7], dtype=np.int16)
    assert next_k(k, verified, accepted, 8).tolist() == [6.0, 3.0, 1.0, 4.0, 8.0]


def test_every_request_has_a_k_of_its_own() -> None:
    policy = policy_of(Heuristic, HeuristicOptions(proposer="draft", k=3))
    decision = policy.decide(view([10, 20]))
    assert names(decision) == [("draft", 3)] * 2
    policy.learn(outcome(decision, [3, 1], handles=[10, 20]))
    assert names(policy.decide(view([10, 20]))) == [("draft", 5), ("draft", 2)]
    # in another order, and with less room
    assert names(policy.decide(view([20, 10], [[8, 8], [8, 8], [8, 4]]))) == [
        ("draft", 2),
        ("draft", 4),
    ]


def test_a_cut_draft_that_is_accepted_is_a_full_success() -> None:
    policy = policy_of(Heuristic, HeuristicOptions(proposer="draft", k=3))
    decision = policy.decide(view(1, [[0], [0], [2]]))
    policy.learn(outcome(decision, [2]))
    assert names(policy.decide(view(1))) == [("draft", 5)]


def test_a_new_request_starts_where_the_last_one_ended() -> None:
    policy = policy_of(Heuristic, HeuristicOptions(proposer="draft", k=2))
    policy.learn(outcome(policy.decide(view([1])), [2], handles=[1]))
    assert names(policy.decide(view([2]))) == [("draft", 4)]


def test_transient_starts_every_request_anew() -> None:
    policy = policy_of(Heuristic, HeuristicOptions(proposer="draft", k=2, transient=True))
    policy.learn(outcome(policy.decide(view([1])), [2], handles=[1]))
    assert names(policy.decide(view([1]))) == [("draft", 4)]
    assert names(policy.decide(view([2]))) == [("draft", 2)]


def test_a_proposer_that_the_engine_has_not_is_plain_decoding() -> None:
    policy = policy_of(Heuristic, HeuristicOptions(proposer="medusa"))
    assert names(policy.decide(view(2))) == [(None, 0)] * 2


def test_it_may_be_bounded() -> None:
    policy = policy_of(Heuristic, HeuristicOptions(proposer="draft", k=20, max_k=4))
    for _ in range(3):
        decision = policy.decide(view(1))
        assert names(decision) == [("draft", 4)]
        policy.learn(outcome(decision, [4]))
