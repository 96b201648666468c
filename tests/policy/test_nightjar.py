from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from autospec.cost.coefficients import CATCH_UP
from autospec.cost.step_cost import StepCost, StepLoad
from autospec.policy.nightjar import Context, Nightjar, NightjarOptions
from tests.policy.steps import DRAFT, ENGINE, PROPOSERS, names, outcome, policy_of, view

OPTIONS = NightjarOptions(proposers=("draft",), ks=(2, 4))


def test_blocks_double_in_bins_of_their_square_root() -> None:
    context = Context([], [])
    seen = []
    for _ in range(40):
        if context.bin_steps_left <= 0:
            context.next_bin()
            seen.append((context.block, context.bin, context.bin_steps_left))
        context.bin_steps_left -= 1
        context.block_steps_left -= 1
    # blocks of 1, 2, 4, 8 and 16 steps; bins of 1, 2, 2, 3 and 4
    assert seen == [
        *[(1, 1, 1), (2, 1, 2), (3, 1, 2), (3, 2, 2)],
        *[(4, 1, 3), (4, 2, 3), (4, 3, 3)],
        *[(5, 1, 4), (5, 2, 4), (5, 3, 4), (5, 4, 4)],
        *[(6, 1, 6), (6, 2, 6)],
    ]


def play(policy: Nightjar, requests: int, count: int, rates: dict[int, float]) -> list[int]:
    ks = []
    for _ in range(count):
        decision = policy.decide(view(requests))
        ks.append(int(decision.k[0]))
        policy.learn(outcome(decision, seconds=requests / rates[ks[-1]]))
    return ks


def test_each_batch_size_learns_for_itself() -> None:
    policy = policy_of(Nightjar, OPTIONS)
    few = play(policy, 1, 1000, {0: 1.0, 2: 2.0, 4: 3.0})
    many = play(policy, 5, 1000, {0: 3.0, 2: 2.0, 4: 1.0})
    # every arm has a bin of its own first
    assert list(dict.fromkeys(few))[:3] == [0, 2, 4]
    assert few[500:].count(4) > 400
    assert many[500:].count(0) > 400
    # an arm is kept for its whole bin: block 9 has bins of 16 steps
    changes = sum(a != b for a, b in pairwise(few[255:512]))
    assert changes <= 16


def test_octaves_may_share_what_they_learn() -> None:
    policy = policy_of(Nightjar, OPTIONS.model_copy(update={"by": "octave"}))
    for requests in (5, 6, 7, 8):
        play(policy, requests, 1, {0: 1.0, 2: 1.0, 4: 1.0})
    assert [key for key, _ in policy.state()["contexts"]] == [3]


def test_turning_a_model_on_is_charged_with_its_catch_up() -> None:
    cost = StepCost(PROPOSERS, ENGINE)
    zeros = np.zeros(len(PROPOSERS))
    for catch_up in (0.0, 100.0):
        behind = zeros.copy()
        behind[DRAFT] = catch_up
        depth = (behind >= 0.0) * np.array([0.0, 0.0, 2.0])
        for _ in range(50):
            cost.observe(
                StepLoad(3, 1, 100, True, depth, depth, behind),
                1.0 + 0.01 * catch_up,
                np.array([0.0, 0.0, 0.5 + 0.01 * catch_up]),
            )
    per_token = cost.draft_coefficients[DRAFT, CATCH_UP]
    assert per_token > 0.0
    policy = policy_of(Nightjar, OPTIONS)
    state = dict(policy.state())
    # 1.0, 0.9 and 0.95 seconds per token: k = 2 wins, unless 40 stale tokens are owed for it
    sums = {"tokens": [1.0] * 3, "seconds": [1.0, 0.9, 0.95], "block": 9, "bin": 10**9}
    context = {**sums, "bin_steps_left": 0, "block_steps_left": 99, "arm": 0}
    owed = 40.0 * per_token
    assert 0.9 + owed / 2.0 > 1.0
    for was_off, stale, expected in ((False, 40.0, 2), (True, 0.0, 2), (True, 40.0, 0)):
        policy.restore({**state, "contexts": [[1, context]], "was_off": was_off})
        decision = policy.decide(view(1, cost=cost, stale=stale))
        assert decision.k[0] == expected, (was_off, stale)
    assert owed == pytest.approx(0.4, rel=0.5)
    assert names(decision) == [(None, 0)]
