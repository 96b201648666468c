from __future__ import annotations

import pytest

from autospec.policy.gate import Gate, GateOptions, draft_length
from tests.policy.steps import SUFFIX, names, outcome, policy_of, view

SCHEDULE = GateOptions(
    proposer="draft", max_draft_len=4, draft_len_schedule={32: 1, 4: 6, 8: 2}, max_concurrency=20
)


@pytest.mark.parametrize(
    "requests, k", [(1, 4), (4, 4), (5, 2), (8, 2), (9, 1), (20, 1), (21, 0), (33, 0)]
)
def test_keys_of_the_schedule_are_upper_bounds(requests: int, k: int) -> None:
    assert draft_length(SCHEDULE, requests) == k


def test_without_a_schedule_k_is_the_longest() -> None:
    assert draft_length(GateOptions(proposer="draft", max_draft_len=3), 1000) == 3


def test_the_gate_closes_for_good_when_a_whole_window_is_poor() -> None:
    options = GateOptions(
        proposer="draft",
        acceptance_rate_window_size=3,
        acceptance_rate_threshold=0.3,
    )
    policy = policy_of(Gate, options)
    # rates of 2 requests with k = 4: 2/8, 1/8, 5/8 -> mean 1/3; then 1/8, 5/8, 0 -> 1/4
    for accepted in ([1, 1], [0, 1], [1, 4], [0, 0]):
        assert names(policy.decide(view(2))) == [("draft", 4)] * 2
        policy.learn(outcome(policy.decide(view(2)), accepted))
    for _ in range(10):
        decision = policy.decide(view(2))
        assert names(decision) == [(None, 0)] * 2
        policy.learn(outcome(decision))


def test_steps_without_a_draft_do_not_count() -> None:
    options = GateOptions(
        proposer="suffix", acceptance_rate_window_size=2, acceptance_rate_threshold=0.5
    )
    policy = policy_of(Gate, options)
    for _ in range(10):
        policy.learn(outcome(policy.decide(view(1, [[0], [0], [0]]))))
    assert names(policy.decide(view(1))) == [("suffix", 4)]
    assert policy.wants_offers()[SUFFIX]
    for _ in range(2):
        policy.learn(outcome(policy.decide(view(1)), [1]))
    assert not policy.wants_offers().any()
