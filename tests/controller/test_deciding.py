"""The controller decides well: on simulated engines it comes near what is best there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from autospec.records import BatchState, ProposerInfo, StepResult
from tests.controller.serving import CHEAP_TOKENS, DEAR_TOKENS, serve, state_of
from tests.simulated_engine import ENGINE, Drafter, linear_seconds, lookup, model


def best_fixed(
    hazard: float, k_max: int, step_seconds: Callable[[int], float]
) -> tuple[int, float]:
    """The k of highest goodput for one request, and that goodput."""
    ratios = [sum(hazard**j for j in range(k + 1)) / step_seconds(k) for k in range(k_max + 1)]
    return int(np.argmax(ratios)), max(ratios)


@pytest.mark.parametrize("hazard", [0.0, 0.3, 0.6, 0.9])
def test_finds_the_best_k_of_a_lookup(hazard: float) -> None:
    engine = serve([lookup(hazard=hazard)])
    engine.run(300)
    goodput = engine.run(300)
    k, best = best_fixed(hazard, 8, lambda k: CHEAP_TOKENS(1, k))
    assert abs(engine.mean_k(200) - k) < 1.0
    assert goodput > 0.93 * best


@pytest.mark.parametrize("reports", [False, True])
@pytest.mark.parametrize("hazard", [0.0, 0.6, 0.9])
def test_finds_the_best_k_of_a_model(hazard: float, reports: bool) -> None:
    engine = serve([model(hazard=hazard, depth_seconds=0.004)], reports_drafting=reports)
    engine.run(400)
    goodput = engine.run(400)
    k, best = best_fixed(hazard, 8, lambda k: CHEAP_TOKENS(1, k) + 0.004 * k)
    assert abs(engine.mean_k(200) - k) < 1.2
    assert goodput > 0.9 * best


def test_the_better_of_two_lookups_drafts() -> None:
    engine = serve([lookup("ngram", 0.4), lookup("suffix", 0.9)])
    engine.run(300)
    proposers = np.concatenate([plan.proposer for plan in engine.plans[-100:]])
    assert np.mean(proposers == 1) > 0.95


def test_confidence_decides_row_by_row() -> None:
    """Offers that say 0.9 come true, those that say 0.2 never do: only the former are verified."""
    engine = serve([lookup()], requests=2)
    for _ in range(200):
        state = state_of(engine)
        assert state.offer_confidence is not None
        state.offer_confidence[:] = np.array([0.9, 0.2], dtype=np.float32)[None, :, None]
        plan = engine.controller.plan(state)
        accepted = np.where([True, False], plan.verify, 0).astype(np.int16)
        seconds = CHEAP_TOKENS(2, int(plan.verify.sum()))
        engine.controller.observe(plan, StepResult(plan.verify, accepted, accepted + 1, seconds))
    assert plan.k.tolist() == [8, 0]


@pytest.mark.parametrize("drafter", [lookup(hazard=0.0), model(hazard=0.0, depth_seconds=0.004)])
def test_switches_off_when_drafts_are_always_wrong(drafter: Drafter) -> None:
    engine = serve([drafter], DEAR_TOKENS, requests=4)
    engine.run(200)
    goodput = engine.run(400)
    assert engine.share_off(400) > 0.95
    assert goodput > 0.97 * 4 / DEAR_TOKENS(4, 0)


@pytest.mark.parametrize("drafter", [lookup(hazard=0.8), model(hazard=0.8, depth_seconds=0.001)])
def test_an_overload_turns_it_off_and_afterwards_it_comes_back(drafter: Drafter) -> None:
    """Tokens are nearly free up to 16 of them, dear beyond: 32 requests must not speculate."""

    def seconds(requests: int, verified: int) -> float:
        tokens = requests + verified
        return 0.03 + 0.0005 * tokens + 0.01 * max(0, tokens - 16)

    engine = serve([drafter], seconds)
    engine.run(200)
    assert engine.mean_k(50) > 4
    engine.start(31)
    engine.run(200)
    assert engine.share_off(100) > 0.8
    engine.finish(31)
    engine.run(400)
    assert engine.mean_k(50) > 4


@pytest.mark.parametrize("drafter", [lookup(hazard=0.0), model(hazard=0.0, depth_seconds=0.002)])
def test_drafts_that_become_good_are_noticed(drafter: Drafter) -> None:
    engine = serve([drafter], requests=2)
    engine.run(200)
    assert engine.share_off(100) > 0.9
    engine.drafters[0].hazards = [0.9] * 8
    engine.run(600)
    assert engine.mean_k(100) > 4


def test_drafts_that_become_bad_are_noticed() -> None:
    for drafter in (lookup(hazard=0.9), model(hazard=0.9, depth_seconds=0.002)):
        engine = serve([drafter], linear_seconds(0.02, 0.004), requests=2)
        engine.run(1000)
        assert engine.mean_k(100) > 2
        engine.drafters[0].hazards = [0.0] * 8
        engine.run(100)
        assert engine.share_off(30) > 0.8


def test_a_model_that_becomes_dear_is_dropped_and_one_that_becomes_cheap_taken_up_again() -> None:
    drafter = model(hazard=0.8, depth_seconds=0.001)
    engine = serve([drafter], requests=4, reports_drafting=True)
    engine.run(300)
    drafter.depth_seconds = 0.05
    engine.run(600)
    dear = [plan for plan in engine.plans[300:] if plan.k.any()]
    assert sum(plan.mode == "speculate" for plan in dear) <= 2
    probes = [plan for plan in dear if plan.mode == "probe"]
    assert len(probes) <= 4  # a normal one has five by then
    assert all(plan.k.max() == 1 for plan in probes)
    drafter.depth_seconds = 0.001
    engine.run(1200)
    used = [plan.mode == "speculate" and bool(plan.k.any()) for plan in engine.plans[900:]]
    assert np.mean(used[used.index(True) :]) > 0.9


def test_one_slow_draft_changes_nothing() -> None:
    drafter = model(hazard=0.8, depth_seconds=0.001)
    engine = serve([drafter], requests=4, reports_drafting=True)
    engine.run(300)
    drafter.depth_seconds = 0.05
    engine.run(1)
    drafter.depth_seconds = 0.001
    engine.run(100)
    used = [bool(plan.k.any()) for plan in engine.plans[301:] if plan.mode == "speculate"]
    assert np.mean(used) > 0.95


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("slow_steps", [6, 20, 40])
def test_a_slow_time_of_the_machine_is_over_when_it_is_over(slow_steps: int, seed: int) -> None:
    """Steps with drafts alone may have been the slow ones: they must not look dear for ever."""
    drafters = [lookup("ngram", 0.8, fires=0.5), lookup("suffix", 0.75, fires=0.5)]
    engine = serve(drafters, yaml="guard: {enabled: false}", requests=4, seed=seed, noise=0.05)
    before = engine.run(150)
    slow = linear_seconds(0.3, 0.01)
    for is_slow in np.random.default_rng(seed).random(slow_steps) < 0.5:
        engine.seconds = slow if is_slow else CHEAP_TOKENS
        engine.step()
    engine.seconds = lambda n, verified: (slow if verified else CHEAP_TOKENS)(n, verified)
    engine.run(slow_steps)
    engine.seconds = CHEAP_TOKENS
    engine.run(120)
    assert engine.run(100) > 0.9 * before


@pytest.mark.parametrize("seed", range(6))
def test_drafts_that_looked_dear_are_tried_again(seed: int) -> None:
    """Those with a few drafts were the slow ones: many still pay, or nobody asks lookups at all."""
    drafters = [
        lookup("ngram", 0.8, fires=0.2, max_k=16),
        lookup("suffix", 0.75, fires=0.2, max_k=16),
    ]
    engine = serve(drafters, requests=16, seed=seed, noise=0.05)
    usual = linear_seconds(0.036, 0.0006)
    engine.seconds = usual
    before = engine.run(200)
    engine.seconds = lambda n, verified: usual(n, verified) * (3.0 if 0 < verified < 64 else 1.0)
    engine.run(60)
    engine.seconds = usual
    engine.run(100)
    assert engine.run(100) > 0.93 * before


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("factor", [2.0, 4.0])
@pytest.mark.parametrize("requests", [4, 16])
def test_first_drafts_that_were_slow_do_not_look_dear_for_ever(
    requests: int, factor: float, seed: int
) -> None:
    """Kernels that are compiled at first use, say: one token a step must not remain all."""
    usual = linear_seconds(0.06, 0.004)

    def goodput(first_factor: float) -> float:
        drafters = [lookup("ngram", 0.8, fires=0.4), lookup("suffix", 0.85, fires=0.4)]
        engine = serve(
            drafters, yaml="guard: {enabled: false}", requests=requests, seed=seed, noise=0.05
        )
        engine.seconds = lambda n, verified: usual(n, verified) * (first_factor if verified else 1)
        engine.run(30)
        engine.seconds = usual
        return engine.run(450)

    assert goodput(factor) > 0.93 * goodput(1.0)


@pytest.mark.parametrize("share", [0.5, 0.95, 1.0])
@pytest.mark.parametrize("requests", [4, 64])
def test_a_load_under_which_all_steps_prefill_is_learned(requests: int, share: float) -> None:
    """Drafts pay with few requests and not with many, and hardly a step decodes alone."""
    usual = linear_seconds(0.03, 0.002)

    def goodput(policy: str, seed: int) -> float:
        drafters = [lookup("ngram", 0.7, fires=0.5), lookup("suffix", 0.8, fires=0.5)]
        engine = serve(drafters, yaml=f"policy: {policy}", requests=requests, seed=seed, noise=0.05)
        rng = np.random.default_rng(seed)
        prefilling = 0.0
        for _ in range(500):
            prompts = int(rng.integers(64, 512)) if rng.random() < share else 0
            seconds = 1e-4 * prompts
            prefilling += seconds
            engine.seconds = lambda n, verified: usual(n, verified) + seconds  # noqa: B023
            engine.step(prefill_tokens=prompts)
        return engine.tokens / (engine.clock.now - prefilling)

    best = "{name: 'off'}" if requests == 64 else "{name: static, proposer: suffix, k: 4}"
    ratios = [goodput("{name: goodput}", seed) / goodput(best, seed) for seed in range(4)]
    assert min(ratios) > 0.9
    assert np.mean(ratios) > 0.95


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("factor", [40.0, 1000.0])
@pytest.mark.parametrize("reports", [False, True])
def test_a_model_whose_first_drafts_were_slow_is_taken_up(
    reports: bool, factor: float, seed: int
) -> None:
    def goodput(first_factor: float) -> float:
        drafter = model(hazard=0.8, depth_seconds=0.001 * first_factor)
        engine = serve([drafter], requests=4, reports_drafting=reports, seed=seed, noise=0.05)
        drafted = 0
        for _ in range(600):
            plan, _ = engine.step()
            drafted += bool(plan.k.any())
            if drafted == (3 if reports else 2):
                drafter.depth_seconds = 0.001
        return engine.run(300)

    assert goodput(factor) > 0.93 * goodput(1.0)


def test_a_price_of_tokens_that_comes_and_goes_is_followed() -> None:
    """Plain decoding is looked at after each jump: what it takes now cannot be told from drafts."""

    def goodput(policy: str, seed: int) -> float:
        drafters = [lookup("ngram", 0.7, fires=0.5), lookup("suffix", 0.8, fires=0.5)]
        engine = serve(drafters, yaml=f"policy: {policy}", requests=16, seed=seed, noise=0.05)
        started = engine.clock.now
        for step in range(1200):
            per_token = 0.02 if step // 100 % 2 else 0.001
            engine.seconds = linear_seconds(0.03, per_token)
            engine.step()
        return engine.tokens / (engine.clock.now - started)

    ratios = [
        goodput("{name: goodput}", seed) / goodput("{name: 'off'}", seed) for seed in range(3)
    ]
    assert min(ratios) > 1.15


def test_a_machine_that_becomes_slow_per_token_is_noticed() -> None:
    engine = serve([lookup(hazard=0.6)], requests=8)
    engine.run(1000)
    assert engine.mean_k(100) > 1
    engine.seconds = linear_seconds(0.005, 0.02)
    engine.run(300)
    assert engine.share_off(100) > 0.8


@pytest.mark.parametrize("shape", ["packed", "padded", "stepped"])
@pytest.mark.parametrize("objective", ["throughput", "latency", "slo"])
def test_every_shape_and_objective_gains_on_good_drafts(shape: Any, objective: str) -> None:
    engine_info = replace(ENGINE, shape=shape, captured_sizes=(4, 8, 16, 32))
    engine = serve(
        [lookup(hazard=0.9), model(hazard=0.5, depth_seconds=0.005)],
        yaml=f"policy: {{name: goodput, objective: {objective}}}\ntpot_target_ms: 10",
        requests=4,
        engine=engine_info,
    )
    engine.run(200)
    assert engine.run(200) > 2.0 * 4 / CHEAP_TOKENS(4, 0)


def test_mixed_load_beats_plain_and_every_fixed_k() -> None:
    """Good and hopeless requests side by side: no single k serves both."""
    static = [f"{{name: static, proposer: ngram, k: {k}}}" for k in (1, 2, 4, 8)]
    best = max(mixed_goodput(policy) for policy in ["{name: 'off'}", *static])
    assert mixed_goodput("{name: goodput}") > best * 0.999


def mixed_goodput(policy: str) -> float:
    """The mean over some seeds."""
    goodputs = []
    for seed in range(12):
        engine = serve(
            [lookup("ngram", 0.9)], DEAR_TOKENS, yaml=f"policy: {policy}", requests=0, seed=seed
        )
        engine.start(2, workload="edit")
        engine.start(2, workload="story")
        right = engine._right

        def mixed(n: int) -> Any:
            found = right(n)  # noqa: B023
            hopeless = engine.rng.random((2, 8)) < 0.05  # noqa: B023
            found[0, 2:] = np.cumprod(hopeless, axis=1).sum(axis=1)
            return found

        engine._right = mixed  # type: ignore[method-assign]
        engine.run(200)
        goodputs.append(engine.run(400))
    return float(np.mean(goodputs))


def appending(hazard: float, head_k: int = 2) -> Drafter:
    """A lookup behind the first tokens of ``draft``, as sure of itself as it is right."""
    info = ProposerInfo("both", "parallel", 16, head="draft", head_k=head_k)
    return Drafter(info, [hazard] * 16, call_seconds=0.001, confidence=hazard)


def test_steps_with_appended_drafts_take_and_bring_what_was_predicted() -> None:
    drafters = [model(hazard=0.9, max_k=2, depth_seconds=0.002), appending(0.9)]
    engine = serve(drafters, linear_seconds(0.01, 0.0002), requests=8)
    engine.run(400)
    steps = list(zip(engine.plans[100:], engine.results[100:], strict=True))
    assert np.mean([plan.verify.max() > 2 for plan, _ in steps]) > 0.9
    spent = [result.step_seconds / (plan.predicted_seconds or 1.0) for plan, result in steps]
    came = [result.committed.sum() / plan.predicted_tokens for plan, result in steps]
    assert np.median(spent) == pytest.approx(1.0, abs=0.1)
    assert np.median(came) == pytest.approx(1.0, abs=0.1)


def test_what_is_appended_waits_until_the_rate_of_a_workload_is_known() -> None:
    """Without a going rate its share counts for nothing, nor is it asked for beyond its worth."""
    drafters = [model(hazard=0.6, max_k=2, depth_seconds=0.002), appending(0.6)]
    engine = serve(drafters, linear_seconds(0.01, 0.001), requests=0)
    engine.start(8, workload="a")
    engine.run(120)
    engine.finish(8)
    engine.start(8, workload="b")
    appended = engine.controller.policy._appended  # type: ignore[attr-defined]
    learned = np.array(appended.state()["expected"])
    plan, _ = engine.step()
    assert plan.mode != "fallback"
    assert int(plan.k.max()) < 16
    assert (appended.state()["expected"] <= learned).all()


def test_a_padded_engine_is_asked_for_little_more_than_it_has_taken() -> None:
    engine = serve(
        [lookup(hazard=0.95, max_k=12)], requests=64, engine=replace(ENGINE, shape="padded")
    )
    most = 0
    for _ in range(40):
        plan, _ = engine.step()
        paid = 64 * (1 + int(plan.verify.max()))
        assert paid <= max(2 * 64, 1.5 * most)
        most = max(most, paid)
    assert most >= 64 * 8


def test_a_step_is_held_to_its_own_promise() -> None:
    """The lookup drafts in every other step; each is over only when the next one is planned."""
    engine = serve([lookup(hazard=1.0)], requests=1, reports_drafting=True)
    controller = engine.controller
    engine.run(40)
    handles, context = np.array(engine.handles), np.array([100], dtype=np.int32)
    sure = np.full((1, 1, 8), 0.5, dtype=np.float32)
    under_way: Any = None
    for n in range(600):
        offered = np.array([[8 if n % 2 else 0]], dtype=np.int16)
        plan = controller.plan(BatchState(handles, context, offered, sure))
        if under_way is not None:
            k = under_way.k
            seconds, drafting = CHEAP_TOKENS(1, int(k.sum())) + 0.0005, np.array([0.0005])
            controller.observe(under_way, StepResult(k, k, k + 1, seconds, drafting))
        under_way = plan
    assert controller.policy.gate is not None
    assert controller.policy.gate.arrays.balance[0] > 2.0


def test_a_steps_seconds_are_predicted_with_its_prefill() -> None:
    engine = serve([lookup(hazard=0.8)], requests=4, noise=0.0)
    engine.run(100)
    usual = engine.seconds
    ratios = []
    for prompt_tokens in (0, 100, 400) * 30:
        engine.seconds = lambda n, verified: usual(n, verified) + 0.0002 * prompt_tokens  # noqa: B023
        plan, result = engine.step(prefill_tokens=prompt_tokens)
        assert plan.predicted_seconds is not None
        ratios.append(result.step_seconds / plan.predicted_seconds)
    assert ratios[-30:] == pytest.approx([1.0] * 30, rel=0.1)
