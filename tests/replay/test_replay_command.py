"""``autospec replay``: its figures and its refusals."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from autospec import cli
from autospec.profile.file import save_profile
from autospec.profile.learned import Identity, Profile
from tests.replay.made_runs import LOOKUPS_AND_MODEL, cost_file

TRACE = [
    {
        "id": str(i),
        "workload": "chat",
        "prompt_token_ids": [1, 2, 3, 1, 2],
        "output_token_ids": [3, 1, 2, 3, 1, 2, 9, 9],
        "accepted": {"model": [2, 1, 0, 3, 2, 1, 0, 0]},
    }
    for i in range(4)
]


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    paths = {name: tmp_path / name for name in ("trace.jsonl", "cost.yaml", "arrivals.csv", "out")}
    paths["trace.jsonl"].write_text("".join(json.dumps(row) + "\n" for row in TRACE))
    cost = cost_file(**LOOKUPS_AND_MODEL).model_dump(mode="json")
    paths["cost.yaml"].write_text(json.dumps(cost))
    paths["arrivals.csv"].write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        + "".join(f"2023-11-16 18:15:4{i}.5,10,4\n" for i in range(4))
    )
    return paths


def command(monkeypatch: pytest.MonkeyPatch, files: dict[str, Path], *arguments: str | Path) -> int:
    fixed = ["replay", files["trace.jsonl"], "--cost", files["cost.yaml"], "--jobs", "1"]
    monkeypatch.setattr(sys, "argv", ["autospec", *map(str, [*fixed, *arguments])])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    return caught.value.code if isinstance(caught.value.code, int) else 0


def test_command_writes_every_figure(
    monkeypatch: pytest.MonkeyPatch, files: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--policy", "default", "--policy", "off", "--concurrency", "1,2"]
    assert command(monkeypatch, files, *arguments, "--json", files["out"]) == 0
    report = json.loads(files["out"].read_text())
    assert [(row["policy"], row["concurrency"]) for row in report["results"]] == [
        ("default", 1),
        ("off", 1),
        ("default", 2),
        ("off", 2),
    ]
    row = report["results"][1]
    assert row["speedup_vs_plain"] == 1.0
    assert row["rate"] is None
    assert row["tokens_per_second"] == pytest.approx(row["tokens"] / row["seconds"])
    assert (row["requests"], row["tokens"]) == (4, 32)
    for key in ("decision_seconds_mean", "decision_seconds_p99"):
        assert row[key] > 0.0
    assert set(report["best_fixed"]) == set(report["clairvoyant"]) == {"1", "2"}
    best = report["best_fixed"]["1"]
    assert best["arm"].split(":")[0] in LOOKUPS_AND_MODEL
    assert report["clairvoyant"]["1"]["speedup_vs_plain"] >= best["speedup_vs_plain"] > 1.0
    out = capsys.readouterr().out
    assert best["arm"] in out
    assert "default" in out


def test_without_a_number_loops_are_those_that_there_are_requests_for(
    monkeypatch: pytest.MonkeyPatch, files: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(monkeypatch, files, "--no-hindsight", "--json", files["out"]) == 0
    report = json.loads(files["out"].read_text())
    assert [row["concurrency"] for row in report["results"]] == [1]
    assert "closed loop, 4 requests" in " ".join(capsys.readouterr().out.split())


def test_a_model_that_no_trace_has_is_refused(
    monkeypatch: pytest.MonkeyPatch, files: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    model = LOOKUPS_AND_MODEL["model"]
    cost = cost_file(**LOOKUPS_AND_MODEL, eagle=model).model_dump(mode="json")
    files["cost.yaml"].write_text(json.dumps(cost))
    assert command(monkeypatch, files, "--concurrency", "1") == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "cost.yaml: proposers.eagle: 4 of 4 requests have no accepted.eagle" in said
    assert "recorded there: model" in said
    assert "take eagle and what goes on from it out of the cost file" in said
    assert "proposers.model" not in said


def test_a_model_that_some_requests_lack_is_refused(
    monkeypatch: pytest.MonkeyPatch, files: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    with files["trace.jsonl"].open("a") as file:
        file.write(json.dumps({**TRACE[0], "id": "bare", "accepted": {}}) + "\n")
    assert command(monkeypatch, files, "--concurrency", "1") == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "1 of 5 requests have no accepted.model in their traces, such as 'bare'" in said


def test_the_profile_of_a_server_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    files: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    served = Profile(
        Identity("llama", ("ngram",), "vllm", "0.32", "cpu", "bfloat16"),
        "acceptance/1", "cost/1", {}, {}, (), 0.0,
    )  # fmt: skip
    save_profile(tmp_path / "served.json", served)
    assert command(monkeypatch, files, "--profile", tmp_path / "served.json") == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "served.json: profile does not fit: target is 'llama', expected 'trace'" in said
    assert "not one of a server: write it with autospec replay --save-profile" in said


def test_command_runs_the_open_loop(
    monkeypatch: pytest.MonkeyPatch, files: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--rate", "0.5,2", "--tpot-target-ms", "900", "--json", str(files["out"])]
    assert command(monkeypatch, files, "--arrivals", files["arrivals.csv"], *arguments) == 0
    report = json.loads(files["out"].read_text())
    assert [row["rate"] for row in report["results"]] == [0.5, 2.0]
    for row in report["results"]:
        for key in ("ttft_seconds", "tpot_seconds", "end_to_end_seconds"):
            assert 0.0 < row[key]["p50"] <= row[key]["p95"] <= row[key]["p99"]
        assert 0.0 <= row["tpot_target_share"] <= 1.0
        assert row["tokens"] == 32
    assert report["best_fixed"] == {}
    assert "0.5 requests/s" in capsys.readouterr().out


def test_command_starts_from_a_profile(
    monkeypatch: pytest.MonkeyPatch, files: dict[str, Path], tmp_path: Path
) -> None:
    profile = tmp_path / "p.json"
    once = ["--concurrency", "2", "--no-hindsight", "--json", str(files["out"])]
    assert command(monkeypatch, files, *once, "--save-profile", profile) == 0
    assert command(monkeypatch, files, *once, "--profile", profile) == 0
    assert json.loads(files["out"].read_text())["settings"]["profile"] == "p.json"


@pytest.mark.parametrize(
    "arguments,message",
    [
        (
            ["--concurrency", "1,8"],
            "--concurrency: 8 requests cannot run at once, 4 are to be replayed; give at most 4",
        ),
        (["--requests", "2", "--concurrency", "3"], "2 are to be replayed; give at most 2"),
        (["--concurrency", "1,x"], "--concurrency: 'x' is not a number of requests"),
        (["--rate", "0"], "--rate: '0' is not a positive number"),
        (["--rate", "-2"], "--rate: '-2' is not a positive number"),
        (["--rate", "2"], "--arrivals and --rate belong together"),
        (["--policy", "defualt"], "did you mean 'default'?"),
        (["--json", "/nowhere/at/all.json"], "--json: /nowhere/at/all.json cannot be written"),
        (["--profile", "/nowhere.json"], "/nowhere.json"),
        (["--requests", "0"], "--requests"),
    ],
)
def test_command_refuses_wrong_options(
    monkeypatch: pytest.MonkeyPatch,
    files: dict[str, Path],
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    assert command(monkeypatch, files, *arguments) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_help_says_what_arrivals_and_cost_files_are(
    monkeypatch: pytest.MonkeyPatch, files: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(monkeypatch, files, "--help") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "needs both --arrivals and --rate" in said
    assert "TIMESTAMP,ContextTokens,GeneratedTokens" in said
    assert "autospec/replay/cost_file.py" in said
    assert (Path(cli.__file__).parents[1] / "replay" / "cost_file.py").is_file()


def test_command_names_the_line_of_a_broken_trace(
    monkeypatch: pytest.MonkeyPatch, files: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    with files["trace.jsonl"].open("a") as file:
        file.write('{"id": "x"}\n')
    assert command(monkeypatch, files) == 2
    assert "trace.jsonl:5: " in capsys.readouterr().err
