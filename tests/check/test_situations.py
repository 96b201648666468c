"""Three made situations on the real server, and the verdict that each of them should get.

The model sees its last token alone. Greedily it runs into circles, which lookups copy; at
temperature 2 they are right now and then. Verdicts rest on ratios that the situation
makes large, not on times: on a busy machine everything takes longer together.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from autospec.check.run import CheckOptions, run_check
from autospec.serve.server import ServeOptions
from tests.serve.running import Running, running, save_tiny_model

SLOTS = 48
CONTEXT = 1024


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    path = tmp_path_factory.mktemp("situations") / "circling"
    save_tiny_model(path, hidden=256, layers=4, attends=False)
    with running(ServeOptions(path, policy="off", slots=SLOTS, context=CONTEXT)) as one:
        yield one


def verdict(options: CheckOptions, folder: Path, prompts: list[dict[str, Any]]) -> dict[str, Any]:
    """What the check says, in its JSON."""
    path = folder / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, prompts)))
    out = folder / "check.json"
    run_check(replace(options, prompts=path, json_path=out), Console(file=io.StringIO(), width=160))
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def words(count: int, seed: int) -> str:
    return " ".join(f"w{word}" for word in np.random.default_rng(seed).integers(0, 96, count))


def test_long_prompts_and_five_tokens_are_not_yet(server: Running, tmp_path: Path) -> None:
    prompts = [
        {"id": f"long-{number}", "prompt": words(900, number), "max_tokens": 5}
        for number in range(4)
    ]
    found = verdict(
        CheckOptions(url=server.url, rates="1", duration=3.0, ladder="1"), tmp_path, prompts
    )
    assert found["verdict"]["kind"] == "not-yet-prefill"
    assert "of the time is before the first token" in found["verdict"]["sentence"]
    assert found["levels"][0]["shares"]["decode"] < 0.4


def test_repetitive_output_at_low_load_is_a_candidate(server: Running, tmp_path: Path) -> None:
    prompts = [
        {"id": f"edit-{number}", "workload": "code-edit", "prompt": words(20, 50 + number)}
        for number in range(6)
    ]
    found = verdict(
        CheckOptions(url=server.url, rates="2", duration=2.5, max_tokens=100, ladder="1,4,16"),
        tmp_path,
        prompts,
    )
    assert found["verdict"]["kind"] == "candidate", (found["verdict"], found["step_time"])
    assert ", k up to " in found["verdict"]["sentence"]
    assert found["speedups"][0]["speedup"] > 1.3
    (workload,) = found["workloads"]
    assert workload["repetitiveness"] > 0.5


def test_a_saturated_service_is_off_above(server: Running, tmp_path: Path) -> None:
    prompts = [
        {"id": f"chat-{number}", "prompt": words(3, 100 + number), "temperature": 2.0}
        for number in range(64)
    ]
    found = verdict(
        CheckOptions(
            url=server.url,
            rates="400",
            duration=4.0,
            most_requests=64,
            max_tokens=128,
            ladder="1,4,16,48",
        ),
        tmp_path,
        prompts,
    )
    # Whether the few right drafts pay at one running request is a matter of this machine's step
    # times: "no" if not even there. Here, with all slots taken, they never do.
    assert found["verdict"]["kind"] in ("off-above", "no"), found["verdict"]
    assert found["crossover"]["off_from"] <= found["levels"][0]["running"]
    assert found["levels"][0]["server"]["waiting"] > 0
