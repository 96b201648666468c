from __future__ import annotations

import json
from typing import Literal

import numpy as np
import pytest

from autospec.cost.step_cost import StepCost, StepLoad
from autospec.policy.base import View
from autospec.policy.goodput import Goodput, GoodputOptions
from tests.policy.steps import (
    DRAFT,
    ENGINE,
    NGRAM,
    PROPOSERS,
    SUFFIX,
    names,
    outcome,
    policy_of,
    view,
)

FREE_DRAFTS = np.zeros(len(PROPOSERS))


def make_cost(fixed: float, per_token: float, per_depth: float = 0.001) -> StepCost:
    """Learned from steps of ``fixed + per_token x tokens`` seconds and a model's drafting."""
    cost = StepCost(PROPOSERS, ENGINE)
    rng = np.random.default_rng(0)
    for step in range(600):
        n = int(rng.integers(1, 33))
        verified = 0 if step % 3 == 0 else n * int(rng.integers(1, 9))
        depth = np.zeros(len(PROPOSERS))
        if step % 3 == 1:
            depth[DRAFT] = rng.integers(1, 9)
        drafting = per_depth * depth
        load = StepLoad(n + verified, n, 100 * n, verified > 0, depth, depth * n, FREE_DRAFTS)
        cost.observe(load, fixed + per_token * load.tokens + drafting.sum(), drafting)
    return cost


CHEAP_TOKENS = make_cost(0.03, 0.0005)
DEAR_TOKENS = make_cost(0.005, 0.01)


def goodput(
    objective: Literal["throughput", "latency", "slo"] = "throughput", hysteresis: float = 0.01
) -> Goodput:
    return policy_of(Goodput, GoodputOptions(objective=objective, hysteresis=hysteresis))


def with_hazards(state: View, *hazards: float) -> View:
    """The view with one hazard for all positions of each proposer."""
    array = np.empty_like(state.hazards)
    array[:] = np.array(hazards, dtype=np.float32)[None, :, None]
    return state._replace(hazards=array)


def test_plain_until_something_is_known_of_the_cost() -> None:
    decision = goodput().decide(view(3, cost=StepCost(PROPOSERS, ENGINE)))
    assert names(decision) == [(None, 0)] * 3


def test_good_drafts_on_a_cheap_engine_are_taken_whole() -> None:
    decision = goodput().decide(with_hazards(view(1, cost=CHEAP_TOKENS), 0.1, 0.99, 0.1))
    assert names(decision) == [("suffix", 16)]


def test_bad_drafts_on_a_dear_engine_are_not_taken() -> None:
    decision = goodput().decide(with_hazards(view(4, cost=DEAR_TOKENS), 0.3, 0.3, 0.3))
    assert names(decision) == [(None, 0)] * 4


@pytest.mark.parametrize("objective", ["throughput", "latency"])
def test_each_request_takes_the_proposer_that_is_best_for_it(
    objective: Literal["throughput", "latency"],
) -> None:
    state = view(3, cost=CHEAP_TOKENS)
    hazards = np.full_like(state.hazards, 0.05)
    for row, proposer in enumerate([NGRAM, SUFFIX, DRAFT]):
        hazards[row, proposer] = 0.95
    decision = goodput(objective).decide(state._replace(hazards=hazards))
    assert [name for name, _ in names(decision)] == ["ngram", "suffix", "draft"]


def test_a_confident_request_outranks_a_doubtful_one() -> None:
    state = view(2, limits=[[0, 0], [16, 16], [0, 0]], cost=DEAR_TOKENS)
    hazards = np.full_like(state.hazards, 0.6)
    hazards[0, SUFFIX] = 0.995
    k = goodput().decide(state._replace(hazards=hazards)).k
    assert k[0] >= 8
    assert k[1] < 4


def test_k_falls_with_the_load() -> None:
    ks = []
    for n in (1, 8, 64):
        state = with_hazards(view(n, cost=make_cost(0.05, 0.001)), 0.8, 0.8, 0.0)
        ks.append(float(goodput().decide(state).k.mean()))
    assert ks[0] > ks[1] > ks[2]


def test_an_expected_rate_above_this_steps_own_drafts_less() -> None:
    """Time is worth what others make of it: with a high going rate a hard step is cut short."""
    state = with_hazards(view(1, cost=CHEAP_TOKENS), 0.0, 0.6, 0.0)
    fresh, rich = goodput(), goodput()
    for _ in range(100):
        brought = outcome(rich.decide(state), [12], seconds=0.04)
        rich.learn(brought._replace(plain_seconds=0.03))
    assert rich.decide(state).k[0] < fresh.decide(state).k[0]


def test_stale_models_wait_until_catching_up_pays() -> None:
    cost = StepCost(PROPOSERS, ENGINE)
    rng = np.random.default_rng(0)
    for step in range(400):
        stale, depth = np.zeros((2, len(PROPOSERS)))
        if step % 2:
            stale[DRAFT], depth[DRAFT] = rng.integers(0, 200), 3
        load = StepLoad(1 + 3 * (step % 2), 1, 100, bool(step % 2), depth, depth, stale)
        drafting = 0.001 * depth + 0.001 * stale
        cost.observe(load, 0.03 + drafting.sum(), drafting)
    for stale_tokens, drafts in ((0.0, True), (5000.0, False)):
        state = view(1, limits=[[0], [0], [8]], cost=cost, stale=stale_tokens)
        decision = goodput().decide(with_hazards(state, 0.0, 0.0, 0.8))
        assert bool(decision.k.any()) is drafts


