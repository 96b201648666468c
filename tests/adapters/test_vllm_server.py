"""The real server: streams, labels on /metrics, a profile that survives, faults nobody sees."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from autospec.adapters.vllm.exposition import FOLDER_VARIABLE
from autospec.engine.demo_model import demo_model_path
from autospec.profile.file import load_profile
from autospec.prompts import Prompt, read_prompts

openai = pytest.importorskip("openai")

MODEL = demo_model_path()
pytestmark = [
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.skipif(MODEL is None, reason="the demo's model is not there: run `make model`"),
    pytest.mark.filterwarnings("default"),  # the client library's own
]

WORKLOADS = ("code-edit", "rag", "chat")
REQUESTS = 32
MAX_TOKENS = 24
START_SECONDS = 900.0  # compiles AutoSpec, maybe on a busy machine
STOP_SECONDS = 60.0

FAULTY = '''
"""A scheduler whose policy raises in every third step, and whose pilot does at times."""

from autospec.adapters.vllm import AutoSpecScheduler


class FaultyScheduler(AutoSpecScheduler):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        pilot = self.steering.pilot
        print(f"started warm: {pilot.controller.is_warm}", flush=True)
        pilot.controller.policy.program = lambda *_: None
        _break(pilot.controller.policy, "decide", 3)
        _break(pilot, "note", 7)
        _break(pilot, "learn", 5)
        _break(pilot, "plan", 11)


def _break(owner, name, every):
    call = getattr(owner, name)
    calls = 0

    def broken(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls % every == 0:
            raise RuntimeError(f"injected into {name}")
        return call(*args, **kwargs)

    object.__setattr__(owner, name, broken)
'''


@dataclass(frozen=True, slots=True)
class Answer:
    """A streamed answer: its chunks' text and why it ended."""

    text: str
    chunks: int
    tokens: int
    finish_reason: str | None


