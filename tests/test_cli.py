from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.text import Text
from typer.main import get_command

from autospec import __version__, cli
from autospec.errors import EngineError, MissingDependency, ModelError
from autospec.profile.file import load_profile, save_profile
from autospec.profile.learned import Identity, Profile, WorkloadProfile


class Command:
    """Runs the command line in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self._capsys, self._monkeypatch = capsys, monkeypatch
        self.out = self.err = ""

    def __call__(self, *arguments: str | Path) -> int:
        self._monkeypatch.setattr("sys.argv", ["autospec", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        captured = self._capsys.readouterr()
        self.out, self.err = captured.out, captured.err
        code = caught.value.code
        return code if isinstance(code, int) else 0


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("NO_COLOR", "1")
    return Command(capsys, monkeypatch)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "p.json"
    save_profile(path, make_profile())
    return path


def make_profile(device: str = "cpu", successes: float = 3.0) -> Profile:
    statistics = {"successes": np.full((2, 2), successes), "trials": np.full((2, 2), 4.0)}
    return Profile(
        identity=Identity("llama", ("ngram",), "embedded", "1", device, "bfloat16"),
        acceptance_layout="acceptance/1",
        cost_layout="cost/1",
        workloads={"chat": WorkloadProfile(12.0, {"ngram": statistics})},
        cost={"step": {"gram": np.eye(2)}},
        provenance=("made by a test",),
        updated=1_800_000_000.0,
    )


def test_help_lists_every_command_with_one_line(command: Command) -> None:
    assert command("--help") == 0
    listed = re.findall(r"^│ ([a-z][a-z-]*) +(\S.*\.) +│$", command.out, flags=re.MULTILINE)
    names = {info.name for info in cli.app.app.registered_commands if info.name}
    names |= {
        info.callback.__name__
        for info in cli.app.app.registered_commands
        if info.callback and not info.name
    }
    names |= {str(group.name) for group in cli.app.app.registered_groups}
    assert {name for name, _ in listed} == names


def parameters(command: Any) -> Iterator[Any]:
    for each in getattr(command, "commands", {}).values():
        yield from parameters(each)
    yield from command.params


def test_help_shows_every_word_that_was_written() -> None:
    """Rich takes what is in brackets for its own markup and shows nothing."""
    texts = [each.help for each in parameters(get_command(cli.app.app)) if each.help]
    assert len(texts) > 100
    assert [text for text in texts if Text.from_markup(text).plain != text] == []


def test_defaults_that_are_worked_out_are_told(command: Command) -> None:
    assert command("replay", "--help") == 0
    for default in ("default", "1,8,32,128 without --rate", "one per core"):
        assert f"[default: ({default})]" in command.out


def test_version(command: Command) -> None:
    assert command("--version") == 0
    assert command.out == f"autospec {__version__}\n"


def test_unknown_command_is_wrong_usage(command: Command) -> None:
    assert command("bogus") == 2
    assert "bogus" in command.err


def test_schema_is_json(command: Command) -> None:
    assert command("schema") == 0
    assert json.loads(command.out)["title"] == "AutoSpec policy file"


def test_policy_check(command: Command, tmp_path: Path) -> None:
    assert command("policy", "check", "default") == 0
    assert command.out == "default: good\n"
    bad = tmp_path / "bad.yaml"
    bad.write_text("version: 1\nmax_kk: 3\nguard: {margin: 2}\n")
    assert command("policy", "check", bad) == 2
    assert command.out == ""
    assert f"autospec: {bad}: 2 mistakes" in command.err
    assert "did you mean 'max_k'?" in command.err
    assert "Traceback" not in command.err


def test_policy_check_notes_an_objective_without_a_target(command: Command, tmp_path: Path) -> None:
    policy = tmp_path / "slo.yaml"
    policy.write_text("version: 1\npolicy: {name: goodput, objective: slo}\n")
    assert command("policy", "check", policy) == 0
    assert command.out.splitlines()[1:] == [
        "objective slo without tpot_target_ms: only requests that bring a target of their own "
        "are held to one"
    ]
    assert command("policy", "check", "slo") == 0
    assert command.out == "slo: good\n"


def test_policy_check_shows_settings(command: Command) -> None:
    assert command("policy", "check", "off", "--show") == 0
    assert json.loads(command.out)["policy"] == {"name": "off"}


def test_policy_list(command: Command) -> None:
    assert command("policy", "list") == 0
    names = [line.split()[0] for line in command.out.splitlines()]
    assert {"default", "latency", "off", "slo", "static", "throughput"} <= set(names)


def test_profile_check(command: Command, saved: Path) -> None:
    assert command("profile", "check", saved) == 0
    assert command.out == f"{saved}: good, 1 workloads\n"
    saved.write_text("{")
    assert command("profile", "check", saved) == 2
    assert "not valid JSON" in command.err
    assert command("profile", "check", saved.parent / "none.json") == 2
    assert "cannot be read: No such file" in command.err


def test_profile_show(command: Command, saved: Path) -> None:
    assert command("profile", "show", saved) == 0
    for text in ("llama", "made by a test", "2027-01-15", "chat", "12", "0.750", "0.75 0.75"):
        assert text in command.out


def test_profile_diff(command: Command, saved: Path) -> None:
    other = saved.parent / "other.json"
    save_profile(other, make_profile("cuda", 1.0))
    assert command("profile", "diff", saved, other) == 0
    assert re.search(r"device.*cpu.*cuda", command.out)
    assert re.search(r"chat: ngram.*0\.750.*0\.250", command.out)
    assert "target" not in command.out
    assert command("profile", "diff", saved, saved) == 0
    assert command.out == "no difference\n"


def test_profile_merge(command: Command, saved: Path) -> None:
    out, files = saved.parent / "merged.json", [saved]
    for name in ("second.json", "third.json"):
        files.append(saved.with_name(name))
        save_profile(files[-1], make_profile())
    assert command("profile", "merge", *files, "--out", out) == 0
    assert load_profile(out).workloads["chat"].requests == 36.0


@pytest.mark.parametrize("is_link", [False, True])
def test_profile_merge_takes_no_file_twice(command: Command, saved: Path, is_link: bool) -> None:
    out, again = saved.parent / "merged.json", saved
    if is_link:
        again = saved.with_name("link.json")
        again.symlink_to(saved)
    assert command("profile", "merge", saved, again, "--out", out) == 2
    assert f"{again}: is the same file as {saved}; added to itself" in command.err
    assert not out.exists()


def test_profile_merge_names_what_differs(command: Command, saved: Path) -> None:
    other = saved.parent / "other.json"
    save_profile(other, make_profile("cuda"))
    out = saved.parent / "merged.json"
    assert command("profile", "merge", saved, other, "-o", out) == 2
    assert f"{other}: profile does not fit: device is 'cuda', expected 'cpu'" in command.err
    assert not out.exists()


def test_a_missing_extra_says_what_to_install(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    importlib.import_module("autospec.bench.command")  # transformers remembers that torch was there
    monkeypatch.setitem(sys.modules, "torch", None)
    for module in ("autospec.bench.command", "autospec.engine.model"):
        monkeypatch.delitem(sys.modules, module)
    assert command("bench", "--target", "x", "--prompts", "y") == 1
    assert "torch is not installed: pip install 'autospec-llm[engine]'" in command.err


@pytest.mark.parametrize(
    "arguments,message",
    [
        (["--loads", "1,x"], "--loads: 'x' is not a number of requests"),
        (["--arms", "plain,bogus:4"], "bogus"),
        (["--rounds", "0"], "--rounds"),
        (["--policy", "defualt"], "did you mean 'default'?"),
    ],
)
def test_bench_refuses_wrong_options_before_it_loads_a_model(
    command: Command, tmp_path: Path, arguments: list[str], message: str
) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"id": "a", "workload": "chat", "prompt": "hi"}\n')
    assert command("bench", "--target", tmp_path, "--prompts", prompts, *arguments) == 2
    assert message in command.err


def test_bench_refuses_a_folder_without_a_model(command: Command, tmp_path: Path) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"id": "a", "workload": "chat", "prompt": "hi"}\n')
    assert command("bench", "--target", tmp_path, "--prompts", prompts) == 2
    assert str(tmp_path) in command.err


def test_bench_needs_target_and_prompts(command: Command) -> None:
    assert command("bench") == 2
    assert "--target" in command.err


@pytest.mark.parametrize(
    "error,code",
    [
        (EngineError("out of memory"), 1),
        (MissingDependency("install torch"), 1),
        (ModelError("no model here"), 2),
        (RuntimeError("surprise"), 1),
    ],
)
def test_errors_are_one_message_and_an_exit_code(
    command: Command, monkeypatch: pytest.MonkeyPatch, error: Exception, code: int
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr("autospec.config.settings_schema", fail)
    assert command("schema") == code
    assert str(error) in command.err
    assert command.err.count("\n") == 1


def test_a_fault_shows_its_place_when_asked(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(cli.app.TRACEBACK_VARIABLE, "1")
    monkeypatch.setattr("autospec.config.settings_schema", lambda: 1 / 0)
    monkeypatch.setattr("sys.argv", ["autospec", "schema"])
    with pytest.raises(ZeroDivisionError):
        cli.main()


def test_warm_up_compiles_for_any_policy(command: Command) -> None:
    assert command("warm-up") == 0
    assert "compiled" in command.out
    assert command("warm-up", "--policy", "nobody.yaml") == 2
