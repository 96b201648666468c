from __future__ import annotations

import math

from autospec.policy.arms import Arm, ArmsOptions, make_arms
from autospec.policy.ucb import Ucb, UcbOptions
from autospec.records import NO_PROPOSER
from tests.policy.steps import DRAFT, NGRAM, PROPOSERS, SUFFIX, names, outcome, policy_of, view

OFF = Arm(NO_PROPOSER, 0)


def test_arms_are_plain_decoding_and_every_ladder() -> None:
    arms = make_arms(ArmsOptions(ks=(2, 12)), PROPOSERS)
    assert arms == (
        OFF,
        Arm(NGRAM, 2),
        Arm(NGRAM, 8),
        Arm(SUFFIX, 2),
        Arm(SUFFIX, 12),
        Arm(DRAFT, 2),
        Arm(DRAFT, 8),
    )


def test_options_restrict_the_arms() -> None:
    options = ArmsOptions(proposers=("draft", "medusa"), ks=(3,), off=False)
    assert make_arms(options, PROPOSERS) == (Arm(DRAFT, 3),)
    assert make_arms(ArmsOptions(proposers=("medusa",), off=False), PROPOSERS) == (OFF,)


def test_only_the_lookup_of_the_next_arm_drafts() -> None:
    options = UcbOptions(proposers=("suffix", "draft"), ks=(2,), off=False)
    policy = policy_of(Ucb, options)
    assert policy.wants_offers().tolist() == [False, True, False]
    decision = policy.decide(view(1))
    assert names(decision) == [("suffix", 2)]
    policy.learn(outcome(decision))
    assert not policy.wants_offers().any()
    assert names(policy.decide(view(1))) == [("draft", 2)]


def test_rows_without_an_offer_do_not_speculate() -> None:
    policy = policy_of(Ucb, UcbOptions(proposers=("suffix",), ks=(4,), off=False))
    assert names(policy.decide(view(3, [[0] * 3, [0, 2, 9], [8] * 3]))) == [
        (None, 0),
        ("suffix", 2),
        ("suffix", 4),
    ]


def test_steps_that_teach_nothing() -> None:
    policy = policy_of(Ucb, UcbOptions())
    decision = policy.decide(view(1))
    before = policy.state()
    for seconds in (math.nan, math.inf, 0.0, -1.0):
        policy.learn(outcome(decision, seconds=seconds))
    policy.learn(outcome(decision, has_prefill=True))
    policy.learn(outcome(decision, arm=-1))
    assert policy.state() == before
    policy.learn(outcome(decision))
    assert policy.state() != before


def test_the_outcome_says_which_arm_it_was() -> None:
    policy = policy_of(Ucb, UcbOptions(proposers=("draft",), ks=(1, 2), off=False))
    first = policy.decide(view(1))
    policy.learn(outcome(first))
    second = policy.decide(view(1))
    policy.learn(outcome(second, [2], seconds=2.0))
    policy.learn(outcome(first, [1], seconds=3.0))  # late
    assert policy.state()["tokens"] == [1.0 + 2.0, 3.0]
    assert policy.state()["seconds"] == [1.0 + 3.0, 2.0]
