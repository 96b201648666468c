"""Whatever is decided, and whatever fails, outputs are those of the engine alone (float32)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from autospec.adapters.vllm.exposition import FOLDER_VARIABLE, ExpositionCollector
from autospec.policy.exp3 import Exp3
from tests.adapters.vllm_engines import (
    METHODS,
    Standing,
    decide_with,
    engine,
    generate,
    prompts,
    random_decisions,
    samples,
    scheduler_of,
    steering_of,
)
from tests.adapters.vllm_random_scheduler import RandomScheduler

pytestmark = pytest.mark.filterwarnings("ignore")

TEXTS = prompts(8)


@pytest.fixture(scope="module")
def plain() -> dict[int, list[int]]:
    with engine(None) as llm:
        return generate(llm, TEXTS)


@pytest.mark.parametrize("method", ["ngram", "draft_model", "eagle"])
def test_aborts_and_preemption(method: str, plain: dict[int, list[int]]) -> None:
    blocks = 10 if method == "ngram" else 14  # too few for all: a model drafter's cache takes some
    with engine(method, num_gpu_blocks_override=blocks, enable_prefix_caching=False) as llm:
        steering, scheduler = steering_of(llm), scheduler_of(llm)
        random_decisions(steering.pilot, seed=1)
        preempted: list[str] = []
        preempt = scheduler._preempt_request

        def counting(request: Any, *args: Any, **kwargs: Any) -> None:
            preempted.append(request.request_id)
            preempt(request, *args, **kwargs)

        scheduler._preempt_request = counting

        def abort(step: int) -> None:
            if step == 9:
                llm.llm_engine.abort_request(["r1", "r6"])

        found = generate(llm, TEXTS, between=abort)
        assert preempted
        assert found.keys() >= plain.keys() - {1, 6}
        for index, tokens in found.items():
            assert tokens == plain[index][: len(tokens)]
            assert len(tokens) == len(plain[index]) or index in (1, 6)
        assert not samples(steering, "autospec_fallbacks_total")
        assert not steering.pilot.requests


def test_tensor_parallel_workers_obey_the_decisions_of_an_engine_core(
    plain: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three processes: one decides, two each hold half of the target and of the drafter."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    scheduler = f"{RandomScheduler.__module__}.{RandomScheduler.__name__}"
    with engine("draft_model", tensor_parallel_size=2, scheduler_cls=scheduler) as llm:
        assert generate(llm, TEXTS) == plain
    shown = [
        sample
        for family in ExpositionCollector(Path(os.environ[FOLDER_VARIABLE])).collect()
        for sample in family.samples
        if sample.value > 0
    ]
    for name in ("autospec_verified_tokens_total", "autospec_accepted_tokens_total"):
        proposers = {each.labels["proposer"] for each in shown if each.name == name}
        assert proposers == {"ngram", "suffix", "draft_model"}
    assert "autospec_fallbacks_total" not in {each.name for each in shown}


@pytest.fixture(scope="module")
def standing(plain: dict[int, list[int]]) -> Iterator[Standing]:
    engines = Standing()
    yield engines
    engines.stop()


@pytest.mark.parametrize("method", METHODS)
def test_random_k_and_proposers(
    method: str, plain: dict[int, list[int]], standing: Standing
) -> None:
    with standing.engine(method) as llm:
        steering = steering_of(llm)
        random_decisions(steering.pilot)
        assert generate(llm, TEXTS) == plain
        names = {info.name for info in steering.pilot.controller.proposers}
        expected = {"ngram", "suffix"} | ({method} - {"ngram", "suffix"})
        assert names == expected
        verified = samples(steering, "autospec_verified_tokens_total")
        assert {proposer for (proposer, _), count in verified.items() if count > 0} == expected
        assert not samples(steering, "autospec_fallbacks_total")


def test_a_step_is_learned_from_once_the_next_one_is_with_the_workers(
    plain: dict[int, list[int]], standing: Standing, monkeypatch: pytest.MonkeyPatch
) -> None:
    with standing.engine("ngram") as llm:
        pilot, core = steering_of(llm).pilot, llm.llm_engine.engine_core.engine_core
        calls: list[str] = []

        def note_calls(of: Any, name: str) -> None:
            call = getattr(of, name)

            def noted(*args: Any, **kwargs: Any) -> Any:
                calls.append(name)
                return call(*args, **kwargs)

            monkeypatch.setattr(of, name, noted)

        note_calls(core.model_executor, "execute_model")
        note_calls(pilot, "note")
        note_calls(pilot, "learn")
        assert generate(llm, TEXTS) == plain
        assert calls.count("learn") == calls.count("note") > 10
        learned = [at for at, call in enumerate(calls) if call == "learn"]
        before = [calls[at - 1] for at in learned]
        assert before[:-1] == ["execute_model"] * (len(learned) - 1)
        assert before[-1] == "note"  # nothing ran any more


@pytest.mark.parametrize("method", ["eagle", "draft_model"])
def test_planned_one_step_ahead(
    method: str,
    plain: dict[int, list[int]],
    standing: Standing,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("autospec.adapters.vllm.modes._why_ahead", lambda *_: "a test")
    with standing.engine(method) as llm:
        steering = steering_of(llm)
        random_decisions(steering.pilot)
        assert generate(llm, TEXTS) == plain
        drafted = samples(steering, "autospec_drafted_tokens_total")
        verified = samples(steering, "autospec_verified_tokens_total")
        assert sum(verified.values()) == sum(drafted.values()) > 0
        assert not samples(steering, "autospec_fallbacks_total")


def test_a_policy_that_tries_everything(
    plain: dict[int, list[int]], standing: Standing, tmp_path: Path
) -> None:
    policy = tmp_path / "random.yaml"
    policy.write_text("version: 1\npolicy: {name: exp3}\n")
    with standing.engine("draft_model", {"policy": str(policy)}) as llm:
        steering = steering_of(llm)
        assert isinstance(steering.pilot.controller.policy, Exp3)
        assert generate(llm, TEXTS) == plain
        for name in ("autospec_verified_tokens_total", "autospec_accepted_tokens_total"):
            assert sum(samples(steering, name).values()) > 0
        assert not samples(steering, "autospec_fallbacks_total")


@pytest.mark.parametrize(
    "place", ["decide", "policy", "start", "finish", "plan", "offer", "note", "learn"]
)
@pytest.mark.parametrize("method", ["draft_model", "ngram"])
def test_faults_leave_the_engine_running(
    method: str,
    place: str,
    plain: dict[int, list[int]],
    standing: Standing,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("injected")

    with standing.engine(method) as llm:
        steering = steering_of(llm)
        pilot = steering.pilot
        random_decisions(pilot)
        if place == "decide":
            decide_with(pilot, fail)
        elif place == "policy":
            pilot.controller.policy.learn = fail  # type: ignore[method-assign]
        elif place == "start":
            pilot.controller.start = fail  # type: ignore[method-assign]
        elif place == "finish":
            pilot.controller.finish = fail  # type: ignore[method-assign]
        elif place == "plan":
            pilot.plan = fail  # type: ignore[method-assign]
        elif place == "offer":
            for lookup in pilot.lookups:
                lookup.propose = lookup.bind = fail  # type: ignore[attr-defined,method-assign]
        elif place == "note":
            pilot.note = fail  # type: ignore[method-assign]
        else:
            pilot.learn = fail  # type: ignore[method-assign]
        assert generate(llm, TEXTS) == plain
        assert sum(samples(steering, "autospec_fallbacks_total").values()) > 0
    assert sum("injected" in (each.exc_text or "") for each in caplog.records) <= 2
