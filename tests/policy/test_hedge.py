from __future__ import annotations

import math

import numpy as np
import pytest

from autospec.policy.hedge import Hedge, HedgeOptions, weights
from tests.policy.steps import DRAFT, NGRAM, SUFFIX, names, outcome, policy_of, view

OPTIONS = HedgeOptions(lookup_k=7, model_k=3)  # losses are in eighths


def test_weights() -> None:
    eta = math.sqrt(8.0 * math.log(3.0) / 4.0)
    expected = [math.exp(-eta), 1.0, math.exp(-0.5 * eta)]
    lost = np.array([[1.5, 0.5, 1.0]])
    assert weights(lost, np.array([4.0]), 1.0)[0].tolist() == pytest.approx(expected)


def losses(policy: Hedge) -> list[list[float]]:
    return [row[:-1] for row in policy.state()["losses"]["values"]]


def test_everybody_is_charged_for_what_it_would_have_had() -> None:
    policy = policy_of(Hedge, OPTIONS)
    while True:
        decision = policy.decide(view(1))
        if names(decision) == [("suffix", 7)]:
            break
    # the suffix had 2 accepted: 1 - 3/8; the n-gram's offer would have had 1: 1 - 2/8;
    # the model was not asked and never yet used: 0
    policy.learn(outcome(decision, [2], matched=[[1], [2], [-1]]))
    assert losses(policy) == [[0.75, 0.625, 0.0]]
    assert policy.state()["losses"]["values"][0][-1] == 1.0


def test_a_lookup_without_an_offer_is_charged_what_the_chosen_one_is() -> None:
    policy = policy_of(Hedge, OPTIONS)
    decision = policy.decide(view(1, [[0], [0], [8]]))
    assert names(decision) == [("draft", 3)]
    policy.learn(outcome(decision, [3], matched=[[-1], [-1], [-1]]))
    assert losses(policy) == [[0.5, 0.5, 0.5]]


def test_a_model_that_was_not_asked_is_charged_its_usual_loss() -> None:
    policy = policy_of(Hedge, OPTIONS)
    for accepted in (3, 1):  # 1 - 4/8 and 1 - 2/8: 5/8 in the mean
        decision = policy.decide(view([1], [[0], [0], [8]]))
        policy.learn(outcome(decision, [accepted]))
    decision = policy.decide(view([2], [[0], [8], [0]]))
    assert names(decision) == [("suffix", 7)]
    policy.learn(outcome(decision, [7], handles=[2], matched=[[-1], [7], [-1]]))
    assert losses(policy)[0] == pytest.approx([0.0, 0.0, 0.625])


def test_a_new_request_starts_even() -> None:
    policy = policy_of(Hedge, OPTIONS)
    policy.learn(outcome(policy.decide(view([1])), [0], handles=[1]))
    policy.decide(view([1, 2]))
    assert losses(policy)[1] == [0.0, 0.0, 0.0]


def test_the_better_lookup_is_used_without_being_tried() -> None:
    policy = policy_of(Hedge, HedgeOptions(proposers=("ngram", "suffix"), lookup_k=7))
    limits = [[8], [8], [8]]
    for _ in range(60):
        decision = policy.decide(view(1, limits))
        kept = 4 if decision.proposer[0] == NGRAM else 0
        policy.learn(outcome(decision, [kept], matched=[[4], [0], [-1]]))
    used = [int(policy.decide(view(1, limits)).proposer[0]) for _ in range(200)]
    assert used.count(NGRAM) > 195
    assert DRAFT not in used
    assert SUFFIX not in policy.decide(view(1, [[8], [0], [8]])).proposer
