"""The command on recorded requests: what it keeps, writes, survives and goes on from."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from autospec.cli.app import app
from autospec.errors import InputError
from autospec.export import EXPORTERS
from autospec.export.plan import Wish
from autospec.outlook import outlook
from autospec.profile.file import load_profile
from autospec.tune import traced, tuner
from autospec.tune.run import run_tune
from autospec.tune.state import state_path
from autospec.tune.traced import TrialTimeout
from autospec.tune.tuner import TuneOptions
from tests.tune.made_traces import write_inputs

SILENT = Console(quiet=True)


def options(folder: Path, **more: Any) -> TuneOptions:
    traces, cost = write_inputs(folder)
    known: dict[str, Any] = {
        "out": folder / "p.json",
        "engine": "replay",
        "traces": (traces,),
        "cost": cost,
        "loads": (1, 4),
        "budget": 3600.0,
        "trials": 5,
        "json_path": folder / "figures.json",
        "report_path": folder / "report.html",
    }
    return TuneOptions(**{**known, **more})


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuner, "_MOST_ROUNDS", 3)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which a whole run was made."""
    folder = tmp_path_factory.mktemp("tuned")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuner, "_MOST_ROUNDS", 3)
        assert run_tune(options(folder), SILENT) == 0
    return folder


def test_the_profile_holds_all_that_was_found(tuned: Path) -> None:
    profile = load_profile(tuned / "p.json")
    found = profile.tuned
    assert found is not None
    assert set(found.workloads) == {"copy", "new"}
    assert found.workloads["copy"].proposers["suffix"].accepted[-1] > 3.0
    assert {each.load for each in found.loads} == {1, 4}
    for each in found.loads:
        assert each.measured is not None
        assert each.measured.rounds == 3
        assert each.measured.low <= each.measured.value <= each.measured.high
        assert each.predicted >= 1.0
    assert found.provenance.command.startswith(
        "autospec tune --engine replay --traces traces.jsonl"
    )
    assert len(found.provenance.prompts_digest) == 64
    assert profile.workloads["copy"].proposers["suffix"]["trials"].sum() > 0
    assert not state_path(tuned / "p.json").exists()


def test_the_figures_have_every_trial_and_round(tuned: Path) -> None:
    figures = json.loads((tuned / "figures.json").read_text())
    assert figures["kind"] == "tune"
    assert [each["number"] for each in figures["trials"]] == [1, 2, 3, 4, 5]
    assert {each["status"] for each in figures["trials"]} == {"ok"}
    assert set(figures["trials"][0]["speedup"]) == {"1", "4"}
    assert len(figures["final"]["rounds"]) == 3
    assert set(figures["final"]["rounds"][0]["goodputs"]) >= {"plain", "untuned", "finalist 1"}
    assert figures["tuned"]["kept"] == (figures["final"]["kept"] != "untuned")


def test_the_report_is_written(tuned: Path) -> None:
    assert "<svg" in (tuned / "report.html").read_text()


def test_a_tuned_profile_can_be_exported(tuned: Path) -> None:
    view = outlook(load_profile(tuned / "p.json"), "copy")
    config = json.loads(EXPORTERS["vllm"](view, Wish(proposer="ngram")).flags[1])
    assert config["num_speculative_tokens_per_batch_size"][0][0] == 1


def test_profile_show_tells_of_the_tuning(tuned: Path) -> None:
    result = CliRunner().invoke(app, ["profile", "show", str(tuned / "p.json")])
    assert result.exit_code == 0
    assert "tuned by autospec tune --engine replay" in result.stdout
    assert "load 4: best fixed choice" in result.stdout
    assert "  ngram: max_k" in result.stdout


