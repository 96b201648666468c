"""Policy and profile files that are wrong, damaged, foreign, shared or cannot be written."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from autospec.errors import ConfigError
from autospec.profile.file import load_profile
from tests.adapters.vllm_engines import engine, generate, prompts, steering_of

pytestmark = pytest.mark.filterwarnings("ignore")

TEXTS = prompts(6)


def _label(index: int) -> dict[str, object]:
    return {"autospec": {"workload": ("chat", "rag")[index % 2]}}


def test_a_wrong_policy_file_ends_the_start_with_its_place(tmp_path: Path) -> None:
    policy = tmp_path / "mine.yaml"
    policy.write_text("version: 1\npolicy:\n  name: goodputt\n")
    with (
        pytest.raises(ConfigError, match=r"(?s)mine\.yaml.*goodputt"),
        engine("ngram", options={"policy": str(policy)}),
    ):
        pass


def test_a_wrong_option_is_named() -> None:
    with (
        pytest.raises(ConfigError, match=r"(?s)polcy.*policy"),
        engine("ngram", options={"polcy": "default"}),
    ):
        pass


def test_a_profile_is_saved_kept_aside_left_alone_or_joined(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "profile.json"
    options = {"profile": str(path)}
    path.write_text("{ damaged")
    with caplog.at_level(logging.WARNING), engine("ngram", options=options) as llm:
        assert not steering_of(llm).pilot.controller.is_warm
        assert "starting cold" in caplog.text
        assert path.with_suffix(".json.bad").exists()
        generate(llm, TEXTS, extra=_label)
    assert {"chat", "rag"} <= set(load_profile(path).workloads)

    caplog.clear()
    before = path.read_bytes()
    other = options | {"lookups": ["suffix"]}  # other proposers: nothing that could be shared
    with caplog.at_level(logging.WARNING), engine("ngram", options=other) as llm:
        assert not steering_of(llm).pilot.controller.is_warm
        assert "proposers is" in caplog.text
        generate(llm, TEXTS, extra=_label)
    assert path.read_bytes() == before  # of somebody else's making: left alone
    (beside,) = tmp_path.glob("profile.????????.json")
    assert beside.name in caplog.text
    assert {"chat", "rag"} <= set(load_profile(beside).workloads)

    with engine("ngram", options=options) as llm:
        assert steering_of(llm).pilot.controller.is_warm
        generate(llm, TEXTS, extra=_label)


def test_a_profile_that_cannot_be_written_fails_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("not a folder")
    path = tmp_path / "file" / "profile.json"
    with engine("ngram", options={"profile": str(path), "save_every_seconds": 0.001}) as llm:
        assert len(generate(llm, TEXTS, extra=_label)) == len(TEXTS)
    assert "profile.json" in caplog.text
