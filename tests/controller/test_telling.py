"""What whoever embeds a controller did wrong is counted with its reason, and raised if strict."""

from __future__ import annotations

import logging
import socket
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from autospec.config import Settings, parse_settings
from autospec.controller import Controller
from autospec.errors import AutoSpecError, ConfigError, InputError
from autospec.journal.reader import read_journal
from autospec.journal.writer import Journal
from autospec.metrics import Metrics
from autospec.profile.file import load_profile
from autospec.records import BatchState, Int16Array, Plan, Request, StepResult
from autospec.step import rows
from tests.controller.serving import serve
from tests.simulated_engine import ENGINE, PROMPT, Drafter, lookup, model

Counts = tuple[Int16Array, Int16Array, Int16Array]


def made(settings: Settings | None = None, *, strict: bool = True, **more: Any) -> Controller:
    """A controller of one lookup."""
    settings = parse_settings("version: 1") if settings is None else settings
    return Controller(settings, [lookup().info], ENGINE, strict=strict, **more)


def batch(*handles: int) -> BatchState:
    """Requests with offers of 8 tokens each."""
    n = len(handles)
    return BatchState(
        np.array(handles, dtype=np.int64),
        np.full(n, 40, dtype=np.int32),
        np.full((1, n), 8, dtype=np.int16),
        np.full((1, n, 8), 0.6, dtype=np.float32),
    )


def take_steps(
    controller: Controller, handles: list[int], steps: int, report: Callable[[Counts], Counts]
) -> None:
    """A correct server but for how it reports its counts."""
    rng = np.random.default_rng(0)
    confidence = np.full((len(handles), 8), 0.6, dtype=np.float32)
    for _ in range(steps):
        plan = controller.plan(batch(*handles))
        plan = controller.trim(plan, plan.k, confidence)
        right = (rng.random((len(handles), 8)) < 0.7).cumprod(axis=1).sum(axis=1)
        accepted = np.minimum(right, plan.verify).astype(np.int16)
        seconds = 2e-3 + 1e-4 * (len(handles) + int(plan.verify.sum()))
        counts = plan.verify.copy(), accepted, (accepted + 1).astype(np.int16)
        controller.observe(plan, StepResult(*report(counts), seconds))


