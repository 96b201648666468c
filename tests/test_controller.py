from __future__ import annotations

import json
import logging
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from autospec.config import load_settings, parse_settings
from autospec.controller import Controller
from autospec.errors import ConfigError, ProfileError, ProfileMismatch
from autospec.journal import Journal
from autospec.journal_reader import read_journal
from autospec.metrics import Metrics
from autospec.policy.base import Decision, View
from autospec.profile_file import load_profile
from autospec.records import BatchState, EngineInfo, ProposerInfo, Request, StepResult
from tests.simulated_engine import (
    ENGINE,
    PROMPT,
    Clock,
    Drafter,
    SimulatedEngine,
    linear_seconds,
    lookup,
    model,
)

CHEAP_TOKENS = linear_seconds(0.03, 0.001)
DEAR_TOKENS = linear_seconds(0.005, 0.01)


def serve(
    drafters: Sequence[Drafter],
    seconds: Callable[[int, int], float] = CHEAP_TOKENS,
    *,
    yaml: str = "",
    requests: int = 1,
    engine: EngineInfo = ENGINE,
    metrics: Metrics | None = None,
    journal: Journal | None = None,
    **options: Any,
) -> SimulatedEngine:
    """A simulated engine that runs some requests under a policy file's text."""
    clock = Clock()
    controller = Controller(
        parse_settings(f"version: 1\n{yaml}"),
        [drafter.info for drafter in drafters],
        engine,
        metrics=metrics,
        journal=journal,
        clock=clock,
        wall_clock=clock,
    )
    simulated = SimulatedEngine(controller, drafters, clock, seconds, **options)
    simulated.start(requests)
    return simulated


def best_fixed(
    hazard: float, k_max: int, step_seconds: Callable[[int], float]
) -> tuple[int, float]:
    """The k of highest goodput for one request, and that goodput."""
    ratios = [sum(hazard**j for j in range(k + 1)) / step_seconds(k) for k in range(k_max + 1)]
    return int(np.argmax(ratios)), max(ratios)


# Deciding well ---------------------------------------------------------------------------------


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
    results = {}
    for name, policy in {
        "adaptive": "{name: goodput}",
        "plain": "{name: 'off'}",
        **{f"k{k}": f"{{name: static, proposer: ngram, k: {k}}}" for k in (1, 2, 4, 8)},
    }.items():
        good, bad = lookup("ngram", 0.9), lookup("ngram", 0.05)
        engine = serve([good], DEAR_TOKENS, yaml=f"policy: {policy}", requests=0)
        engine.start(2, workload="edit")
        engine.start(2, workload="story")
        right = engine._right

        def mixed(n: int) -> Any:
            found = right(n)  # noqa: B023
            hopeless = engine.rng.random((2, 8)) < bad.hazards[0]  # noqa: B023
            found[0, 2:] = np.cumprod(hopeless, axis=1).sum(axis=1)
            return found

        engine._right = mixed  # type: ignore[method-assign]
        engine.run(200)
        results[name] = engine.run(400)
    assert results["adaptive"] > max(results.values()) * 0.999


# Obeying ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["{name: static, proposer: draft, k: 3}", "{name: 'off'}"])
def test_static_policies_are_obeyed(policy: str) -> None:
    """No probes and no guard, however bad it is."""
    engine = serve(
        [lookup(hazard=0.0), model(hazard=0.0, depth_seconds=0.1)],
        DEAR_TOKENS,
        yaml=f"policy: {policy}",
        requests=3,
    )
    engine.run(300)
    wanted = 3 if "static" in policy else 0
    assert {plan.mode for plan in engine.plans} == {"speculate" if wanted else "plain"}
    assert all((plan.k == wanted).all() for plan in engine.plans)


def test_opting_out_and_capping_one_request() -> None:
    engine = serve([lookup(hazard=0.95)], requests=0)
    engine.start(max_k=0)
    engine.start(max_k=3)
    engine.start()
    engine.start(max_k=-5)
    engine.start(max_k=10**9)
    engine.run(200)
    k = np.array([plan.k for plan in engine.plans])
    assert k.max(axis=0).tolist() == [0, 3, 8, 0, 8]


def test_the_policy_files_cap_holds_for_every_request() -> None:
    engine = serve([lookup(hazard=0.95)], yaml="max_k: 2", requests=0)
    engine.start(max_k=7)
    engine.run(100)
    assert max(plan.k[0] for plan in engine.plans) == 2


def test_only_allowed_proposers_draft() -> None:
    drafters = [lookup("ngram", 0.9), lookup("suffix", 0.9), model("draft", 0.9)]
    engine = serve(drafters, yaml="proposers: [suffix]")
    engine.run(200)
    used = set(np.concatenate([plan.proposer for plan in engine.plans]).tolist())
    assert used == {-1, 1} or used == {1}
    assert engine.controller.wants_offers().tolist() == [False, True, False]


def test_a_proposer_that_is_not_there_is_a_clear_error() -> None:
    with pytest.raises(ConfigError, match="'sufix' is not a proposer of this engine"):
        serve([lookup("suffix")], yaml="proposers: [sufix]")
    with pytest.raises(ConfigError, match="every name must differ"):
        serve([lookup("suffix"), lookup("suffix")])


def test_room_is_respected() -> None:
    engine = serve([lookup(hazard=0.95)], requests=3)
    for _ in range(100):
        plan, _ = engine.step(room=np.array([0, 2, 100], dtype=np.int16))
        assert (plan.k <= [0, 2, 100]).all()
    assert plan.k[2] > 2


