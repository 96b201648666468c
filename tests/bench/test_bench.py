"""``autospec bench`` on a tiny random model: the JSON form, warm starts, refusals, interrupts."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from autospec.bench import command
from autospec.bench.arms import Arm, ArmInputs, ArmSpec, encode, parse_arms
from autospec.bench.command import BenchOptions, bench_phases, parse_loads, run_bench
from autospec.bench.comparison import Comparison, Outcome, compare
from autospec.bench.serving import Served, Serving, StepView
from autospec.config import load_settings
from autospec.engine.model import CausalModel
from autospec.engine.request import GenerationRequest
from autospec.errors import ConfigError, InputError, ModelError
from autospec.prompts import Message, Prompt, read_prompts
from autospec.proposers.mlp_folder import write_shared
from autospec.proposers.mlp_network import SharedLayout, SharedNetwork
from tests.word_folders import save_untrained

CONTEXT = 96


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that knows sixty words and was never trained."""
    path = tmp_path_factory.mktemp("model")
    save_untrained(path, CONTEXT)
    return path


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    rows = [
        {"id": "a", "workload": "copy", "prompt": "w5 w6 w7 w8 w5 w6 w7 w8 w5 w6"},
        {"id": "b", "workload": "copy", "turns": ["w9 w10 w9 w10 w9", "w3"]},
        {"id": "c", "workload": "chat", "prompt": "w30 w12 w44", "max_tokens": 5},
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def options(folder: Path, prompts: Path, tmp_path: Path) -> BenchOptions:
    return BenchOptions(
        target=folder,
        prompts=prompts,
        loads=(1, 2),
        arms="plain,ngram:2,adaptive",
        json_path=tmp_path / "out.json",
        max_tokens=9,
        rounds=2,
        dtype="float64",
    )


def run(options: BenchOptions, *, terminal: bool = False) -> tuple[int, str]:
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=terminal, width=110, highlight=False)
    code = run_bench(options, console)
    return code, shown.getvalue()


def figures(options: BenchOptions) -> dict[str, Any]:
    assert options.json_path is not None
    found: dict[str, Any] = json.loads(options.json_path.read_text(encoding="utf-8"))
    return found


