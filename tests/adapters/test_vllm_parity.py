"""Whatever is decided, and whatever fails, outputs are those of the engine alone (float32)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from autospec.adapters.vllm.exposition import FOLDER_VARIABLE, ExpositionCollector
from tests.adapters.vllm_engines import (
    METHODS,
    decide_with,
    engine,
    generate,
    prompts,
    random_decisions,
    samples,
    scheduler_of,
    steering_of,
)

pytestmark = pytest.mark.filterwarnings("ignore")

TEXTS = prompts(8)


@pytest.fixture(scope="module")
def plain() -> dict[int, list[int]]:
    with engine(None) as llm:
        return generate(llm, TEXTS)


@pytest.mark.parametrize("method", METHODS)
def test_random_k_and_proposers(method: str, plain: dict[int, list[int]]) -> None:
    with engine(method) as llm:
        steering = steering_of(llm)
        random_decisions(steering.pilot)
        assert generate(llm, TEXTS) == plain
        names = {info.name for info in steering.pilot.controller.proposers}
        expected = {"ngram", "suffix"} | ({method} - {"ngram", "suffix"})
        assert names == expected
        verified = samples(steering, "autospec_verified_tokens_total")
        assert {proposer for (proposer, _), count in verified.items() if count > 0} == expected
        assert not samples(steering, "autospec_fallbacks_total")


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


@pytest.mark.parametrize("method", ["draft_model", "eagle"])
def test_planned_one_step_ahead(
    method: str, plain: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autospec.adapters.vllm.modes._why_ahead", lambda *_: "a test")
    with engine(method) as llm:
        steering = steering_of(llm)
        random_decisions(steering.pilot)
        assert generate(llm, TEXTS) == plain
        drafted = samples(steering, "autospec_drafted_tokens_total")
        verified = samples(steering, "autospec_verified_tokens_total")
        assert sum(verified.values()) == sum(drafted.values()) > 0
        assert not samples(steering, "autospec_fallbacks_total")


def test_the_multiprocess_engine(
    plain: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The engine core in a process of its own, with a policy that tries everything at random."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    policy = tmp_path / "random.yaml"
    policy.write_text("version: 1\npolicy: {name: exp3}\n")
    with engine("draft_model", options={"policy": str(policy)}) as llm:
        assert generate(llm, TEXTS) == plain
    shown = {
        sample.name
        for family in ExpositionCollector(Path(os.environ[FOLDER_VARIABLE])).collect()
        for sample in family.samples
        if sample.value > 0
    }
    assert {"autospec_verified_tokens_total", "autospec_accepted_tokens_total"} <= shown
    assert "autospec_fallbacks_total" not in shown


def test_tensor_parallel_workers_obey_one_decision(plain: dict[int, list[int]]) -> None:
    """Two processes that each hold half of the target and of the drafter."""
    with engine("draft_model", tensor_parallel_size=2) as llm:
        steering = steering_of(llm)
        random_decisions(steering.pilot)
        assert generate(llm, TEXTS) == plain
        verified = samples(steering, "autospec_verified_tokens_total")
        proposers = {proposer for (proposer, _), count in verified.items() if count > 0}
        assert proposers == {"ngram", "suffix", "draft_model"}
        assert not samples(steering, "autospec_fallbacks_total")


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
@pytest.mark.parametrize("place", ["decide", "learn", "start", "finish", "plan", "offer", "update"])
def test_faults_leave_the_engine_running(
    place: str, method: str, plain: dict[int, list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("injected")

    with engine(method) as llm:
        steering = steering_of(llm)
        pilot = steering.pilot
        random_decisions(pilot)
        if place == "decide":
            decide_with(pilot, fail)
        elif place == "learn":
            pilot.controller.policy.learn = fail  # type: ignore[method-assign]
        elif place == "start":
            pilot.controller.start = fail  # type: ignore[method-assign]
        elif place == "finish":
            pilot.controller.finish = fail  # type: ignore[method-assign]
        elif place == "plan":
            pilot.plan = fail  # type: ignore[method-assign]
        elif place == "offer":
            for lookup in pilot.lookups:
                lookup.propose = fail  # type: ignore[method-assign]
        else:
            pilot.observe = fail  # type: ignore[method-assign]
        assert generate(llm, TEXTS) == plain
        assert sum(samples(steering, "autospec_fallbacks_total").values()) > 0
    assert sum("injected" in (each.exc_text or "") for each in caplog.records) <= 2
