"""The guard and the probes overrule the policy when they should, and only then."""

from __future__ import annotations

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from autospec.metrics import Metrics
from autospec.policy.base import Decision, View
from autospec.rails.probe import SEVERAL_TOKENS
from autospec.records import ProposerInfo
from tests.controller.serving import DEAR_TOKENS, modes, replace_in_policy, serve
from tests.simulated_engine import Drafter, lookup, model


class Stubborn:
    """A policy's decision replaced by: all draft, whatever it costs."""

    def __init__(self, k: int) -> None:
        self.k = k

    def __call__(self, view: View) -> Decision:
        n = view.requests
        return Decision(np.zeros(n, dtype=np.int16), np.full(n, self.k, dtype=np.int16))


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


def test_nothing_is_tried_in_steps_that_prefill_while_others_come() -> None:
    engine = serve([lookup(hazard=0.9), model(hazard=0.0, depth_seconds=0.01)], requests=4)
    for step in range(300):
        engine.step(prefill_tokens=256 * (step % 2))
    probes = [step for step, plan in enumerate(engine.plans) if plan.mode == "probe"]
    assert len(probes) > 3
    assert not any(step % 2 for step in probes)


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


def test_several_tokens_of_one_request_are_tried_where_they_look_dear() -> None:
    engine = serve([lookup("ngram", 0.9)], DEAR_TOKENS, requests=8)
    engine.run(300)
    drafted = [plan.k for plan in engine.plans if plan.mode == "probe"]
    several = [k for k in drafted if k.sum() > 1]
    assert 2 <= len(several) <= 8
    assert all(np.count_nonzero(k) == 1 and k.max() == SEVERAL_TOKENS for k in several)


def test_tokens_that_are_hardly_right_are_not_tried_with_several() -> None:
    engine = serve([lookup("ngram", 0.5)], DEAR_TOKENS, requests=8)
    engine.run(300)
    several = [plan.k for plan in engine.plans if plan.mode == "probe" and plan.k.sum() > 1]
    assert several
    assert all(k.max() == 1 for k in several)  # the second would be right once in four times


def test_a_probe_never_drafts_twice_with_one_head() -> None:
    both = Drafter(
        ProposerInfo("both", "parallel", 8, head="draft", head_k=2), [0.2] * 8, call_seconds=0.004
    )
    engine = serve([model(depth_seconds=0.002, max_k=4), both], requests=32)
    engine.run(400)
    probes = [plan for plan in engine.plans if plan.mode == "probe" and plan.k.any()]
    assert {int(plan.proposer.max()) for plan in probes} == {0, 1}
    for plan in probes:
        assert len(set(plan.proposer[plan.k > 0].tolist())) == 1
        assert np.count_nonzero(plan.k[plan.proposer == 1] > 2) <= 8
        assert plan.verify.tolist() == plan.k.tolist()


def test_a_probe_of_which_less_was_drafted_is_not_taken_for_a_cheap_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was planned and not verified takes no time: no reason to try again at once."""
    both = Drafter(ProposerInfo("both", "parallel", 16, head="draft", head_k=2), [0.7] * 16)
    engine = serve([model(hazard=0.7, max_k=4), lookup(hazard=0.1), both], requests=16)
    trim = engine.controller.trim
    monkeypatch.setattr(
        engine.controller, "trim", lambda plan, k, sure: trim(plan, np.minimum(k, 2), sure)
    )
    engine.run(400)
    probes = [(step, plan) for step, plan in enumerate(engine.plans) if plan.mode == "probe"]
    tried = [step for step, plan in probes if plan.k.any()]
    assert len(tried) > 2
    assert min(np.diff(tried)) > 1