MISTAKES: dict[str, tuple[str, Callable[[Counts], Counts]]] = {
    "the last token is counted as verified": (
        "verified above drafted",
        lambda c: ((c[0] + 1).astype(np.int16), c[1], c[2]),
    ),
    "the bonus token is counted as accepted": (
        "accepted above verified",
        lambda c: (c[0], c[2], c[2]),
    ),
    "the bonus token is not committed": ("nothing committed", lambda c: (c[0], c[1], c[1])),
    "accepted is the draft length and more": (
        "accepted above verified",
        lambda c: (c[0], (c[0] + 2).astype(np.int16), c[2]),
    ),
    "committed is the output's length": (
        "committed above accepted + 1",
        lambda c: (c[0], c[1], np.full_like(c[2], 50)),
    ),
    "zeros": ("nothing committed", lambda c: (c[0] * 0, c[1] * 0, c[2] * 0)),
    "negative": ("negative count", lambda c: (c[0], c[1], -c[2])),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_counts_that_cannot_be_are_raised_if_strict(mistake: str) -> None:
    reason, report = MISTAKES[mistake]
    controller = made()
    handles = [controller.start(Request(f"r{i}", PROMPT)) for i in range(4)]
    with pytest.raises(ValueError, match=f"^{reason.replace('+', '.')}: row 0 has verified"):
        take_steps(controller, handles, 100, report)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_counts_that_cannot_be_are_counted_and_logged_once(
    mistake: str, caplog: pytest.LogCaptureFixture
) -> None:
    reason, report = MISTAKES[mistake]
    registry = CollectorRegistry()
    controller = made(strict=False, metrics=Metrics(registry))
    handles = [controller.start(Request(f"r{i}", PROMPT)) for i in range(4)]
    take_steps(controller, handles, 100, report)
    assert controller.dropped[reason] > 10
    assert caplog.text.count(f"{reason}: row ") == 1
    counted = registry.get_sample_value("autospec_dropped_observations_total", {"reason": reason})
    assert counted == controller.dropped[reason]
    assert not controller.faults


@pytest.mark.parametrize("drafter", [lookup(), model()], ids=["lookup", "model"])
def test_rows_that_cannot_be_teach_nothing_and_the_others_do(
    drafter: Drafter, tmp_path: Path
) -> None:
    """Every request's but the first one's are broken."""
    controller = Controller(parse_settings("version: 1"), [drafter.info], ENGINE)
    names = ["good", "bad", "bad"]
    handles = [controller.start(Request("r", PROMPT, workload=name)) for name in names]

    def report(counts: Counts) -> Counts:
        counts[1][1:] = counts[0][1:] + 1
        return counts

    take_steps(controller, handles, 200, report)
    path = controller.save(tmp_path / "profile.json")
    assert path is not None
    learned = load_profile(path).workloads
    for name, statistics in learned["good"].proposers.items():
        assert statistics["trials"].sum() > 100, name
    for name, statistics in learned["bad"].proposers.items():
        assert statistics["trials"].sum() == 0, name
    assert controller.cost.plain_seconds(3, 120) == pytest.approx(2.3e-3, rel=0.3)


@pytest.mark.parametrize(
    "verified, accepted, committed, matched",
    [
        (3, 3, 2, 3),  # the third was the end
        (3, 3, 3, -1),
        (2, 0, 1, 0),  # fewer than planned were verified
        (0, 0, 1, 8),
        (3, 3, 1, 8),
    ],
)
def test_counts_of_requests_that_end_are_right(
    verified: int, accepted: int, committed: int, matched: int
) -> None:
    engine = serve([lookup(hazard=0.95)], requests=2)
    engine.run(60)
    controller = engine.controller
    for _ in range(3):
        plan = controller.plan(batch(*engine.handles))
        assert (plan.k > 3).all()
        of_each = np.ones(2, dtype=np.int16)
        found = np.full((1, 2), matched, dtype=np.int16)
        controller.observe(
            plan,
            StepResult(
                of_each * verified, of_each * accepted, of_each * committed, 0.04, matched=found
            ),
        )
    assert not controller.dropped


def test_a_request_that_took_no_part_is_no_mistake() -> None:
    controller = made()
    handles = [controller.start(Request("r", PROMPT)) for _ in range(2)]
    ones, part = np.ones(2, dtype=np.int16), np.array([1, 0], dtype=np.int16)
    controller.observe(controller.plan(batch(*handles)), StepResult(ones * 0, ones * 0, part, 0.01))
    plan = controller.plan(batch(*handles))
    controller.finish(handles[1])
    controller.observe(plan, StepResult(ones * 0, ones * 0, part, 0.01))


@pytest.mark.parametrize("matched", [-2, 9, 99])
def test_more_matched_than_was_ever_offered(matched: int) -> None:
    controller = made()
    plan = controller.plan(batch(controller.start(Request("r", PROMPT))))
    found = np.full((1, 1), matched, dtype=np.int16)
    with pytest.raises(ValueError, match="matched out of range"):
        controller.observe(plan, StepResult(plan.k, plan.k, plan.k + 1, 0.01, matched=found))


def repeat_a_handle(controller: Controller, handle: int) -> None:
    controller.plan(batch(handle, handle))


def plan_what_is_not_running(controller: Controller, handle: int) -> None:
    controller.finish(handle)
    controller.plan(batch(handle))


def finish_twice(controller: Controller, handle: int) -> None:
    controller.finish(handle)
    controller.finish(handle)


def brought(plan: Plan, seconds: float = 0.01, **more: Any) -> StepResult:
    return StepResult(plan.verify, plan.verify, plan.verify + np.int16(1), seconds, **more)


def observe_twice(controller: Controller, handle: int) -> None:
    plan = controller.plan(batch(handle))
    for _ in range(2):
        controller.observe(plan, brought(plan))


def observe_late(controller: Controller, handle: int) -> None:
    plan = controller.plan(batch(handle))
    for _ in range(40):
        controller.plan(batch(handle))
    controller.observe(plan, brought(plan))


def know_no_time(controller: Controller, handle: int) -> None:
    plan = controller.plan(batch(handle))
    controller.observe(plan, brought(plan, float("nan")))


def draft_for_longer_than_the_step(controller: Controller, handle: int) -> None:
    plan = controller.plan(batch(handle))
    controller.observe(plan, brought(plan, draft_seconds=np.array([0.02])))


@pytest.mark.parametrize(
    "mistake, reason",
    [
        (repeat_a_handle, "repeated request"),
        (plan_what_is_not_running, "unknown request"),
        (finish_twice, "unknown request"),
        (observe_twice, "late or repeated"),
        (observe_late, "late or repeated"),
        (know_no_time, "unusable step time"),
        (draft_for_longer_than_the_step, "unusable draft time"),
    ],
)
def test_other_mistakes_are_counted_or_raised(
    mistake: Callable[[Controller, int], None], reason: str
) -> None:
    lenient = made(strict=False)
    mistake(lenient, lenient.start(Request("r", PROMPT)))
    assert lenient.dropped == {reason: 1}
    assert not lenient.faults
    strict = made()
    with pytest.raises(ValueError, match=f"^{reason}: "):
        mistake(strict, strict.start(Request("r", PROMPT)))


def test_a_handle_that_is_repeated_is_planned_once() -> None:
    engine = serve([lookup(hazard=0.95)], requests=2)
    engine.run(60)
    a, b = engine.handles
    plan = engine.controller.plan(batch(a, b, a, b, a))
    assert (plan.k > 0).tolist() == [True, True, False, False, False]


@pytest.mark.parametrize("with_model", [False, True])
@pytest.mark.parametrize("shape", [(1, 4), (2, 8), (8,)])
def test_confidences_of_another_shape_are_always_told(
    shape: tuple[int, ...], with_model: bool
) -> None:
    drafters = [lookup(hazard=0.9), *([model(hazard=0.9)] if with_model else [])]
    engine = serve(drafters, requests=1)
    engine.run(60)
    controller = engine.controller
    plan = controller.plan(engine_batch := batch_of(controller, engine.handles))
    assert len(engine_batch.handles) == 1
    drafted = np.minimum(plan.k, 2).astype(np.int16)
    plan = controller.trim(plan, drafted, np.full(shape, 0.9, dtype=np.float32))
    assert plan.verify.tolist() == drafted.tolist()  # what was drafted is still known
    assert controller.faults == {"trim": 1}
    strict = made()
    plan = strict.plan(batch(strict.start(Request("r", PROMPT))))
    with pytest.raises(ValueError, match=r"confidence has shape .*, expected \(1, 8\)"):
        strict.trim(plan, plan.k, np.full(shape, 0.9, dtype=np.float32))


def batch_of(controller: Controller, handles: list[int]) -> BatchState:
    n, p = len(handles), len(controller.proposers)
    lengths = np.zeros((p, n), dtype=np.int16)
    lengths[0] = 8
    return BatchState(
        np.array(handles),
        np.full(n, 40),
        lengths,
        np.full((p, n, controller.k_max), 0.6, dtype=np.float32),
    )


# Requests -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "request_, place, said",
    [
        (Request("a", PROMPT, max_k="x"), "max_k", "request 'a': max_k is 'x'"),  # type: ignore[arg-type]
        (Request("a", PROMPT, max_k=-1), "max_k", "max_k is -1; it must be an integer from 0"),
        (Request("a", PROMPT, max_k=1.5), "max_k", "max_k is 1.5"),  # type: ignore[arg-type]
        (Request("a", PROMPT, tpot_target_seconds="x"), "target", "tpot_target_seconds is 'x'"),  # type: ignore[arg-type]
        (Request("a", PROMPT, tpot_target_seconds=-1.0), "target", "number from 0"),
        (Request("a", None), "workload", "prompt_token_ids must be a flat sequence"),  # type: ignore[arg-type]
        (Request("a", [[1, 2]]), "workload", r"found list of int64 with shape \(1, 2\)"),  # type: ignore[list-item]
        (Request("a", "text"), "workload", "found str"),  # type: ignore[arg-type]
    ],
)
def test_a_bad_request_gets_a_handle_or_is_raised(request_: Request, place: str, said: str) -> None:
    controller = made(strict=False)
    handle = controller.start(request_)
    assert controller.faults == {place: 1}
    assert controller.plan(batch(handle)).mode != "fallback"
    assert not controller.dropped
    with pytest.raises(ValueError, match=said):
        made().start(request_)


