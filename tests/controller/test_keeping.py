"""What the controller counts, saves and leaves behind."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from autospec.config import load_settings, parse_settings
from autospec.controller import Controller
from autospec.errors import ProfileError, ProfileMismatch
from autospec.journal.reader import read_journal
from autospec.journal.writer import Journal
from autospec.metrics import Metrics
from autospec.profile.file import load_profile
from autospec.records import BatchState, EngineInfo, ProposerInfo, Request, StepResult
from tests.controller.serving import CHEAP_TOKENS, modes, serve
from tests.simulated_engine import ENGINE, PROMPT, lookup, model


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


def test_nothing_runs_or_waits_once_the_last_request_is_done() -> None:
    registry = CollectorRegistry()
    engine = serve([lookup()], requests=70, metrics=Metrics(registry))
    engine.step(waiting_requests=3)
    gauges = [f"autospec_{name}_requests" for name in ("running", "waiting")]
    assert [registry.get_sample_value(gauge) for gauge in gauges] == [70, 3]
    engine.finish(69)
    assert [registry.get_sample_value(gauge) for gauge in gauges] == [70, 3]  # as planned last
    engine.finish(1)
    assert [registry.get_sample_value(gauge) for gauge in gauges] == [0, 0]


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


def test_what_is_learned_beside_another_engines_profile_is_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "profile.json"
    yaml = profile_yaml(path)
    first = serve([lookup(hazard=0.7)], yaml=yaml)
    first.run(20)
    first.controller.close()
    before = path.read_bytes()
    other = replace(ENGINE, dtype="bfloat16")
    own = None
    for is_warm in (False, True):
        second = serve([lookup(hazard=0.7)], yaml=yaml, engine=other)
        assert second.controller.is_warm == is_warm
        second.run(20)
        own = second.controller.save()
        second.controller.close()
    assert own is not None
    assert own.parent == tmp_path
    assert own != path
    assert load_profile(own).identity.dtype == "bfloat16"
    assert path.read_bytes() == before
    said = f"{path}: profile does not fit: dtype is 'float64', expected 'bfloat16'; it is left"
    assert caplog.text.count(said) == 2
    assert caplog.text.count(f"{own} read and saved instead; ") == 2
    third = serve([lookup(hazard=0.7)], yaml=yaml, engine=replace(ENGINE, target="another"))
    assert third.controller.settings.profile.path not in (path, own)
    with pytest.raises(ProfileMismatch, match=r"dtype is .*; name another profile.path"):
        Controller(parse_settings(f"version: 1\n{yaml}"), [lookup().info], other, strict=True)


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
        Request("list", [1, 2, 3]),
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


@pytest.mark.parametrize("noise", [0.3, 0.6])
def test_plain_decoding_is_as_fast_as_plain_decoding_however_unsteady(noise: float) -> None:
    """A prediction is of the usual step; the mean of steps that are held up at times is longer."""
    engine = serve([lookup(hazard=0.9)], yaml="policy: {name: 'off'}", requests=4, noise=noise)
    engine.run(3000)
    assert engine.controller.measured_speedup == pytest.approx(1.0, abs=0.05)


def test_steps_that_are_held_up_do_not_turn_speculation_off() -> None:
    rng = np.random.default_rng(1)

    def seconds(requests: int, verified: int) -> float:
        return CHEAP_TOKENS(requests, verified) + (0.06 if rng.random() < 0.05 else 0.0)

    engine = serve([lookup(hazard=0.3)], seconds, requests=4)
    engine.run(3000)
    assert modes(engine).get("guard", 0) == 0
    assert engine.controller.measured_speedup == pytest.approx(1.2, abs=0.15)


def test_what_an_earlier_save_says_of_cost_is_outdated_by_a_jump(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    engine = serve([lookup(hazard=0.8)], requests=4)
    engine.run(400)
    engine.controller.save(path)
    acceptance = load_profile(path).workloads
    engine.seconds = lambda requests, verified: 10.0 * CHEAP_TOKENS(requests, verified)
    engine.run(400)
    engine.controller.save(path)
    warm = Controller(
        load_settings("default"),
        [lookup(hazard=0.8).info],
        ENGINE,
        profile=load_profile(path),
        wall_clock=engine.clock,
    )
    now = engine.controller.cost.plain_seconds(4, 400)
    assert now == pytest.approx(10.0 * CHEAP_TOKENS(4, 0), rel=0.2)
    assert warm.cost.plain_seconds(4, 400) == pytest.approx(now, rel=0.1)
    assert load_profile(path).workloads.keys() == acceptance.keys()
