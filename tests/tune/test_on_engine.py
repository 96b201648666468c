"""The whole run on a tiny random model: surface, record, search, final, profile, warm start."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from autospec.bench.arms import Arm, ArmInputs, ArmSpec
from autospec.bench.phases import ADAPTIVE
from autospec.config import ProfileSettings, Settings
from autospec.engine.model import CausalModel
from autospec.engine.request import GenerationRequest
from autospec.profile.file import load_profile, save_profile
from autospec.profile.tuned import KCap, ProposerSettings
from autospec.records import EngineInfo, ProposerInfo
from autospec.tune import on_engine, tuner
from autospec.tune.run import run_tune
from autospec.tune.state import state_path, trace_path
from autospec.tune.surface import Timing, design, fit, time_design
from autospec.tune.tuner import TuneOptions
from tests.word_folders import save_untrained

SILENT = Console(quiet=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that knows sixty words and was never trained."""
    path = tmp_path_factory.mktemp("model")
    save_untrained(path, 256)
    return path


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = [
        {
            "id": f"p{number}",
            "workload": "copy" if number % 2 else "chat",
            "prompt": " ".join(f"w{3 + (number * 5 + each) % 50}" for each in range(9)),
        }
        for number in range(4)
    ]
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="module", params=[False, True], ids=["alone", "draft"])
def tuned(
    request: pytest.FixtureRequest,
    folder: Path,
    prompts: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[TuneOptions, bool]:
    """A whole run; with a draft, the target drafts for itself."""
    place = tmp_path_factory.mktemp("tuned")
    options = TuneOptions(
        out=place / "p.json",
        target=folder,
        prompts=prompts,
        draft=folder if request.param else None,
        loads=(1, 2),
        budget=3600.0,
        trials=4,
        max_tokens=10,
        json_path=place / "figures.json",
        dtype="float32",
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuner, "_MOST_ROUNDS", 3)
        patch.setattr(on_engine, "_CONTEXTS", (12, 24))
        patch.setattr(on_engine, "_REPLICATES", 2)
        assert run_tune(options, SILENT) == 0
    return options, request.param


def test_the_profile_and_the_figures_of_a_whole_run(tuned: tuple[TuneOptions, bool]) -> None:
    options, with_draft = tuned
    profile = load_profile(options.out)
    found = profile.tuned
    assert found is not None
    names = {"ngram", "suffix"} | ({"draft_model"} if with_draft else set())
    assert set(found.proposers) == names == set(profile.identity.proposers)
    assert set(found.workloads) == {"copy", "chat"}
    if with_draft:
        rates = found.workloads["chat"].proposers["draft_model"]
        # but in the first position, whose token comes with the prompt: 10 tokens in 5 or 6 steps.
        # (Where the final kept a draft stop, which is a matter of times, less is drafted.)
        if not found.proposers["draft_model"].min_confidence:
            assert rates.accepted[0] > 0.5
            assert max(rates.accepted) > 2.0
    assert options.json_path is not None
    figures = json.loads(options.json_path.read_text())
    assert {each["requests"] for each in figures["surface"]} == {1, 2}
    assert all(each["replicates"] == 2 for each in figures["surface"])
    assert profile.cost["step"]["weight"].sum() > 0
    assert not state_path(options.out).exists()
    assert not trace_path(options.out).exists()


def test_the_design_has_every_octave_and_replicates_are_robust() -> None:
    points = design((1, 6), (16, 64), ())
    assert {each.requests for each in points} == {1, 2, 4, 6}
    assert {each.context_tokens for each in points} == {16, 64}
    assert all(each.requests * (1 + each.k) <= 320 for each in points)
    timing = Timing(points[0], (1.0, 1.1, 0.9, 1.0, 50.0), (0.0,) * 5, (16,) * 5)
    assert max(timing.clipped()) == pytest.approx(1.0 + 3 * timing.spread)


def test_the_surface_fit_predicts_what_was_timed() -> None:
    engine = EngineInfo("t", "embedded", "1", "cpu", "float32")
    timings = [
        Timing(each, (0.01 + 0.001 * each.requests * (1 + each.k),) * 5, (0.0,) * 5, (100,) * 5)
        for each in design((1, 4, 16), (96, 384), ())
    ]
    model = fit(timings, (ProposerInfo("ngram", "lookup", 8),), engine)
    for requests, k in ((1, 0), (4, 4), (16, 8)):
        tokens = requests * (1 + k)
        found = model.verify_seconds(tokens, requests, 100, k > 0)
        assert found == pytest.approx(0.01 + 0.001 * tokens, rel=0.05)


def test_steps_of_the_surface_have_the_batch_that_was_asked_for(folder: Path) -> None:
    with torch.inference_mode():
        target = CausalModel.load(folder, dtype="float32")
        points = design((2,), (12, 24), ())
        timings = time_design(target, (), points, replicates=3, seed=0)
    assert {each.point for each in timings} == set(points)
    for each in timings:
        assert len(each.seconds) == 3
        assert min(each.context_tokens) >= each.point.requests * each.point.context_tokens
        assert min(each.seconds) > 0.0


def test_an_engine_starts_with_the_settings_and_caps_of_its_profile(
    tuned: tuple[TuneOptions, bool], tmp_path: Path
) -> None:
    options, with_draft = tuned
    profile = load_profile(options.out)
    assert profile.tuned is not None
    assert options.target is not None
    ngram = ProposerSettings(kind="lookup", max_k=5, min_match=1, max_match=2)
    changed = profile.tuned.model_copy(
        update={
            "proposers": {**profile.tuned.proposers, "ngram": ngram},
            "caps": (KCap(load=1, k=0),),
        }
    )
    path = tmp_path / "p.json"
    save_profile(path, replace(profile, tuned=changed))
    with torch.inference_mode():
        target = CausalModel.load(options.target, dtype="float32")
        arm = Arm(
            ArmSpec(ADAPTIVE),
            ArmInputs(target, target if with_draft else None, 2, 64, 0),
            Settings(version=1, profile=ProfileSettings(path=path)),
        )
        assert arm.controller is not None
        assert arm.controller.is_warm
        assert {info.name: info.max_k for info in arm.controller.proposers}["ngram"] == 5
        request = GenerationRequest([5, 6, 5, 6, 5, 6], 12, id="r", ignore_eos=True)
        served = arm.serve([request], 1)
    assert served.result.drafted == 0  # capped at 0 from one request on