def test_trim_verifies_no_more_than_was_drafted() -> None:
    controller = serve([model(hazard=0.9)], yaml="policy: {name: static, proposer: draft, k: 5}")
    handles = np.array(controller.handles, dtype=np.int64)
    plan = controller.controller.plan(BatchState(handles, np.array([10], dtype=np.int32)))
    for drafted, verified in ((3, 3), (0, 0), (9, 5), (-2, 0)):
        trimmed = controller.controller.trim(plan, np.array([drafted], dtype=np.int16), None)
        assert trimmed.verify.tolist() == [verified]
        assert trimmed.id == plan.id
        assert plan.verify.tolist() == [5]


def test_trim_learns_which_draft_confidences_come_true() -> None:
    """A model that is unsure of its token is right to be: those drafts are not verified."""
    clock = Clock()
    info = ProposerInfo("draft", "sequential", 4)
    controller = Controller(parse_settings("version: 1"), [info], ENGINE, clock=clock)
    rng = np.random.default_rng(0)
    handle = np.array([controller.start(Request("r", PROMPT))])
    kept: dict[bool, list[int]] = {True: [], False: []}
    for step in range(1500):
        plan = controller.plan(BatchState(handle, np.array([100], dtype=np.int32)))
        sure = bool(rng.random() < 0.6)
        confidence = np.full((1, 4), 0.95 if sure else 0.15, dtype=np.float32)
        plan = controller.trim(plan, plan.k, confidence)
        right = 4 if sure else 0
        accepted = np.minimum(plan.verify, right).astype(np.int16)
        if step > 500 and plan.mode == "speculate" and plan.k[0]:
            kept[sure].append(int(plan.verify[0] == plan.k[0]))
        seconds = 0.005 + 0.01 * (1 + int(plan.verify.sum())) + 0.0005 * int(plan.k.max())
        controller.observe(
            plan, StepResult(plan.verify, accepted, (accepted + 1).astype(np.int16), seconds)
        )
    assert np.mean(kept[True]) > 0.9
    assert np.mean(kept[False]) < 0.3


def test_slo_targets_shift_drafts_to_requests_that_are_late() -> None:
    engine = serve(
        [lookup(hazard=0.7)],
        linear_seconds(0.02, 0.008),
        yaml="policy: {name: goodput, objective: slo}",
        requests=0,
    )
    engine.start(tpot_target_seconds=0.001)  # cannot be met
    engine.start(tpot_target_seconds=10.0)
    engine.start()
    engine.run(300)
    late, early, without = np.mean([plan.k for plan in engine.plans[-200:]], axis=0)
    assert late > early + 0.5
    assert early <= without + 0.3  # far ahead of its target, it makes way


# Guard and probes ------------------------------------------------------------------------------


def modes(engine: SimulatedEngine, last: int | None = None) -> dict[str, int]:
    plans = engine.plans if last is None else engine.plans[-last:]
    return {mode: sum(plan.mode == mode for plan in plans) for mode in {p.mode for p in plans}}


class Stubborn:
    """A policy's decision replaced by: all draft, whatever it costs."""

    def __init__(self, k: int) -> None:
        self.k = k

    def __call__(self, view: View) -> Decision:
        n = view.requests
        return Decision(np.zeros(n, dtype=np.int16), np.full(n, self.k, dtype=np.int16))


def replace_in_policy(
    monkeypatch: pytest.MonkeyPatch,
    engine: SimulatedEngine,
    method: str,
    stand_in: Callable[..., Any],
) -> None:
    """Replace one method of the policy, which then is no compiled program any more."""
    monkeypatch.setattr(engine.controller.policy, "program", lambda *_: None)
    monkeypatch.setattr(engine.controller.policy, method, stand_in)