def test_trim_cuts_drafts_that_turned_out_doubtful() -> None:
    policy = goodput()
    state = with_hazards(view(2, limits=[[0, 0], [0, 0], [8, 8]], cost=DEAR_TOKENS), 0, 0, 0.97)
    decision = policy.decide(state)
    assert (decision.k >= 3).all()
    known = state.hazards.copy()
    known[0, DRAFT, 1:] = 0.05
    kept = policy.trim(state, decision, known)
    assert kept[0] == 1
    assert kept[1] == decision.k[1]


def test_trim_never_lengthens() -> None:
    policy = goodput()
    state = with_hazards(view(2, cost=CHEAP_TOKENS), 0.5, 0.5, 0.5)
    decision = policy.decide(state)
    assert (policy.trim(state, decision, np.full_like(state.hazards, 0.999)) <= decision.k).all()


def test_slo_puts_requests_behind_their_target_first() -> None:
    state = view(2, limits=[[0, 0], [16, 16], [0, 0]], cost=DEAR_TOKENS)
    state = with_hazards(state, 0.0, 0.8, 0.0)
    even = goodput("slo").decide(state).k
    behind = goodput("slo").decide(state._replace(behind=np.array([3.0, 0.5]))).k
    assert even[0] == even[1]
    assert behind[0] > behind[1]


def test_slo_lets_requests_far_ahead_make_way() -> None:
    state = view(3, limits=[[0, 0, 0], [16, 16, 16], [0, 0, 0]], cost=make_cost(0.02, 0.004))
    state = with_hazards(state, 0.0, 0.8, 0.0)._replace(behind=np.array([1.1, 0.9, 0.5]))
    late, close, early = goodput("slo").decide(state).k
    assert late >= close > early


def test_slo_is_throughput_when_all_are_equally_behind() -> None:
    """An overload is no reason to draft what does not pay: that would put all further behind."""
    policy = goodput("slo")
    state = with_hazards(view(4, cost=make_cost(0.02, 0.004)), 0.0, 0.6, 0.0)
    for _ in range(100):
        brought = outcome(policy.decide(state), [1] * 4, seconds=0.05)
        policy.learn(brought._replace(plain_seconds=0.04))
    on_target = policy.decide(state)
    late = policy.decide(state._replace(behind=np.full(4, 3.0)))
    assert names(late) == names(on_target)


def test_slo_goes_on_for_ever() -> None:
    """Weights are applied to this step's gains alone, not again and again to old ones."""
    policy = goodput("slo")
    state = view(2, cost=CHEAP_TOKENS)._replace(behind=np.array([4.0, 4.0]))
    first = names(policy.decide(state))
    short = state._replace(limits=np.minimum(state.limits, 1))
    for _ in range(200):
        policy.decide(short)
    assert names(policy.decide(state)) == first


def test_hysteresis_keeps_a_model_that_is_just_not_worth_it() -> None:
    state = view(1, limits=[[0], [0], [8]], cost=CHEAP_TOKENS)
    policy = goodput(hysteresis=0.1)
    switches, last = 0, None
    rng = np.random.default_rng(0)
    for _ in range(200):
        wavering = with_hazards(state, 0.0, 0.0, 0.05 + 0.02 * rng.random())
        on = bool(policy.decide(wavering).k.any())
        switches += int(last is not None and on != last)
        last = on
    assert switches <= 1


@pytest.mark.parametrize("paying", [True, False])
def test_lookups_are_asked_for_while_they_pay(paying: bool) -> None:
    policy = goodput()
    state = with_hazards(view(1, cost=CHEAP_TOKENS), 0.0, 0.9 if paying else 0.01, 0.0)
    asked = 0
    for _ in range(1000):
        wanted = policy.wants_offers()
        assert not wanted[DRAFT]
        asked += int(wanted[SUFFIX])
        limits = np.where(wanted[:, None] | ~policy.lookup[:, None], state.limits, 0)
        decision = policy.decide(state._replace(limits=limits.astype(np.int16)))
        brought = outcome(decision, [8 if decision.k[0] and paying else 0], seconds=0.04)
        policy.learn(
            brought._replace(draft_seconds=np.where(wanted, 0.002, 0.0), plain_seconds=0.03)
        )
    assert (asked == 1000) is paying
    assert paying or asked < 400


def test_state_survives_json() -> None:
    first, second = goodput(), goodput()
    state = with_hazards(view(2, cost=CHEAP_TOKENS), 0.3, 0.6, 0.7)
    for _ in range(50):
        brought = outcome(first.decide(state), [2, 0], seconds=0.04)
        first.learn(brought._replace(plain_seconds=0.03, draft_seconds=np.full(3, 0.001)))
    second.restore(json.loads(json.dumps(first.state())))
    assert names(first.decide(state)) == names(second.decide(state))
    assert first.state() == second.state()
