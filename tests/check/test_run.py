"""The command as a whole: a real server, a log, folders, and what it refuses."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from autospec.check.client import NoService
from autospec.check.drafting_time import DraftingTime
from autospec.check.run import CheckOptions, numbers, run_check
from autospec.errors import InputError
from autospec.serve.server import ServeOptions
from tests.check.requests import copying, fresh
from tests.serve.running import Running, running

COST = """
shape: packed
step: {fixed_seconds: 0.02, per_token_seconds: 0.0005}
proposers: {ngram: {kind: lookup, step_fraction: 0.01}, suffix: {kind: lookup}}
"""


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    with running(ServeOptions(folder, slots=4, policy="off")) as one:
        yield one


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    rng = np.random.default_rng(2)
    rows = [
        {
            "id": f"p{number}",
            "workload": "even" if number % 2 == 0 else "odd",
            "prompt": " ".join(f"w{word}" for word in rng.integers(0, 96, 40)),
        }
        for number in range(6)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def checked(options: CheckOptions) -> tuple[str, dict[str, Any]]:
    """What is shown, and the JSON."""
    assert options.json_path is not None
    console = Console(file=io.StringIO(), width=200)
    assert run_check(options, console) == 0
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    return shown, json.loads(options.json_path.read_text())


def test_a_live_server(server: Running, prompts: Path, tmp_path: Path) -> None:
    shown, found = checked(
        CheckOptions(
            url=server.url,
            prompts=prompts,
            rates="4,40",
            duration=1.0,
            max_tokens=24,
            ladder="1,2,4",
            temperature="0,1",
            json_path=tmp_path / "c.json",
        )
    )
    assert (found["kind"], found["version"], found["source"]) == ("check", 1, "live")
    low, high = found["levels"]
    assert (low["rate"], high["rate"]) == (4.0, 40.0)
    assert low["prompt_tokens"] == 40.0
    assert low["output_tokens"] == 24.0
    assert low["failed"] == high["failed"] == 0
    assert high["requests"] > low["requests"]
    assert low["server"]["engine"] == "autospec"
    assert low["server"]["tokens_per_step"] is None  # the policy is off
    assert sum(low["shares"].values()) == pytest.approx(1.0)
    assert {each["name"] for each in found["workloads"]} <= {"even", "odd"}
    assert {each["temperature"] for each in found["sensitivity"]} == {0.0, 1.0}
    assert found["step_time"]["source"].startswith("measured on the service")
    assert "ms to a first token by prompt tokens" in found["step_time"]["source"]
    assert "whichever is dearer" in shown
    assert found["verdict"]["sentence"] in shown
    assert "requests/s" in shown


def test_step_times_that_are_given_are_not_measured(
    server: Running, prompts: Path, tmp_path: Path
) -> None:
    cost = tmp_path / "cost.yaml"
    cost.write_text(COST)
    shown, found = checked(
        CheckOptions(
            url=server.url,
            prompts=prompts,
            rates="10",
            duration=0.5,
            max_tokens=8,
            cost=cost,
            json_path=tmp_path / "c.json",
        )
    )
    assert found["step_time"]["source"] == "cost file cost.yaml"
    assert "at once" not in shown
    assert "one by one" not in shown
    assert all(each["at_best"] is None for each in found["speedups"])


def test_one_that_speculates_is_noticed(folder: Path, prompts: Path, tmp_path: Path) -> None:
    with running(ServeOptions(folder, slots=2, policy="static")) as one:
        shown, found = checked(
            CheckOptions(
                url=one.url,
                prompts=prompts,
                rates="10",
                duration=0.6,
                max_tokens=24,
                ladder="none",
                endpoint="completions",
                json_path=tmp_path / "c.json",
            )
        )
    assert found["levels"][0]["server"]["tokens_per_step"] >= 1.0
    assert "speculates already" in shown


def test_a_log_with_a_cost_file(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    rows = []
    for number, request in enumerate([*copying(6), *fresh(2)]):
        start = 100.0 + 3.0 * number
        rows.append(
            {
                "workload": request.workload,
                "prompt_token_ids": request.prompt_token_ids.tolist(),
                "output_token_ids": request.output_token_ids.tolist(),
                "start": start,
                "first_token": start + 0.2,
                "end": start + 4.0,
            }
        )
    log.write_text("\n".join(map(json.dumps, rows)))
    cost = tmp_path / "cost.yaml"
    cost.write_text(COST)
    shown, found = checked(CheckOptions(log=log, cost=cost, json_path=tmp_path / "c.json"))
    assert found["verdict"]["kind"] == "candidate"
    assert found["verdict"]["sentence"].startswith("candidate: suffix, k up to")
    by_name = {each["name"]: each for each in found["workloads"]}
    assert by_name["edit"]["best"]["tokens_per_step"] > 4.0
    assert by_name["story"]["best"]["tokens_per_step"] < 1.1
    (level,) = found["levels"]
    assert 1.0 < level["running"] < 2.0
    assert "edit" in shown
    unknown, found = checked(CheckOptions(log=log, json_path=tmp_path / "c.json"))
    assert found["verdict"]["kind"] == "unknown"
    assert "give a cost file with --cost" in unknown


def test_a_log_with_a_data_sheet(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log.jsonl"
    row = {"prompt": "w1 w2 w3 w4 w1 w2", "output": "w3 w4 w1 w2 w3 w4 w1", "start": 1, "end": 2}
    log.write_text("\n".join(json.dumps(row | {"temperature": number % 2}) for number in range(5)))
    monkeypatch.setattr("autospec.check.run.MOST_TRIED", 4)
    # A step of this tiny model takes less than a microsecond by the data sheet: what looking up
    # takes on the machine of the test would decide.
    monkeypatch.setattr("autospec.check.lookups.drafting_time", lambda *_: DraftingTime(0.0, 0.0))
    options = CheckOptions(log=log, target=folder, device="l4", json_path=tmp_path / "c.json")
    shown, found = checked(options)
    assert found["step_time"]["source"] == "estimated from the data sheet of l4, not measured"
    assert found["verdict"]["kind"] == "candidate"
    assert found["notes"] == [
        "lookups were tried on the last 4 of 5 requests",
        "the log has no first_token times: where the time goes is not known",
    ]
    assert [each["temperature"] for each in found["sensitivity"]] == [0.0, 1.0]
    assert "fits into the 24.00 GB of l4" in shown
    experts = tmp_path / "experts"
    shutil.copytree(folder, experts)
    config = json.loads((experts / "config.json").read_text()) | {"num_local_experts": 8}
    (experts / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"experts: a mixture of experts, .* give a cost file"):
        checked(replace(options, target=experts))


def test_folders_alone_and_with_a_data_sheet(folder: Path, tmp_path: Path) -> None:
    shown, found = checked(
        CheckOptions(target=folder, draft=folder, device="l4", json_path=tmp_path / "c.json")
    )
    assert (found["source"], found["verdict"]) == ("folders", None)
    assert found["folders"]["agreement"]["is_compatible"] is True
    assert found["folders"]["memory"]["fits"] is True
    assert found["folders"]["parameter_ratio"] == 1.0
    assert "tokens agree: all 96 of them" in shown


@pytest.mark.parametrize(
    "options,message",
    [
        ({}, "nothing to check: give --url with --prompts, --log, or --target"),
        ({"url": "http://127.0.0.1:1/v1"}, "--url needs --prompts"),
        ({"url": "ftp://x", "prompts": Path("p")}, "is no http address"),
        ({"url": "http://x/v1", "log": Path("l")}, "give --url or --log, not both"),
        ({"draft": Path("d"), "log": Path("l")}, "--draft needs --target"),
        ({"log": Path("l"), "cost": Path("c"), "profile": Path("p")}, "give one of --cost and"),
        ({"log": Path("none.jsonl")}, r"none\.jsonl: cannot be read"),
        ({"log": Path("l"), "json_path": Path("/no/such/x.json")}, "--json: .* cannot be written"),
    ],
)
def test_what_cannot_be_checked_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        run_check(CheckOptions(**options), Console(file=io.StringIO()))


def test_wrong_loads_are_refused(prompts: Path) -> None:
    for change, message in (
        ({"rates": "1,x"}, "--rates: 'x' is not a number from 0.001 to 10000"),
        ({"rates": "0"}, "--rates: '0' is not"),
        ({"temperature": "3"}, "--temperature: '3' is not a number from 0 to 2"),
        ({"duration": 0.0}, "--duration: 0 s is not from 0 to 3600"),
    ):
        options = CheckOptions(url="http://127.0.0.1:1/v1", prompts=prompts, **change)
        with pytest.raises(InputError, match=message):
            run_check(options, Console(file=io.StringIO()))
    assert numbers("1, 2.5", "--x", least=0, most=9) == (1.0, 2.5)


def test_metrics_that_are_named_must_be_there(server: Running, prompts: Path) -> None:
    options = CheckOptions(
        url=server.url, prompts=prompts, metrics_url=f"{server.root}/nothing", ladder="none"
    )
    with pytest.raises(NoService, match=r"--metrics-url: .*/nothing does not answer"):
        run_check(options, Console(file=io.StringIO()))


def test_checking_needs_no_torch() -> None:
    code = "import autospec.check.run, sys; print(sorted({'torch', 'numba'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "torch" not in done.stdout
