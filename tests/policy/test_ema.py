from __future__ import annotations

import pytest

from autospec.policy.ema import Ema, EmaOptions, Tiers, move
from tests.policy.steps import names, outcome, policy_of, view

TIERS = Tiers(min_requests=1, candidate_steps=(1, 3, 7), down_hysteresis=-0.25)
WITH_ZERO = Tiers(min_requests=8, candidate_steps=(0, 1, 3))


@pytest.mark.parametrize(
    "steps, ema, tiers, expected",
    [
        (3, 2.5, TIERS, 3),  # up only above 3 - 1/2
        (3, 2.51, TIERS, 7),
        (7, 2.26, TIERS, 7),  # down at 3 - 1/2 - 1/4 or less
        (7, 2.25, TIERS, 3),
        (7, 0.25, TIERS, 1),  # two tiers at once: 1 - 1/2 - 1/4
        (3, 0.26, TIERS, 3),
        (1, 0.51, TIERS, 3),
        (1, 2.6, TIERS, 7),
        (1, 0.5, WITH_ZERO, 0),  # off at an accepted length of a half
        (1, 0.51, WITH_ZERO, 3),
        (3, 0.5, WITH_ZERO, 0),
        (0, 0.0, WITH_ZERO, 1),  # and always back for a try
    ],
)
def test_move(steps: int, ema: float, tiers: Tiers, expected: int) -> None:
    assert move(steps, ema, tiers) == expected


def test_the_average_moves_k_after_the_warmup_and_every_fifth_step() -> None:
    policy = policy_of(Ema, EmaOptions(proposer="draft"))
    ks = []
    for _ in range(20):
        decision = policy.decide(view(2))
        ks.append(int(decision.k[0]))
        policy.learn(outcome(decision, [2, 4] if ks[-1] == 7 else [3, 3]))
    # 2, then 3 - 0.8^n: 2.965 after 15 steps is above 3 - 1/2
    assert ks == [3] * 15 + [7] * 5
    state = policy.state()
    assert state["ema"][0] == pytest.approx(3.0 - 0.8**20)
    for _ in range(5):
        decision = policy.decide(view(2))
        policy.learn(outcome(decision, [0, 0]))
    # (3 - 0.8^20) 0.8^5 = 0.979 is below 3 - 3/4 but above 1 - 3/4
    assert names(policy.decide(view(2))) == [("draft", 3)] * 2


def test_every_load_has_tiers_of_its_own() -> None:
    policy = policy_of(Ema, EmaOptions(proposer="draft"))
    chosen = [names(policy.decide(view(n)))[0] for n in (1, 7, 8, 31, 32, 63, 64)]
    assert chosen == [("draft", 3)] * 4 + [("draft", 1)] * 2 + [(None, 0)]


def test_off_is_left_for_a_try_even_if_nothing_is_known() -> None:
    options = EmaOptions(proposer="draft", initial_steps=0, warmup_batches=0)
    policy = policy_of(Ema, options)
    ks = []
    for _ in range(6):
        decision = policy.decide(view(8))
        ks.append(int(decision.k[0]))
        policy.learn(outcome(decision))
    assert ks == [0] * 5 + [1]
    # the average starts where a tier of 1 is neutral, 1 - 1 = 0, and has learned one more 0
    assert policy.state()["ema"][1] == 0.0


def test_rows_that_drafted_nothing_do_not_count() -> None:
    policy = policy_of(Ema, EmaOptions(proposer="suffix"))
    decision = policy.decide(view(2, [[0, 0], [16, 0], [0, 0]]))
    assert names(decision) == [("suffix", 3), (None, 0)]
    policy.learn(outcome(decision, [3, 0]))
    assert policy.state()["ema"][0] == pytest.approx(0.8 * 2.0 + 0.2 * 3.0)
