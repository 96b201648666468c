"""The HTTP application: OpenAI's endpoints over an ``EngineLoop``."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from autospec.bench.arms import encode
from autospec.controller import Controller
from autospec.engine.model import CausalModel
from autospec.engine.request import GenerationOutput, GenerationRequest
from autospec.errors import InputError
from autospec.prompts import Prompt
from autospec.serve.bodies import ChatBody, CompletionBody, GenerationBody
from autospec.serve.engine_loop import EngineLoop, EngineStopped, QueueFull, TokenStream
from autospec.serve.refusal import Refusal, of_validation
from autospec.serve.replies import DONE, Reply, sse

P = ParamSpec("P")


@dataclass(frozen=True, slots=True)
class Service:
    """What is served, under which name, and who decides; the controller is closed at the end.

    ``reader`` is the target with a tokenizer of its own: one cannot be used by two threads at once,
    and the engine's turns tokens into text.
    """

    name: str
    engine: EngineLoop
    reader: CausalModel
    registry: CollectorRegistry
    controller: Controller


class _TokenResponse(StreamingResponse):
    """Cancels its request when the client is gone, also before the first chunk was asked for."""

    def __init__(self, stream: TokenStream, content: AsyncIterator[str]) -> None:
        super().__init__(content, media_type="text/event-stream")
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._stream.close()


def create_app(service: Service) -> FastAPI:
    """The application; its start and end are those of the engine's thread."""
    engine = service.engine

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        engine.start()
        try:
            yield
        finally:
            await engine.stop()
            service.controller.close()

    app = FastAPI(title="AutoSpec", docs_url=None, redoc_url=None, lifespan=lifespan)

    @app.exception_handler(Refusal)
    async def refused(request: Request, error: Refusal) -> JSONResponse:
        return error.response()

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        return of_validation(error).response()

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> JSONResponse:
        message = f"{request.method} {request.url.path}: {error.detail}"
        return Refusal(error.status_code, message).response()

    @app.get("/health")
    async def health() -> JSONResponse:
        if engine.failure is not None:
            return JSONResponse({"status": "failed", "reason": engine.failure}, 503)
        return JSONResponse({"status": "ok"})

    @app.get("/metrics")
    def metrics() -> Response:
        return Response(generate_latest(service.registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(service)]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        _check_model(service, name)
        return _model(service)

    reading = asyncio.Lock()

    async def read(call: Callable[P, list[int]], *args: P.args, **kwargs: P.kwargs) -> list[int]:
        """Token ids; off the event loop, which has streams to serve."""
        async with reading:
            try:
                return await asyncio.to_thread(call, *args, **kwargs)
            except InputError as error:
                raise Refusal(400, str(error)) from None

    @app.post("/v1/chat/completions", response_model=None)
    async def chat(body: ChatBody, request: Request) -> Response:
        _check_model(service, body.model)
        name = f"chatcmpl-{uuid.uuid4().hex}"
        prompt = Prompt(name, body.label("workload") or "", tuple(body.turns()))
        ids = await read(encode, prompt, service.reader, _MESSAGES)
        reply = Reply(name, service.name, "chat", ids, body.return_token_ids, body.includes_usage)
        return await _answer(engine, body, body.most_tokens, prompt.text, reply, request)

    @app.post("/v1/completions", response_model=None)
    async def complete(body: CompletionBody, request: Request) -> Response:
        _check_model(service, body.model)
        name = f"cmpl-{uuid.uuid4().hex}"
        if isinstance(body.prompt, str):
            ids = await read(_tokens_of, service.reader, body.prompt)
            text: str | None = body.prompt
        else:
            ids, text = body.prompt, None
        reply = Reply(
            name, service.name, "completion", ids, body.return_token_ids, body.includes_usage
        )
        return await _answer(engine, body, body.most_tokens, text, reply, request)

    return app


_MESSAGES = Path("messages")


def _model(service: Service) -> dict[str, Any]:
    return {
        "id": service.name,
        "object": "model",
        "created": 0,
        "owned_by": "autospec",
        "max_model_len": service.engine.decoder.capacity,
    }


def _check_model(service: Service, name: str) -> None:
    if name != service.name:
        raise Refusal(
            404,
            f"the model {name!r} is not served here; {service.name!r} is",
            param="model",
            code="model_not_found",
        )


def _tokens_of(reader: CausalModel, text: str) -> list[int]:
    tokenizer = reader.tokenizer
    if tokenizer is None:
        raise Refusal(400, "the model has no tokenizer; give the prompt as token ids")
    return [int(token) for token in tokenizer(text)["input_ids"]]


async def _answer(
    engine: EngineLoop,
    body: GenerationBody,
    most_tokens: int | None,
    text: str | None,
    reply: Reply,
    request: Request,
) -> Response:
    capacity = engine.decoder.capacity
    room = capacity - len(reply.prompt_token_ids)
    if room < 1 or (most_tokens is not None and most_tokens > room):
        wanted = f" and {most_tokens} are to be generated" if most_tokens is not None else ""
        raise Refusal(
            400,
            f"the prompt has {len(reply.prompt_token_ids)} tokens{wanted}; "
            f"this server's context is {capacity} tokens",
            code="context_length_exceeded",
        )
    stream = _open(
        engine,
        GenerationRequest(
            prompt_token_ids=reply.prompt_token_ids,
            max_tokens=most_tokens or room,
            sampling=body.sampling(),
            id=reply.id,
            stop=body.stops,
            stop_token_ids=tuple(body.stop_token_ids),
            ignore_eos=body.ignore_eos,
            stream_text=body.stream and engine.decoder.target.tokenizer is not None,
            workload=body.label("workload"),
            tag=body.label("tag"),
            text=text,
        ),
    )
    if body.stream:
        return _TokenResponse(stream, _chunks(stream, reply))
    output = await _whole(stream, request)
    return JSONResponse(reply.whole(output))


def _open(engine: EngineLoop, request: GenerationRequest) -> TokenStream:
    try:
        return engine.open(request)
    except QueueFull as error:
        raise Refusal(429, str(error), kind="overloaded_error", code="queue_full") from None
    except EngineStopped as error:
        raise Refusal(503, str(error), kind="server_error") from None
    except InputError as error:
        raise Refusal(400, str(error).partition(": ")[2] or str(error)) from None


async def _chunks(stream: TokenStream, reply: Reply) -> AsyncIterator[str]:
    if (chunk := reply.first()) is not None:
        yield chunk
    try:
        async for event in stream.events():
            yield reply.next(event.text, event.token_ids, event.output)
            if event.output is not None and (chunk := reply.last(event.output)) is not None:
                yield chunk
    except EngineStopped as error:
        yield sse(Refusal(503, str(error), kind="server_error").body())
    yield DONE


async def _whole(stream: TokenStream, request: Request) -> GenerationOutput:
    """The finished output; cancels when the client hangs up first."""
    finished = asyncio.ensure_future(_last(stream))
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((finished, gone), return_when=asyncio.FIRST_COMPLETED)
        if not finished.done():
            raise Refusal(499, "the client has closed the connection")
        return finished.result()
    except EngineStopped as error:
        raise Refusal(503, str(error), kind="server_error") from None
    finally:
        finished.cancel()
        gone.cancel()
        stream.close()


async def _last(stream: TokenStream) -> GenerationOutput:
    output: GenerationOutput | None = None
    async for event in stream.events():
        output = event.output
    assert output is not None
    return output


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