def test_an_interrupted_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    true = traced.tuned_goodput
    calls = 0

    def interrupting(*arguments: Any, **more: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 6:  # in the third trial, after learning first and two trials of two loads
            raise KeyboardInterrupt
        return true(*arguments, **more)

    monkeypatch.setattr(tuner, "tuned_goodput", interrupting)
    asked = options(tmp_path)
    assert run_tune(asked, SILENT) == 1
    state = json.loads(state_path(asked.out).read_text())
    assert len(state["trials"]) == 2
    assert not asked.out.exists()
    monkeypatch.setattr(tuner, "tuned_goodput", true)
    assert run_tune(asked, SILENT) == 0
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert [each["seconds"] for each in figures["trials"][:2]] == [
        round(each["seconds"], 3) for each in state["trials"]
    ]


def test_trials_that_fail_are_noted_and_survived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    true = traced.tuned_goodput
    calls = 0

    def failing(*arguments: Any, **more: Any) -> Any:
        nonlocal calls
        calls += 1
        if more["deadline"] is not None and calls in (4, 6, 8):
            if calls == 4:
                raise TrialTimeout("after 64 steps at load 1")
            if calls == 6:
                raise InputError("no such luck")
            return float("nan"), None
        return true(*arguments, **more)

    monkeypatch.setattr(tuner, "tuned_goodput", failing)
    assert run_tune(options(tmp_path, trials=8), SILENT) == 0
    trials = json.loads((tmp_path / "figures.json").read_text())["trials"]
    assert [each["status"] for each in trials].count("ok") == 5
    assert {each["status"] for each in trials} == {"ok", "timeout", "failed", "nan"}
    errors = [each["error"] for each in trials if each["status"] != "ok"]
    assert any("no such luck" in error for error in errors)


def test_too_small_a_budget_says_what_would_do(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--budget: 0 s is too little: one trial takes"):
        run_tune(options(tmp_path, budget=0.01), SILENT)


def test_an_older_profile_warms_the_search(tmp_path: Path, tuned: Path) -> None:
    older = load_profile(tuned / "p.json")
    assert older.tuned is not None
    ngram = older.tuned.proposers["ngram"].model_copy(update={"min_match": 4, "max_match": 6})
    changed = older.tuned.model_copy(
        update={"proposers": {**older.tuned.proposers, "ngram": ngram}}
    )
    path = tmp_path / "older.json"
    from autospec.profile.file import save_profile

    save_profile(path, replace(older, tuned=changed))
    assert run_tune(options(tmp_path, warm_start=path, trials=4), SILENT) == 0
    fourth = json.loads((tmp_path / "figures.json").read_text())["trials"][3]["settings"]
    assert (fourth["ngram.min_match"], fourth["ngram.wider"]) == (4, 2)


@pytest.mark.parametrize(
    "more,message",
    [
        ({"engine": "tgi"}, "--engine: 'tgi'; there are embedded, replay, vllm"),
        ({"cost": None}, "needs --traces .* and --cost"),
        ({"traces": ()}, "needs --traces .* and --cost"),
        ({"engine": "embedded"}, "--engine embedded needs --target and --prompts"),
        ({"out": Path("/nowhere/p.json")}, "cannot be written; give a file in a folder"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(
    tmp_path: Path, more: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        run_tune(options(tmp_path, **more), SILENT)


def test_a_model_that_no_trace_has_is_refused(tmp_path: Path) -> None:
    asked = options(tmp_path)
    assert asked.cost is not None
    text = asked.cost.read_text()
    asked.cost.write_text(text + "  eagle: {kind: sequential, per_depth_seconds: 0.001}\n")
    with pytest.raises(InputError, match=r"proposers\.eagle: 8 of 8 requests have no accepted"):
        run_tune(asked, SILENT)


def test_the_command_line_reads_its_options(tmp_path: Path) -> None:
    traces, cost = write_inputs(tmp_path)
    result = CliRunner().invoke(
        app,
        [
            "tune", "--engine", "replay", "--traces", str(traces), "--cost", str(cost),
            "--loads", "1,x", "-o", str(tmp_path / "p.json"),
        ],
    )  # fmt: skip
    assert isinstance(result.exception, InputError)
    assert "--loads: 'x'" in str(result.exception)
