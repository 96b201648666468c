"""Workload labels, opting out, the profile and /metrics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from autospec.adapters.vllm.exposition import FOLDER_VARIABLE, Exposition, ExpositionCollector
from autospec.metrics import Metrics
from autospec.step.counts import TokenCounts
from tests.adapters.vllm_engines import (
    engine,
    generate,
    prompts,
    random_decisions,
    samples,
    scheduler_of,
    steering_of,
)

pytestmark = pytest.mark.filterwarnings("ignore")

TEXTS = prompts(6, seed=5)


def label(index: int) -> dict[str, Any]:
    if index == 0:
        return {"autospec_workload": "chat", "autospec_speculate": 0}
    if index == 1:
        return {"autospec": {"workload": "capped", "max_k": 1}}
    return {"autospec": {"workload": ("rag", "code-edit")[index % 2]}}


def test_labels_caps_profile_and_journal(tmp_path: Path) -> None:
    profile, journal = tmp_path / "profile.json", tmp_path / "journal.jsonl"
    options = {"profile": str(profile), "journal": str(journal)}
    with engine("ngram", options=options) as llm:
        steering = steering_of(llm)
        random_decisions(steering.pilot)
        assert not steering.pilot.controller.is_warm
        found = generate(llm, TEXTS, extra=label)
        committed = samples(steering, "autospec_committed_tokens_total")
        for workload in ("chat", "capped", "rag", "code-edit"):
            assert committed[workload,] > 0
        # All but each request's first token, which its prefill brings.
        assert sum(committed.values()) == sum(map(len, found.values())) - len(found)
        drafted = samples(steering, "autospec_drafted_tokens_total")
        steps = samples(steering, "autospec_request_steps_total")
        assert drafted["ngram", "chat"] == drafted["suffix", "chat"] == 0
        for proposer in ("ngram", "suffix"):
            assert drafted[proposer, "capped"] == steps[proposer, "capped"]
        assert drafted["ngram", "rag"] > steps["ngram", "rag"] > 0
        scheduler_of(llm).shutdown()
        saved = json.loads(profile.read_text())
        assert {"chat", "capped", "rag", "code-edit"} <= set(saved["workloads"])
        assert len(journal.read_text().splitlines()) > 20
    with engine("ngram", options=options) as llm:
        assert steering_of(llm).pilot.controller.is_warm
        assert generate(llm, TEXTS) == found


def test_bad_labels_are_counted_and_the_request_runs(caplog: pytest.LogCaptureFixture) -> None:
    with engine("ngram") as llm:
        found = generate(llm, TEXTS, extra=lambda _: {"autospec_wokload": "chat"}, tokens=8)
        assert all(len(tokens) == 8 for tokens in found.values())
        dropped = samples(steering_of(llm), "autospec_dropped_observations_total")
        assert dropped["request label",] == len(TEXTS)
    assert caplog.text.count("unknown key 'wokload'") == 1


def test_the_api_server_shows_what_the_engine_core_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    core, server = CollectorRegistry(), CollectorRegistry()
    metrics = Metrics(core)
    server.register(ExpositionCollector(tmp_path))
    assert generate_latest(server) == b""
    exposition = Exposition(core)
    metrics.bind(["ngram"], TokenCounts.empty(1, 1))
    metrics.name_workload(0, "chat")
    metrics.add_event("probe", 3)
    exposition.close()
    assert generate_latest(server) == generate_latest(core)
    assert b"autospec_probes_total 3.0" in generate_latest(server)
