"""The controller survives whatever an engine, a clock or a policy does to it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from autospec.config import load_settings
from autospec.controller import Controller
from autospec.errors import ConfigError
from autospec.metrics import Metrics
from autospec.policy.base import Decision
from autospec.profile.file import load_profile
from autospec.records import BatchState, EngineInfo, ProposerInfo, Request, StepResult
from tests.controller.serving import modes, replace_in_policy, serve, state_of
from tests.simulated_engine import ENGINE, PROMPT, linear_seconds, lookup, model

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
    known = json.dumps(engine.controller.policy.state())
    assert "NaN" not in known
    assert "Infinity" not in known


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


def test_strict_raises_what_is_else_counted() -> None:
    for is_strict in (False, True):
        controller = Controller(load_settings("default"), [lookup().info], ENGINE, strict=is_strict)
        handle = controller.start(Request("r", PROMPT))
        batch = BatchState([handle], np.array([40]))  # type: ignore[arg-type]  # a list
        if is_strict:
            with pytest.raises(AttributeError):
                controller.plan(batch)
        else:
            assert controller.plan(batch).mode == "fallback"
        assert controller.faults == ({} if is_strict else {"plan": 1})


@pytest.mark.parametrize("committed", [200, 32767])
def test_more_tokens_than_can_be_committed_do_not_count(
    committed: int, faults: Callable[[], list[str]]
) -> None:
    """As where an engine reports the length of its outputs and not what was added."""
    engine = serve([lookup(hazard=0.0)], requests=2)
    for _ in range(100):
        plan = engine.controller.plan(state_of(engine))
        wrong = np.zeros_like(plan.verify)
        engine.controller.observe(
            plan, StepResult(plan.verify, wrong, np.full_like(wrong, committed), 0.03)
        )
    measured = engine.controller.measured_speedup
    assert measured is not None
    assert measured < 9.5  # a lookup's eight and one
    assert not faults()


@pytest.mark.parametrize(
    "info, engine, said",
    [
        (ProposerInfo("a", "lokup", 4), ENGINE, "kind 'lokup'; allowed: lookup, sequential"),  # type: ignore[arg-type]
        (lookup().info, replace(ENGINE, shape="paded"), "shape is 'paded'; allowed: packed"),  # type: ignore[arg-type]
    ],
)
def test_unknown_kinds_and_shapes_are_refused(
    info: ProposerInfo, engine: EngineInfo, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        Controller(load_settings("default"), [info], engine)


def test_a_policy_for_a_proposer_that_is_not_there_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = serve([lookup()], yaml="policy: {name: static, proposer: eagle9, k: 2}")
    engine.run(20)
    assert modes(engine) == {"plain": 20}
    assert caplog.text.count("'eagle9' is no proposer of this engine") == 1
    assert "it has ngram" in caplog.text
