"""Checks, tuning runs and tuned profiles: written by their own code, read and drawn here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autospec.check.lookups import Acceptance, Crossover, Speedup
from autospec.check.result import CheckResult, WorkloadFacts, result_json
from autospec.check.samples import Level, Shares
from autospec.check.verdict import Verdict
from autospec.profile.file import save_profile
from autospec.profile.learned import Profile
from autospec.profile.tuned import Interval, LoadFigures
from autospec.replay.latency import Percentiles
from autospec.report import write_report
from autospec.report.inputs import read_inputs
from autospec.report.sections.best_choice import grid_of_check, grid_of_profile
from autospec.report.sections.crossover import panels_of_check, panels_of_tuning
from autospec.report.sections.tuning import best_so_far, tuning_sentence
from autospec.report.sections.verdict import check_verdict, profile_verdict
from tests.export.made_profiles import rates, served_profile, tuned_profile


def check_document() -> dict[str, Any]:
    """A check of a log with two workloads, as ``autospec check --json`` writes it."""
    speedups = tuple(
        Speedup(
            running, "suffix", k, ratio, 0.9 * ratio, 1.1 * ratio, 0.97 * ratio, 0.97 * ratio >= 1.1
        )
        for running, k, ratio in ((1, 8, 2.0), (8, 4, 1.4), (64, 0, 1.0))
    )
    seconds = Percentiles(0.1, 0.2, 0.3)
    workloads = tuple(
        WorkloadFacts(
            name=name,
            requests=4,
            prompt_tokens=200.0,
            output_tokens=80.0,
            ttft=0.1,
            tpot=0.02,
            repetitiveness=0.5,
            acceptance=(Acceptance("suffix", 8, 2.5, 3.0),),
            speedups=speedups,
        )
        for name in ("chat", "code")
    )
    level = Level(
        rate=1.0, requests=8, failed=0, seconds=8.0, running=3.0, prompt_tokens=200.0,
        output_tokens=80.0, tokens_per_second=80.0, ttft=seconds, tpot=None, inter_token=None,
        end_to_end=seconds, shares=Shares(0.1, 0.3, 0.6),
    )  # fmt: skip
    verdict = Verdict("candidate", "candidate: suffix", "because of this", ("try it",))
    return result_json(
        CheckResult(
            "log", {"log": "log.jsonl"}, verdict, (level,), workloads, speedups, Crossover(64, 64)
        )
    )


def tuned() -> Profile:
    """A tuned profile with figures at two loads."""
    profile = tuned_profile(
        {"chat": {"suffix": rates(0.3, 0.5, 8)}, "code": {"suffix": rates(0.9, 0.9, 8)}}
    )
    assert profile.tuned is not None
    figures = tuple(
        LoadFigures(
            load=load,
            proposer="suffix",
            k=4,
            predicted=ratio,
            measured=Interval(value=ratio, low=ratio - 0.1, high=ratio + 0.1, rounds=5),
            untuned=Interval(value=ratio - 0.1, low=ratio - 0.2, high=ratio, rounds=5),
        )
        for load, ratio in ((1, 2.0), (16, 1.2))
    )
    changed = profile.tuned.model_copy(update={"loads": figures, "crossover": 40})
    return replace(profile, tuned=changed)


def tune_document(profile: Profile) -> dict[str, Any]:
    """What ``autospec tune --json`` writes beside that profile."""
    assert profile.tuned is not None
    point = {"requests": 4, "context_tokens": 400, "proposer": None, "k": 0, "replicates": 5}
    trial = {"settings": {"suffix.max_k": 8}, "seconds": 2.0, "error": None}
    scores = (0.2, 0.1, None, 0.4)
    return {
        "kind": "tune",
        "version": 1,
        "date": "2026-11-29T00:00:00+00:00",
        "surface": [
            {**point, "median_seconds": 0.02, "spread_seconds": 0.001},
            {**point, "k": 4, "proposer": "suffix", "median_seconds": 0.03, "spread_seconds": 0.0},
        ],
        "trials": [
            {**trial, "number": number, "score": score, "status": "ok" if score else "failed"}
            for number, score in enumerate(scores, start=1)
        ],
        "final": {
            "gains": {"trial 4": {"value": 1.1, "low": 1.02, "high": 1.2}},
            "kept": "trial 4",
        },
        "tuned": profile.tuned.model_dump(mode="json", exclude_none=True),
    }


def test_a_check_is_read_as_it_was_written() -> None:
    (run,) = read_inputs([check_document()]).checks
    verdict = check_verdict(run)
    assert verdict.sentences[:3] == ("Candidate: suffix.", "Because of this.", "Try it.")
    assert [figure.value for figure in verdict.figures] == ["2.00x", "1.00x"]
    cells = {(cell.row, cell.column): cell.lines for cell in grid_of_check(run).cells}
    assert cells["chat", "8"] == ("suffix:4", "1.40x", "1.26–1.54x")
    assert cells["code", "64"][0] == "off"
    assert [panel.title for panel in panels_of_check(run)] == ["all requests", "chat", "code"]
    assert run.workloads[0].best.accepted_share == pytest.approx(0.5)


def test_a_tuned_profile_says_what_is_best(tmp_path: Path) -> None:
    save_profile(tmp_path / "tuned.json", tuned())
    (profile,) = read_inputs([tmp_path / "tuned.json"]).profiles
    cells = {(cell.row, cell.column): cell.lines for cell in grid_of_profile(profile).cells}
    assert cells["code", "1"][0].startswith("suffix:")
    gain = {row: float(cells[row, "1"][1].removesuffix("x")) for row in ("chat", "code")}
    assert gain["code"] > gain["chat"] >= 1.0
    sentences = profile_verdict(profile).sentences
    assert sentences[0].startswith("Tuned settings are kept")
    assert "From 40 running requests on" in sentences[1]


def test_lookups_of_a_served_profile_are_not_guessed(tmp_path: Path) -> None:
    save_profile(tmp_path / "served.json", served_profile(("suffix",), 0.9))
    (profile,) = read_inputs([tmp_path / "served.json"]).profiles
    assert not profile.outlooks
    assert not grid_of_profile(profile).cells


def test_a_tuning_and_its_profile_say_the_same_once(tmp_path: Path) -> None:
    profile = tuned()
    save_profile(tmp_path / "tuned.json", profile)
    inputs = read_inputs([tune_document(profile), tmp_path / "tuned.json"])
    assert [name for name, _ in inputs.tunings] == ["tuned.json"]
    (panel,) = panels_of_tuning(inputs.tunings[0][1])
    assert panel.lines[1].points == ((1.0, 2.0), (16.0, 1.2))
    assert panel.lines[1].spans[0] == pytest.approx((1.9, 2.1))
    default = profile.tuned.model_copy(update={"kept": False}) if profile.tuned else None
    assert default is not None
    assert len(panels_of_tuning(default)[0].lines) == len(panel.lines) - 1
    (run,) = inputs.tunes
    assert [number for number, _ in best_so_far(run.trials)] == [1, 2, 4]
    assert "4 settings of the proposers were tried, 1 of them without" in tuning_sentence(run)


def test_all_of_it_is_drawn(tmp_path: Path) -> None:
    profile = tuned()
    save_profile(tmp_path / "tuned.json", profile)
    given: list[Path | dict[str, Any]] = [check_document(), tune_document(profile)]
    given.append(tmp_path / "tuned.json")
    write_report(given, tmp_path / "r.html")
    page = (tmp_path / "r.html").read_text(encoding="utf-8")
    for name in ("service", "tuning", "best", "crossover", "cost"):
        assert page.count(f'<section id="{name}"') == 1, name
    for name in ("time-0", "trials-0", "expected-0", "checked-0", "crossover-tuned-0"):
        assert page.count(f'<figure id="{name}"') == 1, name
