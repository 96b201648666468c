"""The bodies of requests, as far as the engine can serve them; anything else is refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from autospec.engine.sampling import SamplingParameters
from autospec.prompts import Message

MOST_STOPS = 16
_WITHOUT_EFFECT = (
    "user", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls",
)  # fmt: skip
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (False, 0),
    "top_logprobs": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "suffix": ("",),
}
"""What OpenAI knows and the engine has not: taken only with the value that asks for nothing."""


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class StreamOptions(_Body):
    """``include_usage`` adds a last chunk with the token counts."""

    include_usage: bool = False


class TextPart(_Body):
    """A part of a message; only text is served."""

    type: Literal["text"]
    text: str


class ChatMessage(_Body):
    """One turn. ``developer`` is what newer clients call ``system``."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None

    def message(self) -> Message:
        """For the chat template."""
        content = self.content
        if not isinstance(content, str):
            content = "".join(part.text for part in content)
        return Message("system" if self.role == "developer" else self.role, content)


class GenerationBody(_Body):
    """What chats and completions have in common. Temperature is 1 unless told, as at OpenAI.

    ``metadata`` may name the ``workload`` the request belongs to, or a ``tag`` for the policy's
    rules. ``top_k``, ``min_p``, ``ignore_eos``, ``stop_token_ids`` and ``return_token_ids`` are
    those of vLLM.
    """

    model: str
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    metadata: dict[str, str] | None = None
    top_k: Annotated[int, Field(ge=0)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    ignore_eos: bool = False
    stop_token_ids: list[int] = []
    return_token_ids: bool = False

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        kept = {}
        for key, given in value.items():
            if key in _WITHOUT_EFFECT or (key in _NEUTRAL and given is None):
                continue
            if key in _NEUTRAL and key not in cls.model_fields:
                if given not in _NEUTRAL[key]:
                    allowed = " or ".join(repr(one) for one in _NEUTRAL[key])
                    raise ValueError(f"{key} is {given!r}; this server takes only {allowed}")
                continue
            kept[key] = given
        return kept

    @field_validator("stop")
    @classmethod
    def _few_stops(cls, value: str | list[str] | None) -> str | list[str] | None:
        stops = [value] if isinstance(value, str) else value or []
        if "" in stops:
            raise ValueError("a stop string must hold at least one character")
        if len(stops) > MOST_STOPS:
            raise ValueError(f"{len(stops)} stop strings; at most {MOST_STOPS} are taken")
        return value

    @property
    def stops(self) -> tuple[str, ...]:
        """However it was given."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the token counts."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self) -> SamplingParameters:
        """For the engine."""
        return SamplingParameters(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=self.top_k,
            top_p=1.0 if self.top_p is None else self.top_p,
            min_p=self.min_p,
            seed=self.seed,
        )

    def label(self, key: str) -> str | None:
        """An entry of ``metadata``."""
        return (self.metadata or {}).get(key) or None


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None

    @property
    def most_tokens(self) -> int | None:
        """By its new or its old name."""
        return self.max_completion_tokens or self.max_tokens

    def turns(self) -> Iterator[Message]:
        """In order."""
        return (each.message() for each in self.messages)


class CompletionBody(GenerationBody):
    """POST /v1/completions. A prompt is a text or its token ids, or a list of one such."""

    prompt: str | list[int]

    @field_validator("prompt", mode="before")
    @classmethod
    def _one_prompt(cls, value: Any) -> Any:
        if not isinstance(value, list) or not value or isinstance(value[0], int):
            return value
        if len(value) > 1:
            raise ValueError(f"{len(value)} prompts; this server takes one a request")
        return value[0]

    @property
    def most_tokens(self) -> int | None:
        """None leaves it to the context."""
        return self.max_tokens