@pytest.mark.parametrize("prompt", [[1, 2, 3], (1, 2, 3), range(700), []])
def test_a_prompt_may_be_any_sequence(prompt: Any) -> None:
    rule = "workloads: {rules: [{label: long, prompt_tokens: {min: 600}}]}"
    controller = made(parse_settings(f"version: 1\n{rule}"))
    workloads = controller.workloads
    assert workloads.labels[workloads.index(Request("a", prompt))] == (
        "long" if len(prompt) > 600 else "auto/short-greedy"
    )


def test_more_requests_than_may_run_get_the_handle_of_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rows, "MAX_SLOTS", 64)
    controller = made(strict=False)
    handles = [controller.start(Request("r", PROMPT)) for _ in range(66)]
    assert handles[63:] == [0, 0, 0]
    assert controller.faults == {"start": 3}
    assert controller.plan(batch(*handles[:2], 0)).mode == "plain"


@pytest.mark.parametrize("state", [None, 3, BatchState("ab", None)])  # type: ignore[arg-type]
def test_what_is_no_batch_is_planned_for_nobody(state: Any) -> None:
    controller = made(strict=False)
    plan = controller.plan(state)
    assert plan.mode == "fallback"
    assert plan.handles.shape == (0,)
    assert controller.faults == {"plan": 1}


