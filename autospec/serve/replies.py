"""The JSON of responses and stream chunks, for chats and for completions."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from autospec.engine.request import GenerationOutput

DONE = "data: [DONE]\n\n"


def sse(value: Mapping[str, Any]) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(value, separators=(',', ':'), ensure_ascii=False)}\n\n"


@dataclass(frozen=True, slots=True)
class Reply:
    """How one request is answered. Token ids are told where they were asked for."""

    id: str
    model: str
    kind: Literal["chat", "completion"]
    prompt_token_ids: Sequence[int]
    with_token_ids: bool
    with_usage: bool
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, output: GenerationOutput) -> dict[str, Any]:
        """The response without streaming."""
        text = output.text or ""
        choice: dict[str, Any] = {"index": 0}
        if self.kind == "chat":
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            choice["text"] = text
        choice |= {"logprobs": None, "finish_reason": output.finish_reason}
        reply = self._head(self._object) | {"choices": [choice], "usage": self._usage(output)}
        if self.with_token_ids:
            choice["token_ids"] = list(output.token_ids)
            reply["prompt_token_ids"] = list(self.prompt_token_ids)
        return reply

    def first(self) -> str | None:
        """The chunk before the first token, if there is one."""
        if self.kind == "completion" and not self.with_token_ids:
            return None
        chunk = self._chunk({"role": "assistant", "content": ""} if self.kind == "chat" else "")
        if self.with_token_ids:
            chunk["prompt_token_ids"] = list(self.prompt_token_ids)
        return sse(chunk)

    def next(self, text: str, token_ids: Sequence[int], output: GenerationOutput | None) -> str:
        """What a step added; ``output`` when it was the last one."""
        reason = None if output is None else output.finish_reason
        chunk = self._chunk({"content": text} if self.kind == "chat" else text, reason)
        if self.with_token_ids:
            chunk["choices"][0]["token_ids"] = list(token_ids)
        return sse(chunk)

    def last(self, output: GenerationOutput) -> str | None:
        """The chunk of token counts, where it was asked for."""
        if not self.with_usage:
            return None
        return sse(self._head(self._chunk_object) | {"choices": [], "usage": self._usage(output)})

    @property
    def _object(self) -> str:
        return "chat.completion" if self.kind == "chat" else "text_completion"

    @property
    def _chunk_object(self) -> str:
        return "chat.completion.chunk" if self.kind == "chat" else "text_completion"

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _chunk(self, delta: str | dict[str, str], reason: str | None = None) -> dict[str, Any]:
        content = {"text": delta} if isinstance(delta, str) else {"delta": delta}
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": reason}
        return self._head(self._chunk_object) | {"choices": [choice]}

    def _usage(self, output: GenerationOutput) -> dict[str, int]:
        completion = len(output.token_ids)
        return {
            "prompt_tokens": output.prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": output.prompt_tokens + completion,
        }