@dataclass(slots=True)
class Server:
    """A running API server; ``log`` is what it printed."""

    url: str
    process: subprocess.Popen[bytes]
    log_path: Path

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def get(self, path: str) -> str:
        """The body of a page."""
        with urllib.request.urlopen(self.url + path, timeout=30) as answer:
            body: bytes = answer.read()
        return body.decode()

    def metrics(self, name: str) -> dict[tuple[tuple[str, str], ...], float]:
        """A metric's samples by their labels."""
        return {
            tuple(sorted(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(self.get("/metrics"))
            for sample in family.samples
            if sample.name == name
        }

    def terminate(self) -> None:
        """SIGTERM, as an orchestrator sends it."""
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(STOP_SECONDS)


@contextmanager
def serving(
    folder: Path, name: str, scheduler: str | None, options: dict[str, Any]
) -> Iterator[Server]:
    """A server with n-gram speculation, steered by ``scheduler``."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    arguments = {
        "model": str(MODEL),
        "served-model-name": "smollm2",
        "host": "127.0.0.1",
        "port": str(port),
        "dtype": "float32",
        "max-model-len": "1024",
        "max-num-seqs": str(REQUESTS),
        "speculative-config": json.dumps(
            {
                "method": "ngram",
                "num_speculative_tokens": 6,
                "prompt_lookup_max": 3,
                "prompt_lookup_min": 2,
            }
        ),
    }
    if scheduler is not None:
        arguments["scheduler-cls"] = scheduler
        arguments["additional-config"] = json.dumps({"autospec": options})
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
    for key, value in arguments.items():
        command += [f"--{key}", value]
    environment = {key: value for key, value in os.environ.items() if key != FOLDER_VARIABLE} | {
        "PYTHONPATH": str(folder),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    log_path = folder / f"{name}.log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env=environment, start_new_session=True
        )
    server = Server(f"http://127.0.0.1:{port}", process, log_path)
    try:
        _await_ready(server)
        yield server
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _await_ready(server: Server) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            pytest.fail(f"the server ended:\n{server.log[-4000:]}")
        try:
            server.get("/health")
            return
        except OSError:
            time.sleep(0.5)
    pytest.fail(f"the server was not ready in {START_SECONDS:.0f} s:\n{server.log[-4000:]}")


def _prompts() -> list[Prompt]:
    """32 prompts of the three workloads in turn, none of them twice."""
    import autospec

    own = read_prompts(Path(autospec.__file__).parent / "demo_prompts.jsonl")
    groups = [[prompt for prompt in own if prompt.workload == name] for name in WORKLOADS]
    return [
        group[turn]
        for turn in range(max(map(len, groups)))
        for group in groups
        if turn < len(group)
    ][:REQUESTS]


async def _stream(client: Any, prompt: Prompt) -> Answer:
    text, chunks, tokens, reason = "", 0, 0, None
    stream = await client.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": prompt.text}],
        max_tokens=MAX_TOKENS,
        temperature=0.0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"vllm_xargs": {"autospec_workload": prompt.workload}},
    )
    async for chunk in stream:
        if chunk.usage is not None:
            tokens = chunk.usage.completion_tokens
        for choice in chunk.choices:
            text += choice.delta.content or ""
            chunks += 1
            reason = choice.finish_reason or reason
    return Answer(text, chunks, tokens, reason)


def ask(server: Server, prompts: Sequence[Prompt]) -> list[Answer]:
    """All prompts at once, streamed."""

    async def run() -> list[Answer]:
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300.0
        ) as client:
            return list(await asyncio.gather(*(_stream(client, each) for each in prompts)))

    return asyncio.run(run())


def assert_complete(answers: Sequence[Answer]) -> None:
    """Every answer ended by itself, with all the tokens that it should have."""
    assert len(answers) == REQUESTS
    for answer in answers:
        assert answer.finish_reason in ("stop", "length")
        assert answer.text
        assert answer.chunks > 1
        assert answer.tokens == MAX_TOKENS or answer.finish_reason == "stop"


def test_a_server_learns_by_label_and_remembers_and_faults_cost_no_answer(tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    options = {"policy": "default", "profile": str(profile)}
    (tmp_path / "faulty_scheduler.py").write_text(FAULTY)
    prompts = _prompts()

    with serving(tmp_path, "first", "autospec.adapters.vllm.AutoSpecScheduler", options) as server:
        answers = ask(server, prompts)
        assert_complete(answers)
        time.sleep(1.5)  # samples reach the API server twice a second
        committed = server.metrics("autospec_committed_tokens_total")
        by_label = {dict(labels)["workload"]: value for labels, value in committed.items()}
        for name in WORKLOADS:
            asked = [a.tokens for a, p in zip(answers, prompts, strict=True) if p.workload == name]
            # A request's first token comes from its prompt, not from a step.
            assert sum(asked) - len(asked) * 2 <= by_label[name] <= sum(asked)
        assert not server.metrics("autospec_fallbacks_total")
        assert server.get("/metrics").count("# TYPE autospec_committed_tokens_total counter") == 1
        server.terminate()
    assert server.process.returncode == 0, server.log[-4000:]
    assert set(WORKLOADS) <= set(load_profile(profile).workloads)
    saved = profile.stat().st_mtime_ns

    with serving(tmp_path, "second", "faulty_scheduler.FaultyScheduler", options) as server:
        assert "started warm: True" in server.log
        again = ask(server, prompts)
        assert_complete(again)
        time.sleep(1.5)
        faults = server.metrics("autospec_fallbacks_total")
        assert len(faults) >= 4, faults
        assert server.log.count("injected into decide") == 1  # logged once, with its traceback
        server.terminate()
    assert server.process.returncode == 0, server.log[-4000:]
    assert profile.stat().st_mtime_ns > saved
    # float32: but for a rare tie, speculation and faults leave the greedy answers as they were.
    equal = sum(one.text == other.text for one, other in zip(answers, again, strict=True))
    assert equal >= REQUESTS - 2