def test_no_plan_is_a_fault() -> None:
    controller, zero = made(strict=False), np.zeros(1, dtype=np.int16)
    controller.trim(None, zero, None)  # type: ignore[arg-type]
    controller.observe(None, StepResult(zero, zero, zero + 1, 0.01))  # type: ignore[arg-type]
    assert controller.faults == {"trim": 1, "observe": 1}


# What the settings name ---------------------------------------------------------------------


def test_the_journal_that_the_settings_name_is_opened_and_closed(tmp_path: Path) -> None:
    settings = parse_settings(f"version: 1\njournal: {{path: {tmp_path / 'j.jsonl'}}}")
    for run in (1, 2):
        controller = made(settings)
        take_steps(controller, [controller.start(Request("r", PROMPT))], 5, lambda counts: counts)
        controller.close()
        runs = read_journal(tmp_path / "j.jsonl").runs
        assert [len(each.steps) for each in runs] == [5] * run


def test_a_journal_that_is_given_is_the_only_one(tmp_path: Path) -> None:
    yaml = f"journal: {{path: {tmp_path / 'named.jsonl'}}}"
    with Journal(tmp_path / "given.jsonl") as given:
        engine = serve([lookup()], yaml=yaml, journal=given)
        engine.run(5)
        engine.controller.close()
    assert [path.name for path in tmp_path.iterdir()] == ["given.jsonl"]


def test_settings_without_files_open_nothing(tmp_path: Path) -> None:
    """As in a replay, many controllers of which may run at once."""
    place = tmp_path / "x"
    yaml = f"journal: {{path: {place}}}\nprofile: {{path: {place}}}\nmetrics: {{port: 1}}"
    made(parse_settings(f"version: 1\n{yaml}").without_files()).close()
    assert not place.exists()


def test_a_journal_that_cannot_be_opened(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = parse_settings(f"version: 1\njournal: {{path: {tmp_path}}}")
    made(settings, strict=False)
    assert "cannot be opened" in caplog.text
    with pytest.raises(InputError, match="cannot be opened"):
        made(settings)


def test_the_endpoint_that_the_settings_name_is_opened_and_closed() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = parse_settings(f"version: 1\nmetrics: {{port: {port}}}")
    for _ in range(2):
        controller = made(settings)
        take_steps(controller, [controller.start(Request("r", PROMPT))], 5, lambda counts: counts)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
            assert 'autospec_steps_total{mode="plain"}' in response.read().decode()
        taken = made(settings, strict=False)
        assert taken.faults == {"metrics": 1}
        with pytest.raises(AutoSpecError, match="cannot listen"):
            made(settings)
        controller.close()
        controller.close()
    made(settings, metrics=Metrics(CollectorRegistry()))  # has an endpoint of its own
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10)


# What the policy names ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "policy",
    [
        "static, proposer: sufix",
        "ema, proposer: sufix",
        "gate, proposer: sufix",
        "heuristic, proposer: sufix",
        "schedule, table: [{max_requests: 4, proposer: ngram, k: 2}, {proposer: sufix, k: 1}]",
        "lookup_first, lookup: sufix",
        "lookup_first, lookup: ngram, model: sufix",
        "hedge, proposers: [ngram, sufix]",
        "ucb, proposers: [ngram, sufix]",
        "bayes, proposers: [ngram, sufix]",
    ],
)
def test_a_policy_for_a_proposer_that_is_not_there_is_told_at_once(
    policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    settings = parse_settings(f"version: 1\npolicy: {{name: {policy}}}")
    said = "'sufix' is no proposer of this engine and never drafts; it has ngram"
    with pytest.raises(ConfigError, match=said):
        made(settings)
    made(settings, strict=False)  # one policy file may serve several engines
    assert caplog.text.count(said) == 1


def test_a_policy_for_proposers_that_are_there_is_silent(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    made(parse_settings("version: 1\npolicy: {name: static, proposer: ngram}"))
    made(parse_settings("version: 1\npolicy: {name: ucb}"))
    assert not caplog.records
