"""A streaming client of an OpenAI-compatible server, and what is wrong with one that is none."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit, urlunsplit

import httpx2

from autospec.check.samples import Sample
from autospec.errors import EngineError, InputError
from autospec.prompts import Prompt

Endpoint = Literal["chat", "completions"]

CONNECT_SECONDS = 5.0
_PATHS: Mapping[Endpoint, str] = {"chat": "chat/completions", "completions": "completions"}
_ERROR_CHARACTERS = 300


class NoService(EngineError):
    """The server cannot be reached, or is not one that can be measured."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """One request to be sent. ``temperature`` and ``top_p`` None leave them to the server."""

    prompt: Prompt
    max_tokens: int
    temperature: float | None = None
    top_p: float | None = None
    ignore_eos: bool = False


@dataclass(slots=True)
class _Heard:
    chunks: list[float] = field(default_factory=list)
    prompt_ids: list[int] | None = None
    output_ids: list[int] | None = None
    text: list[str] = field(default_factory=list)
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    finished: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """What was seen of one request; the text is tokenized later where ids are not told."""

    sample: Sample
    text: str


class ServiceClient:
    """Sends requests and notes when each part of the answer came.

    Token ids are asked for in vLLM's way (``return_token_ids``) and token counts in OpenAI's; what
    a server refuses is left out from then on.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        endpoint: Endpoint = "chat",
        timeout_seconds: float = 120.0,
        most_connections: int = 1024,
    ) -> None:
        self.url = checked_url(url)
        self.model = model or ""
        self.endpoint: Endpoint = endpoint
        self._extras: dict[str, Any] = {
            "return_token_ids": True,
            "stream_options": {"include_usage": True},
            "metadata": {},
        }
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx2.AsyncClient(
            headers=headers,
            timeout=httpx2.Timeout(timeout_seconds, connect=CONNECT_SECONDS),
            limits=httpx2.Limits(max_connections=most_connections),
            trust_env=False,
        )

    async def close(self) -> None:
        """Close every connection."""
        await self._http.aclose()

    async def find_model(self) -> str:
        """The only model that is served, or the one that was named. Raises NoService."""
        response = await self._get(f"{self.url}/models")
        if response.status_code != 200:
            raise NoService(
                f"{self.url}/models answers {_status(response)}{_hint(self.url, response)}"
            )
        try:
            names = [str(each["id"]) for each in response.json()["data"]]
        except (ValueError, KeyError, TypeError):
            raise NoService(
                f"{self.url}/models does not answer as OpenAI's API does; the address must be that "
                "of an OpenAI-compatible server, such as http://host:8000/v1"
            ) from None
        if self.model and self.model not in names:
            raise NoService(f"{self.url}: no model {self.model!r}; there are {', '.join(names)}")
        if not self.model and len(names) != 1:
            found = ", ".join(names) or "none"
            raise NoService(f"{self.url}: name the model with --model; there are: {found}")
        self.model = self.model or names[0]
        return self.model

    async def probe(self, wanted: Wanted) -> Answer:
        """One request before the load, to learn what the server takes. Raises NoService."""
        for _ in range(len(self._extras) + 1):
            answer = await self.send(wanted)
            if answer.sample.error is None:
                return answer
            refused = [key for key in self._extras if key in answer.sample.error]
            if not refused:
                break
            for key in refused:
                del self._extras[key]
        raise NoService(f"{self.url}: a first request fails: {answer.sample.error}")

    async def send(self, wanted: Wanted) -> Answer:
        """One request to its end; what goes wrong is in its ``error``."""
        heard, sent = _Heard(), time.perf_counter()
        error: str | None = None
        try:
            async with self._http.stream(
                "POST", f"{self.url}/{_PATHS[self.endpoint]}", json=self._body(wanted)
            ) as response:
                if response.status_code != 200:
                    await response.aread()
                    error = _status(response)
                elif "text/event-stream" not in response.headers.get("content-type", ""):
                    error = (
                        "the answer is not streamed (content-type "
                        f"{response.headers.get('content-type', 'none')!r}); check needs "
                        "server-sent events, as stream=true asks for"
                    )
                else:
                    async for chunk in _events(response):
                        error = _hear(heard, chunk) or error
        except httpx2.TimeoutException:
            error = "timed out"
        except httpx2.HTTPError as failure:
            error = f"{type(failure).__name__}: {failure}"
        end = heard.chunks[-1] if heard.chunks else time.perf_counter()
        if error is None and not heard.chunks:
            error = "the answer is empty"
        return Answer(_sample(wanted, heard, sent, end, error), "".join(heard.text))

    def _body(self, wanted: Wanted) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": wanted.max_tokens,
            "stream": True,
            **self._extras,
        }
        if "metadata" in body:
            body["metadata"] = {"workload": wanted.prompt.workload}
        if self.endpoint == "chat":
            body["messages"] = [
                {"role": each.role, "content": each.content} for each in wanted.prompt.messages
            ]
        else:
            body["prompt"] = wanted.prompt.text
        for key, value in (("temperature", wanted.temperature), ("top_p", wanted.top_p)):
            if value is not None:
                body[key] = value
        if wanted.ignore_eos:
            body["ignore_eos"] = True
        return body

    async def _get(self, url: str) -> httpx2.Response:
        try:
            return await self._http.get(url)
        except httpx2.HTTPError as error:
            raise NoService(
                f"{url} cannot be reached: {error or type(error).__name__}; is the server running, "
                "and is this its address?"
            ) from None

    async def read_text(self, url: str) -> str | None:
        """A page, or None where there is none."""
        try:
            response = await self._http.get(url)
        except httpx2.HTTPError:
            return None
        return response.text if response.status_code == 200 else None