def test_the_guard_stops_a_loss_and_lets_go(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = CollectorRegistry()
    engine = serve(
        [lookup(hazard=0.05)],
        DEAR_TOKENS,
        yaml="guard: {window_steps: 32, hold_steps: 20}",
        requests=2,
        metrics=Metrics(registry),
    )
    engine.run(100)
    replace_in_policy(monkeypatch, engine, "decide", Stubborn(4))
    engine.run(2000)
    seen = modes(engine, 2000)
    activations = registry.get_sample_value("autospec_guard_activations_total")
    assert activations is not None
    assert activations >= 4
    assert seen["guard"] > 0.75 * 2000  # holds grow
    assert seen["speculate"] > 32 * (activations - 1) / 2
    engine.drafters[0].hazards = [0.98] * 8
    engine.run(1500)
    assert modes(engine, 300).get("speculate", 0) > 250


def test_the_guard_lets_go_while_every_step_also_prefills(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = serve([lookup(hazard=0.0)], DEAR_TOKENS, yaml="guard: {hold_steps: 20}", requests=2)
    engine.run(100)
    replace_in_policy(monkeypatch, engine, "decide", Stubborn(4))
    while engine.plans[-1].mode != "guard":
        engine.step()
    for _ in range(30):
        engine.step(prefill_tokens=64)
    assert engine.plans[-1].mode != "guard"


def test_the_guard_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = serve([lookup(hazard=0.0)], DEAR_TOKENS, yaml="guard: {enabled: false}", requests=2)
    engine.run(50)
    replace_in_policy(monkeypatch, engine, "decide", Stubborn(4))
    engine.run(300)
    assert "guard" not in modes(engine)


def test_probes_of_a_bad_model_back_off() -> None:
    engine = serve([model(hazard=0.0, depth_seconds=0.01)], requests=2)
    engine.run(3000)
    tried = [step for step, plan in enumerate(engine.plans) if plan.mode == "probe"]
    gaps = np.diff(tried)
    assert 5 <= len(tried) <= 20
    assert gaps[-1] > 8 * gaps[0]


def test_plain_is_probed_while_speculation_goes_well() -> None:
    engine = serve([lookup(hazard=0.95)], requests=2)
    engine.run(600)
    tried = [plan for plan in engine.plans if plan.mode == "probe"]
    assert len(tried) >= 3
    assert all(not plan.k.any() for plan in tried)


def test_probes_can_be_switched_off() -> None:
    engine = serve([model(hazard=0.0, depth_seconds=0.01)], yaml="probe: {enabled: false}")
    engine.run(300)
    assert "probe" not in modes(engine)


def test_few_requests_of_a_large_batch_take_part_in_a_models_probe() -> None:
    engine = serve([model(hazard=0.0, depth_seconds=0.01)], DEAR_TOKENS, requests=64)
    engine.run(300)
    probes = [plan for plan in engine.plans if plan.mode == "probe" and plan.k.any()]
    assert probes
    assert all(np.count_nonzero(plan.k) <= 8 for plan in probes)


# Surviving -------------------------------------------------------------------------------------


@pytest.fixture
def faults(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Messages of faults of AutoSpec's own, logged so far."""
    return lambda: [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR]


GARBAGE_TIMES = [np.nan, np.inf, -np.inf, 0.0, -1.0, 1e-320, 1e300]


@pytest.mark.parametrize("garbage", GARBAGE_TIMES)
def test_unusable_times_are_survived(garbage: float, faults: Callable[[], list[str]]) -> None:
    engine = serve([lookup(hazard=0.9), model(hazard=0.5)], requests=2)
    engine.run(100)
    for step in range(30):
        plan = engine.controller.plan(state_of(engine))
        draft_seconds = np.array([0.001, garbage]) if step % 2 else None
        seconds = 0.03 if step % 4 == 3 else garbage
        engine.controller.observe(
            plan, StepResult(plan.verify, plan.verify, plan.verify + 1, seconds, draft_seconds)
        )
    before = engine.controller.cost.plain_seconds(2, 200)
    engine.run(300)
    assert engine.mean_k(100) > 4
    assert engine.controller.cost.plain_seconds(2, 200) == pytest.approx(0.032, rel=0.2)
    assert before == pytest.approx(0.032, rel=0.5)
    assert not faults()


@pytest.mark.parametrize("garbage", [np.nan, np.inf, 0.0, -1.0])
def test_an_engine_that_never_knows_the_time_decodes_plainly(
    garbage: float, faults: Callable[[], list[str]]
) -> None:
    engine = serve([lookup(hazard=0.9)], requests=2)
    for _ in range(50):
        plan = engine.controller.plan(state_of(engine))
        engine.controller.observe(
            plan, StepResult(plan.verify, plan.verify, plan.verify + 1, garbage)
        )
        assert not plan.k.any()
        assert plan.predicted_seconds is None
    assert not faults()


def state_of(engine: SimulatedEngine, **more: Any) -> BatchState:
    """A batch of the engine's requests with full offers."""
    n, controller = len(engine.handles), engine.controller
    p = len(controller.proposers)
    lengths = np.zeros((p, n), dtype=np.int16)
    for q, info in enumerate(controller.proposers):
        lengths[q] = info.max_k if info.kind == "lookup" else 0
    state = BatchState(
        np.array(engine.handles, dtype=np.int64),
        np.full(n, 100, dtype=np.int32),
        offer_lengths=lengths,
        offer_confidence=np.full((p, n, controller.k_max), 0.5, dtype=np.float32),
    )
    return replace(state, **more)


def test_empty_batches(faults: Callable[[], list[str]]) -> None:
    engine = serve([lookup(), model()], requests=0)
    for _ in range(5):
        plan, _ = engine.step()
        assert plan.handles.shape == plan.k.shape == (0,)
    engine.start(2)
    engine.run(50)
    engine.finish(2)
    engine.run(5)
    assert not faults()


def test_no_proposers_is_plain_decoding(faults: Callable[[], list[str]]) -> None:
    engine = serve([], requests=2)
    engine.run(50)
    assert engine.controller.k_max == 0
    assert modes(engine).keys() <= {"plain", "probe"}
    plan = engine.controller.plan(state_of(engine))
    engine.controller.observe(
        plan, StepResult(plan.verify, plan.verify, plan.verify + 1, 0.03, np.zeros(0))
    )
    assert not faults()


def test_requests_that_finish_between_plan_and_observe(faults: Callable[[], list[str]]) -> None:
    """Their rows may already belong to others, who must not be taken for them."""
    engine = serve([lookup(hazard=0.8)], linear_seconds(0.03, 0.002), requests=2)
    engine.run(200)
    controller = engine.controller
    zeros = np.zeros(2, dtype=np.int16)
    for _ in range(12):
        plan = controller.plan(state_of(engine))
        for handle in engine.handles:
            controller.finish(handle)
        engine.handles = [controller.start(Request("new", PROMPT)) for _ in engine.handles]
        controller.observe(plan, StepResult(plan.verify, zeros, zeros + 1, 0.04))
    engine.handles.append(controller.start(Request("another", PROMPT)))
    k = controller.plan(state_of(engine)).k
    assert k[0] == k[1] == k[2]
    assert not faults()


def test_observations_out_of_order_lost_and_repeated(faults: Callable[[], list[str]]) -> None:
    registry = CollectorRegistry()
    engine = serve([lookup(hazard=0.9)], requests=2, metrics=Metrics(registry))
    controller = engine.controller
    rng = np.random.default_rng(0)
    waiting = []
    for _ in range(400):
        plan = controller.plan(state_of(engine))
        waiting.append(plan)
        if len(waiting) > 4:
            late = waiting.pop(int(rng.integers(len(waiting))))
            if rng.random() < 0.8:  # else it is lost
                result = StepResult(late.verify, late.verify, late.verify + 1, 0.04)
                controller.observe(late, result)
                if rng.random() < 0.2:
                    controller.observe(late, result)
    ancient = waiting[0]
    for _ in range(100):
        controller.plan(state_of(engine))
    controller.observe(ancient, StepResult(ancient.k, ancient.k, ancient.k + 1, 0.04))
    dropped = registry.get_sample_value(
        "autospec_dropped_observations_total", {"reason": "late or repeated"}
    )
    assert dropped is not None
    assert dropped > 20
    committed = sum(
        sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name == "autospec_committed_tokens_total"
    )
    assert committed > 0
    assert not faults()


def broken_results(n: int, p: int) -> Mapping[str, StepResult]:
    """Results that no correct engine would report."""
    ok = np.ones(n, dtype=np.int16)
    return {
        "short": StepResult(ok[:1], ok[:1], ok[:1], 0.03),
        "long": StepResult(np.ones(n + 5, dtype=np.int16), ok, ok, 0.03),
        "two axes": StepResult(ok[None], ok, ok, 0.03),
        "no axes": StepResult(np.array(1, dtype=np.int16), ok, ok, 0.03),
        "matched": StepResult(ok, ok, ok, 0.03, matched=np.ones((p, 1), dtype=np.int16)),
        "draft times": StepResult(ok, ok, ok, 0.03, draft_seconds=np.zeros(p + 3)),
        "lists": StepResult([1] * n, [1] * n, [1] * n, 0.03),  # type: ignore[arg-type]
        "none": StepResult(None, None, None, None),  # type: ignore[arg-type]
        "text": StepResult(ok, ok, ok, "soon"),  # type: ignore[arg-type]
        "floats": StepResult(ok * np.nan, ok, ok, 0.03),  # type: ignore[arg-type]
        "objects": StepResult(np.array([{}] * n), ok, ok, 0.03),
    }


@pytest.mark.parametrize("kind", sorted(broken_results(1, 1)))
def test_broken_results_are_counted_not_raised(kind: str) -> None:
    registry = CollectorRegistry()
    engine = serve([lookup(hazard=0.9)], requests=3, metrics=Metrics(registry))
    engine.run(100)
    for _ in range(3):
        plan = engine.controller.plan(state_of(engine))
        engine.controller.observe(plan, broken_results(3, 1)[kind])
    engine.run(100)
    assert engine.mean_k(50) > 4
    assert registry.get_sample_value("autospec_steps_total", {"mode": "speculate"}) > 100  # type: ignore[operator]


@pytest.mark.parametrize("accepted, committed", [(99, 1), (-5, -7), (32767, 32767), (3, 0)])
def test_impossible_counts_are_bounded(accepted: int, committed: int, tmp_path: Path) -> None:
    engine = serve([lookup(hazard=0.9)], requests=3)
    engine.run(100)
    for _ in range(20):
        plan = engine.controller.plan(state_of(engine))
        kept = np.full(3, accepted, dtype=np.int16)
        added = np.full(3, committed, dtype=np.int16)
        matched = np.full((1, 3), accepted, dtype=np.int16)
        engine.controller.observe(plan, StepResult(kept, kept, added, 0.04, matched=matched))
    path = engine.controller.save(tmp_path / "profile.json")
    assert path is not None
    for workload in load_profile(path).workloads.values():
        counts = workload.proposers["ngram"]
        assert (counts["successes"] <= counts["trials"]).all()


def test_a_batch_without_handles_is_empty() -> None:
    engine = serve([lookup()], requests=1)
    state = state_of(engine, handles=None)
    plan = engine.controller.plan(state)
    assert plan.mode == "fallback"
    assert plan.k.shape == (0,)


def test_a_machine_that_slept_for_a_day_wakes_as_it_was() -> None:
    engine = serve([lookup(hazard=0.6)], requests=2)
    engine.run(300)
    before = engine.mean_k(100)
    for _ in range(2):
        plan = engine.controller.plan(state_of(engine))
        zeros = np.zeros(2, dtype=np.int16)
        engine.controller.observe(plan, StepResult(plan.verify, zeros, zeros + 1, 86_400.0))
    engine.run(100)
    assert engine.mean_k(50) == pytest.approx(before, rel=0.25)


BROKEN_BATCHES: dict[str, Callable[[BatchState], BatchState]] = {
    "context": lambda b: replace(b, context_tokens=np.zeros(1, dtype=np.int32)),
    "offers": lambda b: replace(b, offer_lengths=np.ones((1, 1), dtype=np.int16)),
    "offers 1d": lambda b: replace(b, offer_lengths=np.ones(3, dtype=np.int16)),
    "confidence": lambda b: replace(b, offer_confidence=np.ones((1, 3, 1), dtype=np.float32)),
    "room": lambda b: replace(b, room=np.ones(9, dtype=np.int16)),
    "stale": lambda b: replace(b, stale_tokens=np.ones((4, 4), dtype=np.int32)),
    "last": lambda b: replace(b, last_tokens=np.ones((3, 3), dtype=np.int32)),
    "text": lambda b: replace(b, context_tokens=np.array(["a", "b", "c"])),
}


@pytest.mark.parametrize("kind", sorted(BROKEN_BATCHES))
def test_broken_batches_are_decoded_plainly(kind: str) -> None:
    registry = CollectorRegistry()
    engine = serve([lookup(hazard=0.9)], requests=3, metrics=Metrics(registry))
    engine.run(100)
    plan = engine.controller.plan(BROKEN_BATCHES[kind](state_of(engine)))
    assert plan.mode == "fallback"
    assert plan.k.tolist() == [0, 0, 0]
    assert registry.get_sample_value("autospec_fallbacks_total", {"reason": "plan"}) == 1.0
    plan = engine.controller.trim(plan, plan.k, None)
    engine.controller.observe(plan, StepResult(plan.verify, plan.verify, plan.verify + 1, 0.03))
    assert registry.get_sample_value("autospec_steps_total", {"mode": "fallback"}) == 1.0
    engine.run(50)
    assert engine.mean_k(20) > 4


def test_other_integer_types_mean_the_same() -> None:
    plans = []
    for kind in (np.int16, np.int32, np.int64, np.uint8):
        engine = serve([lookup(hazard=0.9)], requests=2, noise=0.0)
        for _ in range(60):
            state = state_of(engine)
            assert state.offer_lengths is not None
            state = replace(
                state,
                offer_lengths=state.offer_lengths.astype(kind),
                context_tokens=state.context_tokens.astype(kind),
                room=np.full(2, 100, dtype=kind),
                last_tokens=np.full(2, 7, dtype=kind),
            )
            plan = engine.controller.plan(state)
            plan = engine.controller.trim(plan, plan.k.astype(kind), None)
            counts = plan.verify.astype(kind)
            matched = np.full((1, 2), 8, dtype=kind)
            engine.controller.observe(
                plan, StepResult(counts, counts, counts + 1, 0.04, matched=matched)
            )
        assert plan.k.dtype == np.int16
        plans.append(plan.k.tolist())
    assert plans == [plans[0]] * 4
    assert plans[0][0] > 4


@pytest.mark.parametrize("kind", [np.int16, np.int32])
def test_a_batch_that_is_given_again_is_read_again(kind: type[np.integer[Any]]) -> None:
    engine = serve([lookup(hazard=0.95)], requests=2, noise=0.0)
    engine.run(60)
    room = np.full(2, 100, dtype=kind)
    state = state_of(engine, room=room)
    for most in (100, 3, 100, 2):
        room[:] = most
        plan = engine.controller.plan(state)
        assert plan.k.tolist() == [min(most, plan.k.max())] * 2
        assert plan.k[0] > 4 or most < 100


def test_more_room_than_a_short_integer_holds_is_room() -> None:
    engine = serve([lookup(hazard=0.9)], requests=1)
    for _ in range(100):
        plan, _ = engine.step(room=np.array([40_000], dtype=np.int64))
    assert plan.k[0] > 4


def test_unknown_handles_are_not_speculated_for() -> None:
    registry = CollectorRegistry()
    engine = serve([lookup(hazard=0.9)], requests=2, metrics=Metrics(registry))
    engine.run(60)
    handles = np.array([engine.handles[0], -1, 0, 2**62, engine.handles[1] + (1 << 20)])
    state = state_of(engine)
    plan = engine.controller.plan(
        BatchState(
            handles,
            np.full(5, 100, dtype=np.int32),
            np.full((1, 5), 8, dtype=np.int16),
            np.full((1, 5, 8), 0.9, dtype=np.float32),
        )
    )
    assert state.handles[0] == handles[0]
    assert plan.k[0] > 0
    assert not plan.k[1:].any()
    engine.controller.observe(plan, StepResult(plan.verify, plan.verify, plan.verify + 1, 0.03))
    for unknown in (-1, 0, 2**62, 2**80, engine.handles[0] + (1 << 20)):
        engine.controller.finish(unknown)
    reason = {"reason": "unknown request"}
    assert registry.get_sample_value("autospec_dropped_observations_total", reason) == 6.0
    engine.controller.finish(engine.handles[0])
    engine.controller.finish(engine.handles[0])
    assert registry.get_sample_value("autospec_dropped_observations_total", reason) == 7.0


def test_huge_contexts_and_stale_caches(faults: Callable[[], list[str]]) -> None:
    engine = serve([lookup(hazard=0.9), model(hazard=0.9)], requests=2)
    for _ in range(60):
        state = state_of(
            engine,
            context_tokens=np.full(2, 2**31 - 1, dtype=np.int32),
            stale_tokens=np.full((2, 2), 2**31 - 1, dtype=np.int32),
        )
        plan = engine.controller.plan(state)
        engine.controller.observe(plan, StepResult(plan.verify, plan.verify, plan.verify + 1, 0.04))
    assert np.isfinite(engine.controller.cost.beta).all()
    assert not faults()


def test_negative_and_missing_numbers_in_a_batch(faults: Callable[[], list[str]]) -> None:
    engine = serve([lookup(hazard=0.9), model(hazard=0.9)], requests=2)
    engine.run(60)
    negative = np.full(2, -5)
    for step in range(40):
        plan = engine.controller.plan(
            state_of(
                engine,
                offer_lengths=np.full((2, 2), -3, dtype=np.int16),
                offer_confidence=np.full((2, 2, 8), np.nan, dtype=np.float32),
                context_tokens=negative if step % 2 else np.full(2, 100, dtype=np.int32),
                last_tokens=negative,
                stale_tokens=np.full((2, 2), -7) if step % 3 else np.full((2, 2), np.nan),
                room=negative,
            )
        )
        assert not plan.k.any()
        engine.controller.observe(plan, StepResult(plan.k, plan.k, plan.k + 1, 0.03))
    engine.run(60)
    assert engine.mean_k(20) > 4
    assert not faults()


class Broken:
    """A policy's method that fails now and then."""

    def __init__(self, every: int) -> None:
        self.every, self.calls = every, 0

    def __call__(self, *_: object) -> Any:
        self.calls += 1
        if self.calls % self.every == 0:
            raise RuntimeError("policy is broken")
        return np.zeros(1)


@pytest.mark.parametrize("method", ["decide", "trim", "learn", "program"])
def test_a_policy_that_raises_is_counted_and_logged_once(
    method: str, monkeypatch: pytest.MonkeyPatch, faults: Callable[[], list[str]]
) -> None:
    registry = CollectorRegistry()
    drafter = model(hazard=0.9, depth_seconds=0.001)
    engine = serve([drafter], metrics=Metrics(registry))
    engine.run(60)
    replace_in_policy(monkeypatch, engine, method, Broken(1))
    engine.run(40)
    place = {"trim": "trim", "learn": "observe"}.get(method, "plan")
    count = registry.get_sample_value("autospec_fallbacks_total", {"reason": place})
    assert count is not None
    assert count >= 30
    assert len(faults()) == 1
    if place == "plan":
        assert engine.share_off(30) == 1.0


@pytest.mark.parametrize(
    "decision",
    [
        Decision(np.array([5], dtype=np.int16), np.array([3], dtype=np.int16)),
        Decision(np.array([0], dtype=np.int16), np.array([99], dtype=np.int16)),
        Decision(np.array([0], dtype=np.int16), np.array([-4], dtype=np.int16)),
        Decision(np.array([-3], dtype=np.int16), np.array([4], dtype=np.int16)),
        Decision(np.array([0], dtype=np.int64), np.array([4], dtype=np.int64)),
    ],
)
def test_a_policys_decision_is_kept_within_bounds(
    decision: Decision, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = serve([lookup(hazard=0.9)])
    engine.run(20)
    replace_in_policy(monkeypatch, engine, "decide", lambda view: decision)
    for _ in range(40):
        plan, _ = engine.step()
        assert 0 <= plan.k[0] <= 8
        assert (plan.proposer[0] == 0) == (plan.k[0] > 0)
        assert plan.proposer[0] in (-1, 0)


# Counting, saving, lasting ---------------------------------------------------------------------


def test_metrics_equal_what_was_fed_in() -> None:
    registry = CollectorRegistry()
    drafters = [lookup("ngram", 0.7, fires=0.6), model("draft", 0.6, depth_seconds=0.002)]
    engine = serve(drafters, requests=0, metrics=Metrics(registry))
    engine.start(2, workload="edit")
    engine.start(3, workload="chat")
    engine.run(200)
    labels = np.array(["edit"] * 2 + ["chat"] * 3)

    def total(name: str, **wanted: str) -> float:
        return registry.get_sample_value(f"autospec_{name}_total", wanted) or 0.0

    for index, drafter in enumerate(drafters):
        for workload in ("edit", "chat"):
            sums = np.zeros(3)
            for plan, result in zip(engine.plans, engine.results, strict=True):
                rows = (plan.proposer == index) & (labels == workload)
                sums += [plan.k[rows].sum(), plan.verify[rows].sum(), result.accepted[rows].sum()]
            for name, expected in zip(("drafted", "verified", "accepted"), sums, strict=True):
                found = total(f"{name}_tokens", proposer=drafter.info.name, workload=workload)
                assert found == expected, (name, drafter.info.name, workload)
    committed = np.sum([result.committed for result in engine.results], axis=0)
    assert total("committed_tokens", workload="edit") == committed[:2].sum()
    assert total("committed_tokens", workload="chat") == committed[2:].sum()
    for mode, count in modes(engine).items():
        assert total("steps", mode=mode) == count
    assert total("probes") == modes(engine).get("probe", 0)
    assert registry.get_sample_value("autospec_step_seconds_count") == 200
    seconds = sum(result.step_seconds for result in engine.results)
    assert registry.get_sample_value("autospec_step_seconds_sum") == pytest.approx(seconds)
    proposers = np.array([plan.proposer for plan in engine.plans])
    switches = np.count_nonzero(np.diff(proposers, axis=0, prepend=-1))
    assert total("switches") == switches
    assert registry.get_sample_value("autospec_running_requests") == 5


def test_the_measured_speedup_is_near_the_truth() -> None:
    engine = serve([lookup(hazard=0.9)], requests=2)
    engine.run(200)
    goodput = engine.run(800)
    assert engine.controller.measured_speedup is not None
    truth = goodput / (2 / CHEAP_TOKENS(2, 0))
    assert engine.controller.measured_speedup == pytest.approx(truth, rel=0.1)


def test_the_journal_has_every_step(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "steps.jsonl")
    engine = serve([lookup(hazard=0.9)], requests=0, journal=journal)
    engine.start(3, workload="edit")
    engine.run(50)
    engine.controller.close()
    (run,) = read_journal(tmp_path / "steps.jsonl").runs
    assert run.header.proposers == ("ngram",)
    assert run.header.identity["target"] == "target"
    assert "edit" in run.workloads.values()
    assert [step.id for step in run.steps] == [plan.id for plan in engine.plans]
    for step, plan, result in zip(run.steps, engine.plans, engine.results, strict=True):
        assert step.mode == plan.mode
        assert step.requests == 3
        assert step.step_seconds == pytest.approx(result.step_seconds, rel=1e-3)
        assert sum(g.committed * g.requests for g in step.groups) == result.committed.sum()


def profile_yaml(path: Path, more: str = "") -> str:
    return f"profile: {{path: {json.dumps(str(path))}, save_every_seconds: 1e9}}\n{more}"


def test_a_saved_profile_warm_starts_the_next_run(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    drafters = [lookup("ngram", 0.3, confidence=0.9), model("draft", 0.9, depth_seconds=0.001)]
    first = serve(drafters, yaml=profile_yaml(path), requests=0)
    first.start(2, workload="edit")
    assert not first.controller.is_warm
    first.run(400)
    first.controller.close()
    second = serve(drafters, yaml=profile_yaml(path), requests=0, seed=5)
    assert second.controller.is_warm
    second.start(2, workload="edit")
    plan, _ = second.step()
    assert plan.proposer.tolist() == [1, 1]
    assert (plan.k >= 5).all()
    assert plan.predicted_seconds == pytest.approx(
        CHEAP_TOKENS(2, int(plan.k.sum())) + 0.001 * plan.k.max(), rel=0.1
    )
    given = serve(drafters, requests=0)
    controller = Controller(
        parse_settings("version: 1"),
        [drafter.info for drafter in drafters],
        ENGINE,
        profile=load_profile(path),
        clock=given.clock,
        wall_clock=given.clock,
    )
    assert controller.is_warm


def test_saving_twice_does_not_count_twice(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    engine = serve([lookup(hazard=0.7)], yaml=profile_yaml(path), requests=0)
    engine.start(2, workload="edit")
    engine.run(100)
    engine.controller.save()
    once = load_profile(path)
    engine.controller.save()
    engine.controller.close()
    twice = load_profile(path)
    assert once.workloads["edit"].requests == twice.workloads["edit"].requests == 2
    for name, counts in once.workloads["edit"].proposers["ngram"].items():
        assert np.array_equal(counts, twice.workloads["edit"].proposers["ngram"][name]), name
    assert np.array_equal(once.cost["step"]["gram"], twice.cost["step"]["gram"])
    again = serve([lookup(hazard=0.7)], yaml=profile_yaml(path), requests=0)
    again.controller.close()  # loaded and learned nothing
    after = load_profile(path)
    trials = after.workloads["edit"].proposers["ngram"]["trials"]
    assert np.array_equal(trials, once.workloads["edit"].proposers["ngram"]["trials"])


def test_two_controllers_add_up_in_one_file(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    engines = [
        serve([lookup(hazard=0.7)], yaml=profile_yaml(path), requests=0, seed=seed)
        for seed in (0, 1)
    ]
    for engine in engines:
        engine.start(1, workload="edit")
    for _ in range(3):
        for engine in engines:
            engine.run(30)
            engine.controller.save()
    matched = sum(
        int(result.matched[0].min(initial=8) < 8) + int(result.matched.sum())
        for engine in engines
        for result in engine.results
        if result.matched is not None
    )
    saved = load_profile(path)
    assert saved.workloads["edit"].requests == 2
    trials = saved.workloads["edit"].proposers["ngram"]["trials"].sum()
    assert trials == pytest.approx(matched, rel=0.15)
    assert trials > 150


def test_profiles_are_saved_in_the_background(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    yaml = f"profile: {{path: {json.dumps(str(path))}, save_every_seconds: 1}}"
    engine = serve([lookup(hazard=0.7)], yaml=yaml, requests=5)
    engine.run(100)  # about 4 simulated seconds
    engine.finish(1)
    engine.controller.close()
    assert load_profile(path).workloads


def test_a_profile_path_that_cannot_be_written(
    tmp_path: Path, faults: Callable[[], list[str]]
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    registry = CollectorRegistry()
    yaml = f"profile: {{path: {json.dumps(str(blocked / 'p.json'))}, save_every_seconds: 0.001}}"
    engine = serve([lookup(hazard=0.7)], yaml=yaml, requests=20, metrics=Metrics(registry))
    engine.run(20)
    engine.finish(10)
    with pytest.raises(ProfileError, match="cannot be"):
        engine.controller.save()
    engine.controller.close()
    assert len(faults()) == 1
    path = engine.controller.save(tmp_path / "other.json")  # nothing was lost
    assert path is not None
    saved = load_profile(path)
    assert sum(workload.requests for workload in saved.workloads.values()) == 20


def test_a_corrupt_profile_is_kept_aside(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text("{ torn")
    engine = serve([lookup(hazard=0.7)], yaml=profile_yaml(path))
    assert not engine.controller.is_warm
    assert (tmp_path / "profile.json.bad").exists()
    engine.run(20)
    engine.controller.close()
    assert load_profile(path).workloads


@pytest.mark.parametrize("name", ["gram", "weight", "reference"])
def test_a_profile_with_other_arrays_starts_cold(
    tmp_path: Path, name: str, faults: Callable[[], list[str]]
) -> None:
    path = tmp_path / "profile.json"
    first = serve([lookup(hazard=0.7)], yaml=profile_yaml(path))
    first.run(20)
    first.controller.close()
    document = json.loads(path.read_text())
    document["cost"]["step"][name] = [[1.0]]
    path.write_text(json.dumps(document))
    second = serve([lookup(hazard=0.7)], yaml=profile_yaml(path))
    assert not second.controller.is_warm
    second.run(20)
    second.controller.close()
    assert len(faults()) == 2  # the start and the save


def test_another_engines_profile_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    first = serve([lookup(hazard=0.7)], yaml=profile_yaml(path))
    first.run(20)
    first.controller.close()
    other = replace(ENGINE, dtype="bfloat16")
    second = serve([lookup(hazard=0.7)], yaml=profile_yaml(path), engine=other)
    assert not second.controller.is_warm
    with pytest.raises(ProfileMismatch, match="dtype"):
        Controller(
            parse_settings("version: 1"),
            [lookup().info],
            other,
            profile=load_profile(path),
        )


def test_ten_thousand_requests_leave_nothing_behind() -> None:
    registry = CollectorRegistry()
    engine = serve([lookup(hazard=0.7)], requests=0, metrics=Metrics(registry), noise=0.0)
    controller = engine.controller
    seen: set[int] = set()

    def serve_requests(count: int) -> None:
        for i in range(0, count, 10):
            handles = [
                controller.start(Request(f"r{j}", PROMPT, workload=f"label-{j}"))
                for j in range(i, i + 10)
            ]
            seen.update(handles)
            state = BatchState(np.array(handles, dtype=np.int64), np.full(10, 50, dtype=np.int32))
            plan = controller.plan(state)
            controller.observe(plan, StepResult(plan.k, plan.k, plan.k + 1, 0.03))
            for handle in handles:
                controller.finish(handle)

    serve_requests(2000)
    tracemalloc.start()
    serve_requests(500)
    before = tracemalloc.get_traced_memory()[0]
    known = len(seen)
    serve_requests(8000)
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert len(seen) == 10_500  # handles are never given twice
    per_handle = 130  # what the set itself takes
    assert grown < (len(seen) - known) * per_handle + 50_000
    metric_lines = sum(len(family.samples) for family in registry.collect())
    assert metric_lines < 1500  # labels are bounded


def test_more_requests_than_rows_at_once() -> None:
    engine = serve([lookup(hazard=0.9)], requests=200)
    engine.run(30)
    assert len(set(engine.handles)) == 200
    engine.finish(150)
    engine.start(300)
    plan, _ = engine.step()
    assert plan.k.shape == (350,)


def test_bad_requests_still_get_a_handle() -> None:
    engine = serve([lookup(hazard=0.9)], requests=0)
    nan = float("nan")
    requests = [
        Request("list", [1, 2, 3]),  # type: ignore[arg-type]
        Request("none", None),  # type: ignore[arg-type]
        Request("empty", np.zeros(0, dtype=np.int32)),
        Request("nan", PROMPT, temperature=nan, tpot_target_seconds=nan),
        Request("label", PROMPT, workload="\x00\n"),
        Request("long", PROMPT, workload="x" * 100_000),
    ]
    engine.handles = [engine.controller.start(request) for request in requests]
    engine._context = dict.fromkeys(engine.handles, 10)
    engine.run(60)
    assert len(set(engine.handles)) == len(requests)
    assert engine.mean_k(10) > 4


def test_decisions_are_reproducible() -> None:
    runs = []
    for _ in range(2):
        engine = serve([lookup(hazard=0.7), model(hazard=0.5, depth_seconds=0.003)], requests=12)
        engine.run(150)
        runs.append([(plan.mode, plan.proposer.tolist(), plan.k.tolist()) for plan in engine.plans])
    assert runs[0] == runs[1]


def test_a_dozen_lines_are_a_server_loop() -> None:
    """What the README shows, with a server that is made up."""
    controller = Controller(
        load_settings("default"),
        proposers=(ProposerInfo("ngram", "lookup", 8),),
        engine=EngineInfo("target", "own loop", "1", "cpu", "float32"),
    )
    running = [controller.start(Request(f"r{i}", PROMPT)) for i in range(3)]
    for step in range(50):
        batch = BatchState(
            handles=np.array(running),
            context_tokens=np.array([40 + step] * 3),
            offer_lengths=np.full((1, 3), 5),
            offer_confidence=np.full((1, 3, controller.k_max), 0.8),
        )
        plan = controller.plan(batch)
        plan = controller.trim(plan, plan.k, None)
        accepted = plan.verify  # all are right
        controller.observe(plan, StepResult(plan.verify, accepted, accepted + 1, 0.03))
    for handle in running:
        controller.finish(handle)
    controller.close()
    assert plan.k.tolist() == [5, 5, 5]
