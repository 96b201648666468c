"""What goes into the decoder and what comes out of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from autospec.engine.sampling import SamplingParameters

FinishReason = Literal["stop", "length", "cancelled"]
"""An end token, stop token or stop string; the token limit or the context's end; the caller."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt to continue by up to ``max_tokens`` tokens.

    ``stop`` strings end the text before them and need a tokenizer. ``stream_text`` asks for text in
    every event, not only in the last. ``workload`` to ``tpot_target_seconds`` are passed on to the
    controller (see ``autospec.records.Request``). An empty ``id`` is filled in by the decoder.
    """

    prompt_token_ids: Sequence[int]
    max_tokens: int = 256
    sampling: SamplingParameters = field(default_factory=SamplingParameters)
    id: str = ""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    stream_text: bool = False
    workload: str | None = None
    tag: str | None = None
    text: str | None = None
    max_k: int | None = None
    tpot_target_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class GenerationOutput:
    """A finished request. ``token_ids`` hold the end token, if one came; ``text`` holds neither it
    nor the stop string, and is None without a tokenizer. Seconds count from ``submit``;
    ``first_token_seconds`` is None where no token came.
    """

    id: str
    prompt_tokens: int
    token_ids: tuple[int, ...]
    text: str | None
    finish_reason: FinishReason
    first_token_seconds: float | None
    total_seconds: float


@dataclass(frozen=True, slots=True)
class Event:
    """What a step added to one request; ``output`` is set once, when the request has ended.

    ``text`` is filled for requests with ``stream_text``; it may lag behind the tokens by what could
    still become a stop string or an unfinished character.
    """

    request_id: str
    token_ids: tuple[int, ...]
    text: str = ""
    output: GenerationOutput | None = None