def checked_url(url: str) -> str:
    """Without a slash at the end. Raises InputError for what is no http address."""
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.netloc:
        raise InputError(f"--url: {url!r} is no http address; it is like http://host:8000/v1")
    return urlunsplit((parts.scheme, parts.netloc, parts.path.rstrip("/"), "", ""))


def _hint(url: str, response: httpx2.Response) -> str:
    if response.status_code == 404 and not url.endswith("/v1"):
        return f"; OpenAI-compatible servers mostly answer at {url}/v1"
    if response.status_code in {401, 403}:
        return "; give its key in the environment and the variable's name with --api-key-env"
    return ""


def _status(response: httpx2.Response) -> str:
    try:
        told = response.json()
        message = told["error"]["message"] if "error" in told else told["message"]
    except (ValueError, KeyError, TypeError):
        message = response.text
    return f"{response.status_code} {response.reason_phrase}: {str(message)[:_ERROR_CHARACTERS]}"


async def _events(response: httpx2.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in response.aiter_lines():
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            continue
        try:
            value = json.loads(data)
        except ValueError:
            continue
        if isinstance(value, dict):
            yield value


def _hear(heard: _Heard, chunk: Mapping[str, Any]) -> str | None:
    """Note what a chunk brings; the error it holds."""
    if "error" in chunk:
        return str(chunk["error"])[:_ERROR_CHARACTERS]
    usage = chunk.get("usage")
    if isinstance(usage, dict):
        heard.prompt_tokens = usage.get("prompt_tokens")
        heard.output_tokens = usage.get("completion_tokens")
    if isinstance(chunk.get("prompt_token_ids"), list):
        heard.prompt_ids = chunk["prompt_token_ids"]
    for choice in chunk.get("choices") or ():
        if isinstance(choice.get("prompt_token_ids"), list):
            heard.prompt_ids = choice["prompt_token_ids"]
        delta = choice.get("delta") or {}
        texts = choice.get("text"), *map(delta.get, ("content", "reasoning", "reasoning_content"))
        text = next((each for each in texts if each), "")
        ids = choice.get("token_ids")
        if isinstance(ids, list) and ids:
            heard.output_ids = (heard.output_ids or []) + ids
        if text or ids:
            heard.chunks.append(time.perf_counter())
            heard.text.append(text)
    return None


def _sample(wanted: Wanted, heard: _Heard, sent: float, end: float, error: str | None) -> Sample:
    output = heard.output_tokens
    if output is None:
        output = len(heard.output_ids) if heard.output_ids else len(heard.chunks)
    return Sample(
        id=wanted.prompt.id,
        workload=wanted.prompt.workload,
        sent=sent,
        end=end,
        first=heard.chunks[0] if heard.chunks else None,
        chunks=tuple(heard.chunks),
        prompt_tokens=heard.prompt_tokens or len(heard.prompt_ids or ()),
        output_tokens=output,
        prompt_token_ids=None if heard.prompt_ids is None else tuple(heard.prompt_ids),
        output_token_ids=None if heard.output_ids is None else tuple(heard.output_ids),
        temperature=wanted.temperature or 0.0,
        top_p=1.0 if wanted.top_p is None else wanted.top_p,
        error=error,
    )
