"""What every policy must do, whatever its formula."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autospec.config import Settings, parse_settings, policy_names
from autospec.controller import Controller
from autospec.errors import ConfigError
from autospec.policy import POLICIES, make_policy
from autospec.policy.base import Decision, Outcome, Policy, View
from autospec.records import BatchState, Request, StepResult
from tests.policy.steps import DRAFT, ENGINE, MOST_K, PROPOSERS, outcome, view

SETTINGS: dict[str, dict[str, Any]] = {
    "off": {},
    "static": {"proposer": "draft", "k": 4},
    "schedule": {
        "table": [
            {"max_requests": 2, "proposer": "draft", "k": 5},
            {"max_requests": 4, "proposer": "suffix", "k": 3},
        ]
    },
    "lookup_first": {"model": "draft"},
    "goodput": {},
    "heuristic": {"proposer": "draft", "k": 4},
    "ema": {"proposer": "draft", "warmup_batches": 2},
    "gate": {
        "proposer": "suffix",
        "draft_len_schedule": {2: 4, 4: 2},
        "acceptance_rate_window_size": 20,
        "acceptance_rate_threshold": 0.3,
    },
    "ucb": {},
    "exp3": {},
    "thompson": {"discount": 0.9},
    "nightjar": {},
    "hedge": {},
    "bayes": {"window_steps": 3, "trials": 6, "proposers": ["suffix", "draft"]},
}
LONGEST_LINES = {"goodput": 210}  # the default may need more than the 120 of the others


def settings(name: str) -> Settings:
    return Settings(version=1, policy={"name": name, **SETTINGS[name]})


def made(name: str, seed: int = 0) -> Policy[Any]:
    return make_policy(settings(name).policy, PROPOSERS, np.random.default_rng(seed))


each_policy = pytest.mark.parametrize("name", SETTINGS)


def test_every_policy_is_tested() -> None:
    assert set(SETTINGS) == set(policy_names())
    assert len(POLICIES) == len(SETTINGS)


def steps(seed: int, count: int) -> Iterator[View]:
    """Batches of 0 to 6 requests that come and go, with and without offers and room."""
    rng = np.random.default_rng(seed)
    running = [1, 2]
    newest = 2
    for _ in range(count):
        running = [handle for handle in running if rng.random() > 0.1]
        while len(running) < 6 and rng.random() < 0.4:
            newest += 1
            running.append(newest)
        most = np.array([[info.max_k] for info in PROPOSERS])
        limits = rng.integers(0, most + 1, (len(PROPOSERS), len(running)))
        yield view(running, limits.tolist())


def bring(policy: Policy[Any], now: View, rng: np.random.Generator) -> tuple[Decision, Outcome]:
    """One step of a policy by itself: offers, decision, random acceptance, learning."""
    policy.wants_offers()
    decision = policy.decide(now)
    accepted = [int(rng.integers(0, k + 1)) for k in decision.k]
    matched = [[int(rng.integers(-1, 5)) for _ in decision.k] for _ in PROPOSERS]
    matched[DRAFT] = [-1] * len(decision.k)
    seconds = 0.01 + 0.002 * int(decision.k.sum())
    brought = outcome(
        decision, accepted, seconds=seconds, matched=matched, handles=now.handles.tolist()
    )
    policy.learn(brought)
    return decision, brought


def same(a: Decision, b: Decision) -> bool:
    return bool((a.proposer == b.proposer).all() and (a.k == b.k).all() and a.arm == b.arm)


@each_policy
def test_decisions_have_rows_types_and_proposers_that_exist(name: str) -> None:
    policy = made(name)
    rng = np.random.default_rng(1)
    for now in steps(3, 120):
        decision, _ = bring(policy, now, rng)
        assert decision.proposer.shape == decision.k.shape == (now.requests,)
        assert decision.proposer.dtype == decision.k.dtype == np.int16
        assert ((decision.proposer >= -1) & (decision.proposer < len(PROPOSERS))).all()
        rows = np.flatnonzero(decision.proposer >= 0)
        assert (decision.k[rows] >= 1).all()
        assert (decision.k[rows] <= now.limits[decision.proposer[rows], rows]).all()
        assert (decision.k[decision.proposer < 0] == 0).all()
        wanted = policy.wants_offers()
        assert wanted.dtype == np.bool_
        assert not (wanted & ~policy.lookup).any()


@each_policy
def test_the_same_seed_decides_the_same(name: str) -> None:
    one, two = made(name, seed=7), made(name, seed=7)
    rngs = np.random.default_rng(2), np.random.default_rng(2)
    for now in steps(4, 80):
        assert same(bring(one, now, rngs[0])[0], bring(two, now, rngs[1])[0])


@each_policy
def test_a_policy_resumes_from_its_state_in_json(name: str) -> None:
    one = made(name)
    rng = np.random.default_rng(5)
    played = list(steps(6, 120))
    for now in played[:60]:
        bring(one, now, rng)
    two = made(name, seed=99)
    two.restore(json.loads(json.dumps(one.state())))
    assert json.dumps(two.state()) == json.dumps(one.state())
    rngs = np.random.default_rng(8), np.random.default_rng(8)
    for now in played[60:]:
        assert same(bring(one, now, rngs[0])[0], bring(two, now, rngs[1])[0])


@each_policy
def test_state_is_a_copy(name: str) -> None:
    policy = made(name)
    rng = np.random.default_rng(5)
    for now in steps(6, 20):
        bring(policy, now, rng)
    saved = policy.state()
    written = json.dumps(saved)
    for now in steps(7, 20):
        bring(policy, now, rng)
    assert json.dumps(saved) == written


@each_policy
@pytest.mark.parametrize("seconds", [math.nan, math.inf, -math.inf, 0.0, -1.0, 1e300, 5e-324])
def test_step_times_that_mean_nothing_do_no_harm(name: str, seconds: float) -> None:
    policy = made(name)
    rng = np.random.default_rng(9)
    for now in steps(10, 30):
        decision, _ = bring(policy, now, rng)
        policy.learn(
            outcome(
                decision, seconds=seconds, handles=now.handles.tolist(), plain_seconds=1.0,
                draft_seconds=[0.0] * len(PROPOSERS),
            )
        )  # fmt: skip
    if not math.isfinite(seconds) or seconds <= 0.0:
        assert "NaN" not in json.dumps(policy.state())
        assert "Infinity" not in json.dumps(policy.state())
    for now in steps(11, 30):
        bring(policy, now, rng)


@each_policy
def test_an_empty_batch_is_nothing(name: str) -> None:
    policy = made(name)
    for _ in range(30):
        policy.wants_offers()
        decision = policy.decide(view([]))
        assert len(decision.k) == 0
        policy.learn(outcome(decision))
    assert len(policy.decide(view(2)).k) == 2


@each_policy
def test_nothing_is_drafted_where_there_is_no_room(name: str) -> None:
    policy = made(name)
    for _ in range(30):
        decision = policy.decide(view(3, [[0] * 3] * len(PROPOSERS)))
        assert not decision.k.any()
        policy.learn(outcome(decision))


@each_policy
def test_inputs_stay_as_they_were(name: str) -> None:
    policy = made(name)
    rng = np.random.default_rng(12)
    for now in steps(13, 40):
        for part in (now.limits, now.hazards, now.confidence, now.stale_tokens, now.handles):
            part.flags.writeable = False
        policy.wants_offers()
        decision = policy.decide(now)
        kept = [int(rng.integers(0, k + 1)) for k in decision.k]
        brought = outcome(decision, kept, handles=now.handles.tolist())
        for array in (brought.verified, brought.accepted, brought.committed, brought.matched):
            array.flags.writeable = False
        policy.learn(brought)


@each_policy
def test_late_and_unknown_outcomes_are_survived(name: str) -> None:
    policy = made(name)
    late = [policy.decide(view([h, h + 1])) for h in range(1, 40, 2)]
    for i, decision in enumerate(late):
        policy.learn(outcome(decision, handles=[2 * i + 1, 1000 + i]))
    assert len(policy.decide(view(3)).k) == 3


@pytest.fixture(scope="module", autouse=True)
def compiled_before() -> None:
    """Where nothing is compiled yet, the first controller says so: none of the tests' business."""
    Controller(settings("off"), PROPOSERS, ENGINE)


