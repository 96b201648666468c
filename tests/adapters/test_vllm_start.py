"""The adapter's start where nothing can be read or kept; needs no vLLM."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from autospec.adapters.vllm.options import AdapterOptions
from autospec.adapters.vllm.pilot import Pilot
from autospec.records import EngineInfo


def pilot_of(options: AdapterOptions, registry: CollectorRegistry) -> Pilot:
    return Pilot(
        options,
        EngineInfo("m", "vllm", "0.32", "cpu", "float32"),
        None,
        with_lookups=True,
        max_requests=2,
        max_tokens=64,
        max_k=4,
        registry=registry,
    )


@pytest.mark.parametrize("place", ["folder", "pipe", "file/inside", "damaged"])
def test_vllm_starts_and_ends_whatever_the_files_are(
    tmp_path: Path, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("not a folder")
    (tmp_path / "damaged").write_text("{")
    os.mkfifo(tmp_path / "pipe")
    registry = CollectorRegistry()
    pilot = pilot_of(
        AdapterOptions(profile=tmp_path / place, journal=tmp_path / "file" / "j.jsonl"), registry
    )
    assert not pilot.controller.is_warm
    assert [each.info.name for each in pilot.lookups] == ["ngram", "suffix"]
    assert registry.get_sample_value("autospec_journal_failures_total") == 1.0
    assert caplog.text.count("serving goes on without it") == 1
    pilot.close()
    saved = place == "damaged"  # kept aside, and a new one begun
    failed = registry.get_sample_value("autospec_fallbacks_total", {"reason": "save"})
    assert failed == (None if saved else 1.0)
    assert (tmp_path / "damaged.bad").exists() == saved


def test_rules_about_texts_are_told_to_be_of_no_use(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    policy = tmp_path / "p.yaml"
    policy.write_text("version: 1\nworkloads: {rules: [{label: code, text_matches: def}]}\n")
    pilot_of(AdapterOptions(policy=str(policy)), CollectorRegistry())
    assert "text_matches never matches inside vLLM" in caplog.text


def test_a_plugin_that_fails_leaves_vllm_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from autospec.adapters.vllm import plugin

    def missing() -> None:
        raise AttributeError("get_prometheus_registry")

    monkeypatch.setattr(plugin, "_register", missing)
    plugin.register()
    assert "AutoSpec's plugin stays off" in caplog.text
