"""The real server through uvicorn and the ``openai`` client."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import openai
import pytest
import torch
from openai.types.chat import ChatCompletionMessageParam
from prometheus_client.parser import text_string_to_metric_families

from autospec.engine.decoder import Decoder
from autospec.engine.model import CausalModel
from autospec.engine.request import GenerationRequest
from autospec.errors import ProfileError
from autospec.profile.file import load_profile
from autospec.serve.server import (
    PortTaken,
    ServeOptions,
    listen,
    threads_left_to_the_engine,
)
from tests.serve.running import Running, running

PROMPT = "w5 w6 w7 w8 w9"
MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": PROMPT}]


def metric(server: Running, name: str, **labels: str) -> float:
    text = httpx2.get(f"{server.root}/metrics").text
    found = [
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    assert found, f"{name}{labels} is not in /metrics"
    return sum(found)


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < end, "waited for too long"
        time.sleep(0.005)


@pytest.fixture(scope="module")
def expected(folder: Path) -> tuple[str, tuple[int, ...]]:
    """What plain greedy decoding makes of the prompt, without any server."""
    target = CausalModel.load(folder)
    request = GenerationRequest([5, 6, 7, 8, 9], max_tokens=40)
    (output,) = Decoder(target, slots=1, capacity=64).generate([request])
    assert output.text is not None
    return output.text, output.token_ids


def test_models_are_listed(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == "tiny"
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="'big' is not served here; 'tiny' is"):
        client.models.retrieve("big")


def test_health(server: Running) -> None:
    answer = httpx2.get(f"{server.root}/health")
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})


def test_a_chat_is_what_plain_decoding_says(
    client: openai.OpenAI, expected: tuple[str, tuple[int, ...]]
) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=40, temperature=0
    )
    (choice,) = answer.choices
    assert choice.message.content == expected[0]
    assert choice.finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 40)


def test_a_streamed_chat_adds_up_to_the_same(
    client: openai.OpenAI, expected: tuple[str, tuple[int, ...]]
) -> None:
    with client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        max_completion_tokens=40,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"return_token_ids": True},
    ) as stream:
        chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].model_extra is not None
    assert chunks[0].model_extra["prompt_token_ids"] == [5, 6, 7, 8, 9]
    *spoken, usage = chunks
    assert "".join(each.choices[0].delta.content or "" for each in spoken) == expected[0]
    assert [each.choices[0].finish_reason for each in spoken].count("length") == 1
    assert spoken[-1].choices[0].finish_reason == "length"
    ids = [
        token
        for each in spoken
        for token in (each.choices[0].model_extra or {}).get("token_ids", [])
    ]
    assert tuple(ids) == expected[1]
    assert usage.choices == []
    assert usage.usage is not None
    assert usage.usage.completion_tokens == 40


def test_completions_take_text_or_token_ids(
    client: openai.OpenAI, expected: tuple[str, tuple[int, ...]]
) -> None:
    for prompt in (PROMPT, [5, 6, 7, 8, 9], [PROMPT], [[5, 6, 7, 8, 9]]):
        answer = client.completions.create(
            model="tiny", prompt=prompt, max_tokens=40, temperature=0
        )
        assert answer.choices[0].text == expected[0]
    with client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=40, temperature=0, stream=True
    ) as stream:
        chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected[0]
    assert all(chunk.usage is None for chunk in chunks)


def test_stop_strings_end_the_text_before_them(
    client: openai.OpenAI, expected: tuple[str, tuple[int, ...]]
) -> None:
    words = expected[0].split()
    stop = f" {words[12]} {words[13]}"
    cut = expected[0].index(stop)
    for stops in (stop, ["nowhere", stop]):
        answer = client.completions.create(
            model="tiny", prompt=PROMPT, max_tokens=40, temperature=0, stop=stops
        )
        assert answer.choices[0].text == expected[0][:cut]
        assert answer.choices[0].finish_reason == "stop"
    with client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=40, temperature=0, stop=stop, stream=True
    ) as stream:
        assert "".join(chunk.choices[0].text for chunk in stream) == expected[0][:cut]


def test_seeds_repeat_and_temperature_varies(client: openai.OpenAI) -> None:
    def text(seed: int, top_p: float = 1.0) -> str:
        answer = client.completions.create(
            model="tiny", prompt=PROMPT, max_tokens=30, temperature=2, seed=seed, top_p=top_p
        )
        return answer.choices[0].text

    assert text(1) == text(1)
    assert text(1) != text(2)
    assert text(1, 1e-6) == text(2, 1e-6)  # a nucleus of one token is greedy


def test_workloads_are_counted_apart(server: Running, client: openai.OpenAI) -> None:
    for workload in ("edits", "talk"):
        client.chat.completions.create(
            model="tiny",
            messages=MESSAGES,
            max_tokens=12,
            metadata={"workload": workload},
        )
        # The first token comes with the prompt, before anything is decided.
        assert metric(server, "autospec_committed_tokens_total", workload=workload) == 11


def test_many_clients_at_once_get_their_own_answers(client: openai.OpenAI) -> None:
    def ask(number: int) -> str:
        answer = client.completions.create(
            model="tiny", prompt=f"w{number} w{number + 1} w{number}", max_tokens=24, temperature=0
        )
        return answer.choices[0].text

    alone = [ask(number) for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(8))) == alone


def test_a_client_that_hangs_up_cancels_its_request(server: Running, client: openai.OpenAI) -> None:
    def cancelled() -> float:
        return metric(server, "autospec_requests_total", reason="cancelled")

    before = cancelled()
    stream = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=2000, stream=True
    )
    next(iter(stream))
    stream.close()
    wait_until(lambda: cancelled() == before + 1)
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.3).completions.create(
            model="tiny", prompt=PROMPT, max_tokens=2040
        )
    wait_until(lambda: cancelled() == before + 2)
    wait_until(lambda: metric(server, "autospec_engine_running_requests") == 0)
    assert metric(server, "autospec_engine_cache_usage_ratio") == 0.0


def test_a_full_queue_refuses(server: Running, client: openai.OpenAI) -> None:
    most = 4 + 6  # slots and places in the queue
    streams = []
    try:
        for _ in range(most):
            streams.append(
                client.completions.create(model="tiny", prompt=PROMPT, max_tokens=2000, stream=True)
            )
            if len(streams) == 4:
                wait_until(lambda: metric(server, "autospec_engine_running_requests") == 4)
        assert metric(server, "autospec_engine_waiting_requests") == 6
        with pytest.raises(openai.RateLimitError, match="6 requests are waiting already") as full:
            client.completions.create(model="tiny", prompt=PROMPT, max_tokens=5)
        assert full.value.code == "queue_full"
        assert full.value.response.headers["retry-after"] == "1"
    finally:
        for stream in streams:
            stream.close()
    wait_until(lambda: metric(server, "autospec_engine_running_requests") == 0)


@pytest.mark.parametrize(
    "body,status,message",
    [
        ({}, 400, "messages: Field required"),
        ({"messages": []}, 400, "messages: List should have at least 1 item"),
        ({"messages": [{"role": "tool", "content": "x"}]}, 400, "messages.0.role: Input should be"),
        ({"temperature": 3}, 400, "temperature: Input should be less than or equal to 2"),
        ({"top_p": 0}, 400, "top_p: Input should be greater than 0"),
        ({"max_tokens": 0}, 400, "max_tokens: Input should be greater than or equal to 1"),
        ({"max_tokens": 5000}, 400, "the prompt has 5 tokens and 5000 are to be generated"),
        ({"stop": [""]}, 400, "a stop string must hold at least one character"),
        ({"stop": ["x"] * 17}, 400, "17 stop strings; at most 16 are taken"),
        ({"n": 2}, 400, "n is 2; this server takes only 1"),
        ({"tools": [{"type": "function"}]}, 400, "tools is"),
        ({"temprature": 1}, 400, "unknown parameter: temprature"),
        ({"metadata": {"workload": 3}}, 400, "metadata.workload: Input should be a valid string"),
        ({"model": "big"}, 404, "the model 'big' is not served here"),
    ],
)
def test_wrong_requests_are_refused_in_openai_s_form(
    server: Running, body: dict[str, object], status: int, message: str
) -> None:
    sent = {"model": "tiny"} | ({"messages": MESSAGES} if body else {}) | body
    answer = httpx2.post(f"{server.url}/chat/completions", json=sent)
    error = answer.json()["error"]
    assert answer.status_code == status
    assert message in error["message"]
    assert error["type"] == "invalid_request_error"
    assert {"param", "code"} <= error.keys()


def test_other_mistakes_have_the_same_form(server: Running) -> None:
    broken = httpx2.post(
        f"{server.url}/completions", content=b"{", headers={"content-type": "application/json"}
    )
    assert broken.status_code == 400
    assert "the body is not JSON" in broken.json()["error"]["message"]
    nowhere = httpx2.get(f"{server.root}/v2/models")
    assert nowhere.status_code == 404
    assert nowhere.json()["error"]["message"] == "GET /v2/models: Not Found"
    two = {"model": "tiny", "prompt": ["a", "b"]}
    answer = httpx2.post(f"{server.url}/completions", json=two)
    assert "2 prompts; this server takes one a request" in answer.json()["error"]["message"]
    unknown = {"model": "tiny", "prompt": [5, 100_000]}
    answer = httpx2.post(f"{server.url}/completions", json=unknown)
    assert answer.status_code == 400
    assert "the prompt holds token 100000" in answer.json()["error"]["message"]


def test_what_asks_for_nothing_special_is_taken(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny",
        messages=[
            {"role": "developer", "content": "w3"},
            {"role": "user", "content": [{"type": "text", "text": PROMPT}]},
        ],
        max_tokens=1,
        n=1,
        presence_penalty=0,
        user="somebody",
        store=False,
        response_format={"type": "text"},
    )
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 6


def test_what_was_learned_is_saved_at_the_end(folder: Path, tmp_path: Path) -> None:
    profile, journal = tmp_path / "p.json", tmp_path / "j.jsonl"
    options = ServeOptions(folder, slots=2, profile=profile, journal=journal, name="mine")
    with running(options) as one:
        assert not one.service.controller.is_warm
        body = {"model": "mine", "prompt": PROMPT, "max_tokens": 60, "temperature": 0,
                "metadata": {"workload": "loops"}}  # fmt: skip
        assert httpx2.post(f"{one.url}/completions", json=body).status_code == 200
    assert load_profile(profile).workloads["loops"].requests > 0
    assert journal.read_text().count("\n") > 10
    with running(options) as one:
        assert one.service.controller.is_warm


def test_it_serves_where_nothing_can_be_kept(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = ServeOptions(folder, slots=2, profile=tmp_path, journal=tmp_path, name="mine")
    with running(options) as one:
        assert not one.service.controller.is_warm
        body = {"model": "mine", "prompt": PROMPT, "max_tokens": 20, "temperature": 0}
        assert httpx2.post(f"{one.url}/completions", json=body).status_code == 200
        with pytest.raises(ProfileError, match="Is a directory"):
            one.service.controller.save()
        metrics = httpx2.get(f"{one.root}/metrics").text
        assert "autospec_journal_failures_total 1.0" in metrics
    assert caplog.text.count("serving goes on without it (logged once)") == 1  # the save at the end
    assert caplog.text.count("cannot be opened: Is a directory; serving goes on without it") == 1
    registry = one.service.registry
    assert registry.get_sample_value("autospec_fallbacks_total", {"reason": "save"}) == 1.0


def test_a_failing_engine_says_so_and_serves_no_more(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(ServeOptions(folder, slots=2)) as one:

        def fail(self: Decoder) -> None:
            raise RuntimeError("out of memory")

        monkeypatch.setattr(Decoder, "step", fail)
        body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 5}
        answer = httpx2.post(f"{one.url}/completions", json=body)
        assert answer.status_code == 503
        assert "the engine failed: RuntimeError: out of memory" in answer.text
        assert httpx2.get(f"{one.root}/health").status_code == 503
        answer = httpx2.post(f"{one.url}/completions", json=body | {"stream": True})
        assert answer.status_code == 503
        assert one.service.engine.has_failed


def test_an_engine_that_cannot_be_prepared_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(target: CausalModel) -> None:
        raise RuntimeError("no kernel")

    monkeypatch.setattr("autospec.serve.server._warm_up", fail)
    with running(ServeOptions(folder, slots=2)) as one:
        body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 5}
        answer = httpx2.post(f"{one.url}/completions", json=body)
        assert answer.status_code == 503
        assert "the engine failed: RuntimeError: no kernel" in answer.text
        assert one.service.engine.has_failed


def test_the_engine_alone_computes_with_many_threads() -> None:
    before = torch.get_num_threads()
    with threads_left_to_the_engine() as threads:
        assert threads == before
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before


def test_no_token_waits_for_the_one_before_to_be_acknowledged() -> None:
    with listen("127.0.0.1", 0) as port, socket.create_connection(port.getsockname()):
        connection, _ = port.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_taken_port_is_named() -> None:
    with listen("127.0.0.1", 0) as port:
        number = port.getsockname()[1]
        with pytest.raises(PortTaken, match=f"cannot listen on 127.0.0.1:{number}: .*--port"):
            listen("127.0.0.1", number)


def test_the_command_serves_until_it_is_interrupted(folder: Path) -> None:
    command = [str(Path(sys.executable).with_name("autospec")), "serve", "--target", str(folder)]
    command += ["--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            line = ""
            for line in process.stdout:
                if line.startswith("serving tiny at "):
                    break
            url = line.split()[3]
            assert httpx2.get(f"{url}/models").json()["data"][0]["id"] == "tiny"
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 0