def run_controller(name: str, count: int, seed: int) -> list[tuple[list[int], list[int], str]]:
    """A served loop with requests that come and go; returns every plan."""
    controller = Controller(settings(name), PROPOSERS, ENGINE, clock=lambda: 0.0, seed=seed)
    rng = np.random.default_rng(seed)
    handles = [controller.start(Request(str(i), np.arange(5, dtype=np.int32))) for i in range(2)]
    plans: list[tuple[list[int], list[int], str]] = []
    for step in range(count):
        if handles and rng.random() < 0.1:
            controller.finish(handles.pop(0))
        if len(handles) < 6 and rng.random() < 0.3:
            handles.append(controller.start(Request(f"s{step}", np.arange(5, dtype=np.int32))))
        n, p = len(handles), len(PROPOSERS)
        offers = rng.integers(0, 9, (p, n)).astype(np.int16)
        offers[DRAFT] = 0
        room = rng.integers(0, 12, n).astype(np.int16)
        plan = controller.plan(
            BatchState(
                np.array(handles, dtype=np.int64),
                np.full(n, 50, dtype=np.int32),
                offers,
                rng.random((p, n, MOST_K)).astype(np.float32),
                room=room,
            )
        )
        assert plan.mode != "fallback"
        assert (plan.k <= room).all()
        by_lookup = np.flatnonzero((plan.proposer >= 0) & (plan.proposer != DRAFT))
        assert (plan.k[by_lookup] <= offers[plan.proposer[by_lookup], by_lookup]).all()
        accepted = rng.integers(0, plan.verify + 1).astype(np.int16)
        seconds = 0.01 + 0.001 * int(plan.verify.sum())
        if step % 17 == 5:
            seconds = math.nan
        prefill = 40 if step % 11 == 3 else 0
        controller.observe(
            plan,
            StepResult(plan.verify, accepted, accepted + 1, seconds, prefill_tokens=prefill),
        )
        plans.append((plan.proposer.tolist(), plan.k.tolist(), plan.mode))
    return plans


