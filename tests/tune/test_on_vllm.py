"""Tuning inside vLLM with vLLM's part made up; the real one is in tests/adapters."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry
from rich.console import Console

from autospec.adapters.vllm.arguments import DEFAULT_K, configure
from autospec.adapters.vllm.options import AdapterOptions
from autospec.adapters.vllm.pilot import Pilot
from autospec.config import Settings
from autospec.cost.step_cost import StepLoad
from autospec.errors import InputError, MissingDependency
from autospec.estimators import Estimators
from autospec.profile.file import load_profile, save_profile
from autospec.profile.learned import Profile
from autospec.profile.tuned import ProposerSettings
from autospec.proposers.settings import LOOKUP_DEFAULTS
from autospec.records import EngineInfo, ProposerInfo
from autospec.replay.trace import read_traces
from autospec.tune import tuner
from autospec.tune.on_vllm import tune_on_vllm, tune_served
from autospec.tune.run import run_tune
from autospec.tune.state import state_path, trace_path
from autospec.tune.tuner import TuneOptions
from autospec.tune.vllm_engine import Answers, Call

INFO = EngineInfo("models/m", "vllm", "0.32", "cpu", "float32")
SILENT = Console(quiet=True)
CALLS = {
    f"p{number}": Call(
        f"p{number}", "copy" if number % 2 else "new", [7, 8, 9, 10 + number] * 3, 16, 0.0, 0, True
    )
    for number in range(8)
}


class MadeUpVllm:
    """Answers by repeating the prompt, a step taking 10 ms and 1 ms a token; fast where tuned.

    ``fails_after`` servings Ctrl-C is pressed.
    """

    info = INFO

    def __init__(self, fails_after: int | None = None) -> None:
        self.steered: list[tuple[str, Profile | None]] = []
        self.served: list[tuple[list[str], int]] = []
        self.within: list[float] = []
        self._left = fails_after

    def steer(self, policy: str | Path, profile: Profile | None) -> None:
        self.steered.append((Path(policy).stem, profile))

    def serve(self, calls: Sequence[Call], load: int, within: float = math.inf) -> Answers:
        if self._left is not None and len(self.served) == self._left:
            raise KeyboardInterrupt
        names = [call.id for call in calls]
        assert len(set(names)) == len(names)
        self.served.append((names, load))
        self.within.append(within)
        profile = self.steered[-1][1]
        speed = 1.0
        if profile is not None:
            assert profile.tuned is not None
            speed = 3.0 if profile.tuned.kept else 2.0
        answers = {
            call.id: np.resize(np.array(call.prompt_token_ids, dtype=np.int32), call.max_tokens)
            for call in calls
        }
        return Answers(answers, 1.0 / (speed * (1.0 + 0.01 * (len(self.served) % 3))))

    def learned(self) -> Profile:
        infos = tuple(ProposerInfo(name, "lookup", 32) for name in ("ngram", "suffix"))
        made = Estimators(infos, INFO, Settings(version=1).learning, 1, 4)
        load = self.served[-1][1]
        for step in range(40):
            k = (0, 2, 8)[step % 3]
            tokens, none = load * (1 + k), np.zeros(2)
            made.cost.observe(
                StepLoad(tokens, load, 20 * load, k > 0, none, none, none),
                0.01 + 0.001 * tokens,
                None,
            )
        return made.take_fresh(["default"], "made up", 1e9)


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuner, "_MOST_ROUNDS", 3)


def options_in(folder: Path) -> TuneOptions:
    prompts = folder / "prompts.jsonl"
    prompts.write_text('{"id": "p0", "prompt": "stands for all"}\n', encoding="utf-8")
    return TuneOptions(
        out=folder / "p.json",
        engine="vllm",
        target=Path("models/m"),
        prompts=prompts,
        loads=(1, 12),
        budget=3600.0,
        trials=5,
        max_tokens=16,
    )


def tune(options: TuneOptions, engine: MadeUpVllm) -> int:
    policy = Settings(version=1)
    return tune_served(options, policy, None, SILENT, engine, CALLS, options.out.parent)


def test_a_whole_run(tmp_path: Path) -> None:
    options, engine = options_in(tmp_path), MadeUpVllm()
    assert tune(options, engine) == 0
    policies = [policy for policy, _ in engine.steered]
    assert policies[0] == "off"  # the record
    timed = ["off", "suffix-2", "suffix-8", "default"]
    assert policies[1:9] == [*timed, *timed]
    assert [load for _, load in engine.served[1:9]] == [1] * 4 + [12] * 4
    assert sum(engine.within[1:9]) == pytest.approx(0.3 * options.budget)
    final = engine.steered[9:]
    assert {policy for policy, profile in final if profile is None} == {"off"}
    assert {policy for policy, profile in final if profile is not None} == {"default"}
    assert all(each.identity.engine == "vllm" for _, each in final if each is not None)
    profile = load_profile(options.out)
    assert profile.tuned is not None
    assert profile.tuned.kept  # it is half as fast again as the untuned settings
    assert profile.tuned.provenance.engine == "vllm"
    assert set(profile.tuned.workloads) == {"copy", "new"}
    measured = profile.tuned.loads[0].measured
    assert measured is not None
    assert measured.value == pytest.approx(3.0, rel=0.05)
    assert not state_path(options.out).exists()
    assert not trace_path(options.out).exists()


def test_the_untuned_arm_drafts_as_vllm_would_without_a_profile(tmp_path: Path) -> None:
    options, engine = options_in(tmp_path), MadeUpVllm()
    tune(options, engine)
    untuned = next(
        each.tuned.proposers
        for _, each in engine.steered
        if each is not None and each.tuned is not None and not each.tuned.kept
    )
    plain = Pilot(
        AdapterOptions(metrics=False), INFO, None, with_lookups=True, max_requests=2,
        max_tokens=64, max_k=DEFAULT_K, registry=CollectorRegistry(),
    )  # fmt: skip
    assert {each.info.name: each.info.max_k for each in plain.lookups} == {
        name: each.max_k for name, each in untuned.items()
    }
    assert untuned["suffix"].cache_tokens == AdapterOptions().cache_tokens


def test_an_interrupted_run_goes_on_with_what_was_recorded_and_timed(tmp_path: Path) -> None:
    options = options_in(tmp_path)
    assert tune(options, MadeUpVllm(fails_after=12)) == 1
    assert {each.id for each in read_traces([trace_path(options.out)])} == set(CALLS)
    again = MadeUpVllm()
    assert tune(options, again) == 0
    assert all("suffix" not in policy for policy, _ in again.steered)


def test_vllm_starts_with_the_tuned_settings_and_its_lookups_have_them(tmp_path: Path) -> None:
    options = options_in(tmp_path)
    tune(options, MadeUpVllm())
    profile = load_profile(options.out)
    assert profile.tuned is not None
    ngram = ProposerSettings(kind="lookup", max_k=20, min_match=1, max_match=2)
    suffix = LOOKUP_DEFAULTS["suffix"].model_copy(update={"max_k": 12, "cache_tokens": 4096})
    tuning = profile.tuned.model_copy(update={"proposers": {"ngram": ngram, "suffix": suffix}})
    save_profile(options.out, replace(profile, tuned=tuning))
    given_arguments: dict[str, Any] = {"model": "models/m"}
    arguments = configure(given_arguments, profile=options.out)
    assert arguments["speculative_config"]["num_speculative_tokens"] == 20
    given = AdapterOptions(profile=options.out, metrics=False)

    def made(engine: EngineInfo, max_k: int) -> Pilot:
        return Pilot(
            given, engine, None, with_lookups=True, max_requests=2, max_tokens=64, max_k=max_k,
            registry=CollectorRegistry(),
        )  # fmt: skip

    pilot = made(INFO, 16)  # fewer than the n-gram lookup was tuned to
    assert [(each.info.name, each.info.max_k) for each in pilot.lookups] == [
        ("ngram", 16),
        ("suffix", 12),
    ]
    assert pilot.controller.is_warm
    other = made(replace(INFO, dtype="bfloat16"), 16)
    assert not other.controller.is_warm
    assert [each.info.max_k for each in other.lookups] == [16, 16]


def test_a_profile_that_cannot_be_read_leaves_the_arguments_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    for text in (None, "{ damaged"):
        if text is not None:
            path.write_text(text)
        given: dict[str, Any] = {"model": "m"}
        arguments = configure(given, profile=path)
        assert arguments["speculative_config"]["num_speculative_tokens"] == DEFAULT_K


def test_without_vllm_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "vllm" else find(name)
    )
    with pytest.raises(MissingDependency, match=r"autospec-llm\[vllm,tune\]"):
        run_tune(options_in(tmp_path), SILENT)


def test_models_that_draft_and_missing_prompts_are_refused(tmp_path: Path) -> None:
    options, policy = options_in(tmp_path), Settings(version=1)
    with pytest.raises(InputError, match="no --draft"):
        tune_on_vllm(replace(options, draft=Path("d")), policy, None, SILENT)
    with pytest.raises(InputError, match="needs --target and --prompts"):
        tune_on_vllm(replace(options, prompts=None), policy, None, SILENT)