def test_the_json_form(options: BenchOptions, tmp_path: Path) -> None:
    code, shown = run(options)
    assert code == 0
    found = figures(options)
    assert [(phase["workload"], phase["load"]) for phase in found["phases"]] == [
        ("copy", 1),
        ("chat", 1),
        ("copy", 2),
        ("chat", 2),
    ]
    for phase in found["phases"]:
        assert list(phase["arms"]) == ["plain", "ngram:2", "adaptive"]
        per_request = 5 if phase["workload"] == "chat" else 9
        for name, arm in phase["arms"].items():
            own = 2 * phase["load"] * per_request  # two rounds
            if name == "plain" or phase["load"] == 1:  # nothing ends before the last one
                assert arm["tokens"] == own
            else:
                assert own <= arm["tokens"] < 2 * own
            assert arm["tokens_per_second"] == pytest.approx(
                arm["tokens"] / arm["seconds"], rel=0.05
            )
            assert arm["outputs_equal_to_plain"] == arm["requests"] == 2 * phase["load"]
            assert len(arm["rounds"]) == 2
        assert phase["arms"]["plain"]["acceptance_length"] == 1.0
        assert phase["arms"]["plain"]["choices"] == []
        assert all(
            choice["k"] <= 2 and choice["proposer"] in ("ngram", "off")
            for choice in phase["arms"]["ngram:2"]["choices"]
        )
    assert found["total"]["plain"]["tokens"] == 2 * (9 + 5) + 4 * (9 + 5)
    assert found["machine"]["cores"] >= 1
    assert set(found["versions"]) >= {"autospec", "torch", "transformers", "python"}
    assert found["settings"]["arms"] == ["plain", "ngram:2", "adaptive"]
    assert found["settings"]["loads"] == [1, 2]
    assert "T" in found["date"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.json", "prompts.jsonl"]
    for expected in ("phase 3: load 2, copy", "total: all phases", "x the speed of plain"):
        assert expected in shown
    assert "outputs are those of plain decoding token for token" in shown


def test_the_second_run_starts_warm_and_says_so(options: BenchOptions, tmp_path: Path) -> None:
    options = replace(
        options,
        loads=(1,),
        rounds=1,
        profile=tmp_path / "profile.json",
        journal=tmp_path / "journal.jsonl",
    )
    _, shown = run(options)
    assert f"cold start: no profile that fits in {options.profile}" in shown
    assert f"profile saved in {options.profile}" in shown
    assert f"journal saved in {options.journal}" in shown
    assert figures(options)["settings"]["warm_start_requests"] is None
    _, shown = run(options)
    assert f"warm start from {options.profile}: learned on 2 requests of chat, copy" in shown
    assert figures(options)["settings"]["warm_start_requests"] == pytest.approx(2, abs=0.01)
    _, shown = run(options)
    assert "learned on 4 requests" in shown


def test_a_profile_of_something_else_is_left_alone(
    options: BenchOptions, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = replace(options, loads=(1,), rounds=1, profile=tmp_path / "profile.json")
    assert options.profile is not None
    run(options)
    saved = options.profile.read_text(encoding="utf-8").replace("float64", "float32")
    options.profile.write_text(saved, encoding="utf-8")
    code, shown = run(options)
    assert code == 0
    assert f"cold start: no profile that fits in {options.profile}" in shown
    (own,) = tmp_path.glob("profile.*.json")
    assert f"profile saved in {own}" in shown
    assert "dtype is 'float32'" in caplog.text
    assert options.profile.read_text(encoding="utf-8") == saved
    assert figures(options)["files"]["profile"] == str(own)
    _, shown = run(options)
    assert f"warm start from {own}" in shown


def test_a_machine_too_slow_skips_rounds_but_no_phase(
    options: BenchOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hurried(comparison: Comparison, console: Console) -> Outcome:
        return compare(replace(comparison, budget_seconds=0.0), console)

    monkeypatch.setattr(command, "compare", hurried)
    run(options)
    assert [phase["rounds"] for phase in figures(options)["phases"]] == [1, 1, 1, 1]


def test_a_terminal_gets_a_live_panel(
    options: BenchOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autospec.bench.live._REFRESH_SECONDS", 0.0)
    _, shown = run(replace(options, mix=True, rounds=1), terminal=True)
    assert "workload copy+chat" in shown.replace("\x1b[1m", "").replace("\x1b[0m", "")
    assert "who drafts" in shown
    assert "  adaptive" in shown


def test_an_interrupt_keeps_the_finished_rounds(
    options: BenchOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = 0
    end, step = Serving.end, Serving.step

    def counted(self: Serving) -> Served:
        nonlocal ended
        ended += 1
        return end(self)

    def interrupted(self: Serving) -> StepView:
        if ended == 2 + 3:  # two warm-ups and one round; the arms are at the next one
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(Serving, "end", counted)
    monkeypatch.setattr(Serving, "step", interrupted)
    code, shown = run(options)
    assert code == 1
    assert "interrupted: the figures above are those of the finished rounds" in shown
    assert [phase["rounds"] for phase in figures(options)["phases"]] == [1, 0, 0, 0]
    ended = 3
    code, shown = run(options)
    assert code == 1
    assert "nothing to show" in shown


def test_the_load_is_held_and_never_exceeded(folder: Path) -> None:
    target = CausalModel.load(folder, dtype="float64")
    arm = Arm(ArmSpec("plain"), ArmInputs(target, None, 4, 32, 0), load_settings("default"))
    seen: list[int] = []
    requests = [
        GenerationRequest([4, 5, 6], max_tokens=4 + number, id=f"r{number}", ignore_eos=True)
        for number in range(5)
    ]
    serving = arm.begin(requests, 2)
    shares = []
    while not serving.is_over:
        serving.step()
        seen.append(arm.decoder.running_requests)
        shares.append(serving.share)
    served = serving.end()
    assert shares == sorted(shares)
    assert shares[0] == pytest.approx(2 / 30)
    assert shares[-1] == 1.0
    assert max(seen) <= 2
    assert [len(output) for output in served.outputs] == [4, 5, 6, 7, 8]
    # One place serves r0, r2 and r4 in steps 1 to 18, the other r1 and r3 in 1 to 12, and then
    # r0 again, 4 tokens, and 2 of r1's.
    assert len(seen) == 18
    assert served.result.requests == 5
    assert served.result.tokens == 30 + 6
    assert served.result.request_steps == 36 - 7
    assert not arm.decoder.has_work


def test_a_folder_that_is_no_model(options: BenchOptions, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"none: expected a model folder, found nothing"):
        run(replace(options, target=tmp_path / "none"))
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        run(replace(options, target=tmp_path))


def test_a_prompt_longer_than_the_context(options: BenchOptions) -> None:
    with pytest.raises(InputError) as caught:
        run(replace(options, max_tokens=CONTEXT))
    assert str(caught.value) == (
        f"{options.prompts}: prompt 'a' has 10 tokens and is to be continued by {CONTEXT}; "
        f"the model's context is {CONTEXT}"
    )


def test_wrong_options_are_refused_before_a_model_is_loaded(
    options: BenchOptions, tmp_path: Path
) -> None:
    nowhere = replace(options, target=tmp_path / "never-looked-at")
    with pytest.raises(InputError, match="no prompts of workload 'math'; there are copy, chat"):
        run(replace(nowhere, workloads=("math",)))
    with pytest.raises(InputError, match=r"--json: .*missing/out\.json cannot be written"):
        run(replace(nowhere, json_path=tmp_path / "missing" / "out.json"))
    with pytest.raises(ConfigError, match="unknown policy file 'defalt'"):
        run(replace(nowhere, policy="defalt"))


def test_arms_of_a_list() -> None:
    assert parse_arms("plain, ngram:04,draft_model:2 ,adaptive", has_draft=True) == (
        ArmSpec("plain"),
        ArmSpec("ngram:4", "ngram", 4),
        ArmSpec("draft_model:2", "draft_model", 2),
        ArmSpec("adaptive"),
    )


@pytest.mark.parametrize(
    "text,message",
    [
        (",", "--arms is empty; allowed are plain, ngram:K"),
        ("fast", "unknown arm 'fast'"),
        ("ngram", "unknown arm 'ngram'"),
        ("eagles:3", "unknown arm 'eagles:3'"),
        ("eagle:3", "'eagle:3' needs a head; give its folder with --head (none was given)"),
        ("ngram:0", "k is '0'; it must be from 1 to 32"),
        ("ngram:x", "k is 'x'"),
        ("ngram:4,plain,ngram:4", "'ngram:4' is named twice"),
        ("draft_model:2", "needs a draft model; give its folder with --draft"),
        ("suffix_after:6", "needs a head or a draft model; give --head or --draft"),
    ],
)
def test_wrong_arms(text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_arms(text, has_draft=False)
    assert message in str(caught.value)


def test_a_suffix_needs_a_place_behind_the_head() -> None:
    with pytest.raises(InputError, match=r"'suffix_after:2': k must be above 2, the head's part"):
        parse_arms("suffix_after:2", has_draft=True)


@pytest.mark.parametrize("name", ["early_exit:3", "lookahead:3", "suffix_after:6"])
def test_arms_that_draft_with_the_target_or_behind_a_model(folder: Path, name: str) -> None:
    requests = [GenerationRequest([4, 5, 6], 12, id=f"r{n}", ignore_eos=True) for n in range(2)]
    target = CausalModel.load(folder, dtype="float64")
    inputs = ArmInputs(target, CausalModel.load(folder, dtype="float64"), 2, 32, 0)
    settings = load_settings("default")
    expected = Arm(ArmSpec("plain"), inputs, settings).serve(requests, 2)
    (spec,) = parse_arms(name, has_draft=True)
    served = Arm(spec, inputs, settings).serve(requests, 2)
    assert served.outputs == expected.outputs
    assert served.result.drafted > 0


def test_adaptive_may_go_on_behind_a_model(folder: Path) -> None:
    """The composite shares the model and the lookup that are there anyway."""
    requests = [GenerationRequest([4, 5, 6], 20, id=f"r{n}", ignore_eos=True) for n in range(2)]
    target = CausalModel.load(folder, dtype="float64")
    draft = CausalModel.load(folder, dtype="float64")
    inputs = ArmInputs(target, draft, 2, 32, 0, appended=True)
    settings = load_settings("default")
    arm = Arm(ArmSpec("adaptive"), inputs, settings)
    assert arm.controller is not None
    infos = {info.name: info for info in arm.controller.proposers}
    assert list(infos) == ["ngram", "suffix", "draft_model", "suffix_after"]
    assert (infos["suffix_after"].head, infos["suffix_after"].head_k) == ("draft_model", 2)
    expected = Arm(ArmSpec("plain"), inputs, settings).serve(requests, 2)
    assert arm.serve(requests, 2).outputs == expected.outputs


def head_for(target: Path, folder: Path) -> Path:
    """A head of AutoSpec's own that was never trained."""
    torch.manual_seed(1)
    model = CausalModel.load(target)
    network = SharedNetwork(SharedLayout(model.hidden_size, 8))
    write_shared(folder, network, torch.arange(40), model, 4, {})
    return folder


def test_heads_are_arms_too_and_part_of_the_adaptive_one(
    options: BenchOptions, tmp_path: Path
) -> None:
    head = head_for(options.target, tmp_path / "head")
    asked = replace(
        options, heads=(head,), arms="plain,mlp_speculator:2,adaptive", profile=tmp_path / "p.json"
    )
    code, shown = run(asked)
    assert code == 0
    assert "head: mlp_speculator, 0.0 MB" in shown
    assert "keeps 0.00 MB for " in " ".join(shown.split())
    found = figures(options)
    assert found["settings"]["heads"] == ["head"]
    for phase in found["phases"]:
        static = phase["arms"]["mlp_speculator:2"]
        assert static["outputs_equal_to_plain"] == static["requests"]
        assert static["drafted"] > 0
        assert {each["proposer"] for each in static["choices"]} <= {"mlp_speculator", "off"}
    profile = json.loads((tmp_path / "p.json").read_text())
    assert profile["identity"]["proposers"] == ["mlp_speculator", "ngram", "suffix"]


def test_heads_that_do_not_fit(options: BenchOptions, tmp_path: Path) -> None:
    head = head_for(options.target, tmp_path / "head")
    with pytest.raises(InputError, match="are both mlp_speculator; give one of a kind"):
        run(replace(options, heads=(head, head)))
    with pytest.raises(InputError, match=r"needs a head; .* \(those given are of mlp_speculator\)"):
        run(replace(options, heads=(head,), arms="medusa:2"))
    with pytest.raises(ModelError, match=r"max_k is 9; .* drafts from 1 to 4 tokens"):
        run(replace(options, heads=(head,), arms="mlp_speculator:9"))


def test_loads() -> None:
    assert parse_loads("1, 4,16") == (1, 4, 16)
    for text in ("", "1,,2", "0", "-1", "2000", "four"):
        with pytest.raises(InputError, match="--loads"):
            parse_loads(text)


def test_phases_are_loads_by_workloads(options: BenchOptions) -> None:
    read = read_prompts(options.prompts)
    mixed = bench_phases(replace(options, mix=True, requests=5), read)
    assert [(phase.load, phase.workload, phase.requests) for phase in mixed] == [
        (1, "copy+chat", 5),
        (2, "copy+chat", 5),
    ]
    one = bench_phases(replace(options, workloads=("chat",)), read)
    assert [(phase.load, phase.workload, phase.requests) for phase in one] == [
        (1, "chat", 1),
        (2, "chat", 2),
    ]


def test_prompts_go_through_the_chat_template(folder: Path) -> None:
    target = CausalModel.load(folder)
    prompt = Prompt("p", "chat", (Message("user", "w7 w8"), Message("assistant", "w9")))
    assert encode(prompt, target, Path("p.jsonl")) == [7, 8, 9]
    assert target.tokenizer is not None
    target.tokenizer.chat_template = (
        "{% for m in messages %}w50 {{ m.content }} {% endfor %}"
        "{% if add_generation_prompt %}w51{% endif %}"
    )
    assert encode(prompt, target, Path("p.jsonl")) == [50, 7, 8, 50, 9, 51]
    target.tokenizer.chat_template = "{{ raise_exception('no assistant first') }}"
    with pytest.raises(InputError, match="prompt 'p' does not fit the chat template: no assistant"):
        encode(prompt, target, Path("p.jsonl"))