@each_policy
def test_plans_through_the_controller_are_legal_and_repeat(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    plans = run_controller(name, 150, seed=3)
    assert plans == run_controller(name, 150, seed=3)
    assert not caplog.records, caplog.text
    if name != "off":
        assert any(any(k) for _, k, _ in plans)


@each_policy
def test_an_engine_without_proposers_decodes_plainly(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    controller = Controller(settings(name), (), ENGINE, clock=lambda: 0.0)
    handle = controller.start(Request("a", np.arange(5, dtype=np.int32)))
    for _ in range(10):
        assert len(controller.wants_offers()) == 0
        plan = controller.plan(BatchState(np.array([handle]), np.full(1, 50, dtype=np.int32)))
        assert plan.mode in ("plain", "probe")
        assert plan.k.tolist() == [0]
        zero = np.zeros(1, dtype=np.int16)
        controller.observe(plan, StepResult(zero, zero, zero + 1, 0.01))
    assert not caplog.records, caplog.text


@each_policy
def test_unknown_options_are_refused(name: str) -> None:
    written = json.dumps({"name": name, **SETTINGS[name], "no_such_option": 1})
    with pytest.raises(ConfigError, match="no_such_option"):
        parse_settings(f"version: 1\npolicy: {written}", source="my.yaml")


@pytest.mark.parametrize(
    "name, options",
    [
        ("heuristic", {"proposer": "draft", "k": 0}),
        ("heuristic", {}),
        ("ema", {"proposer": "draft", "ema_alpha": 0}),
        ("ema", {"proposer": "draft", "update_interval": 0}),
        ("ema", {"proposer": "draft", "tiers": []}),
        ("ema", {"proposer": "draft", "tiers": [{"min_requests": 1, "candidate_steps": []}]}),
        ("gate", {"proposer": "draft", "draft_len_schedule": {}}),
        ("gate", {"proposer": "draft", "draft_len_schedule": {"0": 3}}),
        ("gate", {"proposer": "draft", "acceptance_rate_threshold": 0.5}),
        ("gate", {"proposer": "draft", "max_concurrency": 0}),
        ("ucb", {"ks": []}),
        ("ucb", {"ks": [0]}),
        ("ucb", {"exploration": -1}),
        ("ucb", {"delta": 1}),
        ("exp3", {"proposers": []}),
        ("thompson", {"discount": 0}),
        ("thompson", {"discount": 1.01}),
        ("nightjar", {"by": "weekday"}),
        ("hedge", {"rate": 0}),
        ("hedge", {"model_k": 0}),
        ("bayes", {"window_steps": 0}),
        ("bayes", {"trials": 0}),
    ],
)
def test_values_that_make_no_sense_are_refused(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"line 2: policy"):
        parse_settings(f"version: 1\npolicy: {json.dumps({'name': name, **options})}")


@pytest.mark.parametrize("kind", list(POLICIES.values()))
def test_a_policy_is_one_short_file_that_cites_its_source(kind: type[Policy[Any]]) -> None:
    source = inspect.getsourcefile(kind)
    assert source is not None
    lines = Path(source).read_text(encoding="utf-8").splitlines()
    assert len(lines) <= LONGEST_LINES.get(Path(source).stem, 120)
    assert kind.__doc__
