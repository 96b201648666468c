"""``autospec tune --engine vllm`` on a tiny random model, and an engine that starts from it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.adapters.vllm_engines import VOCABULARY, generate, prompts, steering_of, target
from tests.word_folders import word_tokenizer

pytest.importorskip("skopt")

from vllm import LLM

from autospec.adapters.vllm import configure
from autospec.adapters.vllm.arguments import RUNNER_VARIABLE
from autospec.errors import ModelError
from autospec.profile.file import load_profile
from autospec.tune import on_vllm, tuner
from autospec.tune.run import run_tune
from autospec.tune.tuner import TuneOptions

pytestmark = pytest.mark.filterwarnings("ignore")

SILENT = Console(quiet=True)


@pytest.fixture(autouse=True)
def runner_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tuning asks for a model runner in the environment: other tests keep theirs."""
    monkeypatch.setenv(RUNNER_VARIABLE, "0")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The random target, with a word for every token."""
    path = tmp_path_factory.mktemp("tune") / "model"
    shutil.copytree(target(), path)
    word_tokenizer(VOCABULARY).save_pretrained(path)
    return path


def options_in(folder: Path, **more: object) -> TuneOptions:
    place = folder.parent / "prompts.jsonl"
    rows = [
        {
            "id": f"p{number}",
            "workload": "odd" if number % 2 else "even",
            "prompt": " ".join(f"w{token}" for token in tokens),
        }
        for number, tokens in enumerate(prompts(8))
    ]
    place.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    known: dict[str, object] = {
        "out": folder.parent / "profile.json",
        "engine": "vllm",
        "target": folder,
        "prompts": place,
        "loads": (1, 4),
        "budget": 3600.0,
        "trials": 4,
        "max_tokens": 20,
        "dtype": "float32",
        "json_path": folder.parent / "figures.json",
    }
    return TuneOptions(**{**known, **more})  # type: ignore[arg-type]


def test_vllm_is_tuned_and_starts_from_what_was_found(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = options_in(folder)
    monkeypatch.setattr(tuner, "_MOST_ROUNDS", 3)
    monkeypatch.setattr(on_vllm, "_TIMED_REQUESTS", 4)
    assert run_tune(options, SILENT) == 0
    profile = load_profile(options.out)
    assert profile.identity.engine == "vllm"
    assert profile.identity.target == str(folder)
    assert profile.identity.proposers == ("ngram", "suffix")
    tuned = profile.tuned
    assert tuned is not None
    assert set(tuned.workloads) == {"even", "odd"}
    assert tuned.workloads["odd"].tokens > 0
    assert [each.load for each in tuned.loads] == [1, 4]
    assert all(each.measured is not None for each in tuned.loads)
    weight = profile.cost["step"]["weight"]
    assert weight[: len(weight) // 2].sum() > 0  # plain steps
    assert weight[len(weight) // 2 :].sum() > 0  # steps with drafts
    final = json.loads((folder.parent / "figures.json").read_text())["final"]
    assert set(final["rounds"][0]["goodputs"]) >= {"plain", "untuned", "finalist 1"}
    assert all(
        goodput > 0
        for each in final["rounds"]
        for goodputs in each["goodputs"].values()
        for goodput in goodputs
    )

    arguments: dict[str, Any] = {
        "model": str(folder),
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 128,
        "max_num_seqs": 4,
    }
    llm = LLM(**configure(arguments, profile=options.out))
    try:
        pilot = steering_of(llm).pilot
        assert pilot.controller.is_warm
        assert pilot.controller.cost.is_known
        assert {each.info.name: each.info.max_k for each in pilot.lookups} == {
            name: each.max_k for name, each in tuned.proposers.items()
        }
        assert len(generate(llm, prompts(2))) == 2
    finally:
        llm.llm_engine.engine_core.shutdown()


def test_a_model_that_cannot_be_served_is_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no tokenizer"):
        run_tune(options_in(folder, target=tmp_path), SILENT)
    with pytest.raises(ModelError, match=f"{folder}: vLLM cannot serve it"):
        run_tune(options_in(folder, max_tokens=100_000), SILENT)
