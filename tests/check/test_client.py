"""Servers that are none, or not ones that can be measured."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest

from autospec.check.client import Answer, NoService, ServiceClient, Wanted, checked_url
from autospec.errors import InputError
from autospec.prompts import Message, Prompt

WANTED = Wanted(Prompt("a", "w", (Message("user", "hello"),)), 5, temperature=0.0)
CHUNKS = (
    {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]},
    {"choices": [{"index": 0, "delta": {"content": "one "}}]},
    {"choices": [{"index": 0, "delta": {"content": "two"}, "finish_reason": "length"}]},
    {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2}},
)


class Fake(BaseHTTPRequestHandler):
    """A server whose answers a test chooses."""

    models: ClassVar[Any] = {"data": [{"id": "m"}]}
    refused: tuple[str, ...] = ()
    streams = True
    failing: str | None = None
    bodies: list[dict[str, Any]]

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self._json(200, self.models)
        elif self.path == "/page/models":
            self._json(200, {"hello": 1})
        elif self.path == "/closed/models":
            self._json(401, {"error": {"message": "no key"}})
        else:
            self._json(404, {"detail": "Not Found", "message": "Not Found"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.bodies.append(body)
        for key in self.refused:
            if key in body:
                self._json(400, {"error": {"message": f"unknown parameter {key}"}})
                return
        if not self.streams:
            self._json(200, {"choices": [{"message": {"content": "hello"}}]})
            return
        self.send_response(200)
        self.send_header("content-type", "text/event-stream; charset=utf-8")
        self.end_headers()
        for chunk in CHUNKS:
            self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
        if self.failing is not None:
            self.wfile.write(b'data: {"error": {"message": "out of memory"}}\n\n')
        self.wfile.write(b": a comment\n\ndata: [DONE]\n\n")

    def _json(self, status: int, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def fake() -> Iterator[tuple[str, type[Fake]]]:
    kind = type("Chosen", (Fake,), {"bodies": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), kind)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1", kind
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def asked(url: str, **options: Any) -> Answer:
    async def ask() -> Answer:
        client = ServiceClient(url, **options)
        try:
            await client.find_model()
            return await client.probe(WANTED)
        finally:
            await client.close()

    return asyncio.run(ask())


def test_what_is_heard(fake: tuple[str, type[Fake]]) -> None:
    url, kind = fake
    answer = asked(url)
    sample = answer.sample
    assert (sample.id, sample.workload, sample.error) == ("a", "w", None)
    assert (sample.prompt_tokens, sample.output_tokens) == (7, 2)
    assert len(sample.chunks) == 2  # the role comes before any token
    assert sample.output_token_ids is None
    assert answer.text == "one two"
    (body,) = kind.bodies
    assert body["metadata"] == {"workload": "w"}
    assert body["temperature"] == 0.0
    assert "top_p" not in body


def test_what_a_server_refuses_is_left_out(fake: tuple[str, type[Fake]]) -> None:
    url, kind = fake
    kind.refused = ("return_token_ids", "metadata")
    assert asked(url).sample.error is None
    assert len(kind.bodies) == 3
    assert "stream_options" in kind.bodies[-1]


@pytest.mark.parametrize(
    "change,message",
    [
        ({"streams": False}, "the answer is not streamed .*application/json"),
        ({"refused": ("model",)}, "a first request fails: 400 Bad Request: unknown parameter mod"),
        ({"failing": "yes"}, "a first request fails: .*out of memory"),
        ({"models": {"data": []}}, "name the model with --model; there are: none"),
        ({"models": {"data": [{"id": "a"}, {"id": "b"}]}}, "with --model; there are: a, b"),
    ],
)
def test_what_cannot_be_measured_says_why(
    fake: tuple[str, type[Fake]], change: dict[str, Any], message: str
) -> None:
    url, kind = fake
    for name, value in change.items():
        setattr(kind, name, value)
    with pytest.raises(NoService, match=message):
        asked(url)


def test_wrong_addresses_are_named(fake: tuple[str, type[Fake]]) -> None:
    url, _ = fake
    root = url.removesuffix("/v1")
    with pytest.raises(NoService, match=rf"{root}/models answers 404 .*mostly answer at {url}"):
        asked(root)
    with pytest.raises(NoService, match="does not answer as OpenAI's API does"):
        asked(f"{root}/page")
    with pytest.raises(NoService, match=r"401 Unauthorized: no key; .*--api-key-env"):
        asked(f"{root}/closed")
    with pytest.raises(NoService, match="no model 'x'; there are m"):
        asked(url, model="x")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(NoService, match=f"http://127.0.0.1:{port}/v1/models cannot be reached"):
        asked(f"http://127.0.0.1:{port}/v1")
    with pytest.raises(InputError, match="'localhost:8000' is no http address"):
        checked_url("localhost:8000")
    assert checked_url("http://h:1/v1/?x#y") == "http://h:1/v1"
