"""Request logs: JSON Lines of what was asked, what was answered, and when.

A line holds ``prompt`` (or ``messages``, or ``prompt_token_ids``), ``output`` (or
``output_token_ids``), ``start`` and ``end``, and may hold ``first_token``, ``id``, ``workload``,
``temperature`` and ``top_p``. Times are Unix seconds or ISO 8601.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING

from autospec.check.samples import Sample
from autospec.check.tokens import output_ids, prompt_ids
from autospec.errors import InputError
from autospec.prompts import DEFAULT_WORKLOAD, Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_NEEDS = 'a line is {"prompt", "output", "start", "end"}'


@dataclass(frozen=True, slots=True)
class _Row:
    values: Mapping[str, object]
    place: str

    def text(self, key: str) -> str | None:
        value = self.values.get(key)
        if value is not None and not isinstance(value, str):
            raise InputError(f"{self.place}: {key} must be a text, found {type(value).__name__}")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
            raise InputError(f"{self.place}: {key} must be a number, found {value!r}")
        return float(value)

    def token_ids(self, key: str) -> tuple[int, ...] | None:
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(
            type(each) is int and each >= 0 for each in value
        ):
            raise InputError(f"{self.place}: {key} must be a list of token ids (numbers >= 0)")
        return tuple(value)

    def time(self, key: str) -> float | None:
        value = self.values.get(key)
        if value is None:
            return None
        if isinstance(value, str):
            try:
                moment = datetime.fromisoformat(value.strip().replace("Z", "+00:00"))
            except ValueError:
                raise InputError(
                    f"{self.place}: {key} is {value!r}; it must be Unix seconds or like "
                    "2026-11-29T18:15:46.680"
                ) from None
            return moment.replace(tzinfo=moment.tzinfo or timezone.utc).timestamp()
        return self.number(key, 0.0)

    def messages(self) -> tuple[Message, ...] | None:
        given = self.values.get("messages")
        if given is None:
            text = self.text("prompt")
            return None if text is None else (Message("user", text),)
        if not isinstance(given, list) or not all(
            isinstance(each, dict)
            and isinstance(each.get("role"), str)
            and isinstance(each.get("content"), str)
            for each in given
        ):
            raise InputError(f"{self.place}: messages must be a list of {{role, content}} texts")
        return tuple(Message(each["role"], each["content"]) for each in given)


def read_log(path: Path, tokenizer: PreTrainedTokenizerBase | None) -> tuple[Sample, ...]:
    """Requests in the order in which they ended. Raises InputError with file and line.

    Texts need a tokenizer; a line with token ids does not.
    """
    samples: list[Sample] = []
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    samples.append(_sample(_row(line, f"{path}:{number}"), tokenizer, number))
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: is not UTF-8 text (byte {error.start})") from None
    if not samples:
        raise InputError(f"{path}: holds no requests; {_NEEDS}")
    return tuple(sorted(samples, key=lambda sample: sample.end))


def _row(line: str, place: str) -> _Row:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"{place}: is not JSON: {error.msg} at column {error.colno}") from None
    if not isinstance(value, dict):
        raise InputError(f"{place}: must be a JSON object, found {type(value).__name__}")
    return _Row(value, place)


def _sample(row: _Row, tokenizer: PreTrainedTokenizerBase | None, number: int) -> Sample:
    start, end, first = row.time("start"), row.time("end"), row.time("first_token")
    if start is None or end is None:
        missing = " and ".join(
            key for key, value in (("start", start), ("end", end)) if value is None
        )
        raise InputError(
            f"{row.place}: has no {missing}; check needs to know when each request began and "
            f"ended, since what speculation is worth depends on how many run at once. {_NEEDS}"
        )
    if end < start or (first is not None and not start <= first <= end):
        raise InputError(f"{row.place}: start, first_token and end must come in this order")
    prompt, output = row.token_ids("prompt_token_ids"), row.token_ids("output_token_ids")
    if prompt is None:
        messages = row.messages()
        if messages is None:
            raise InputError(f"{row.place}: has no prompt; {_NEEDS}")
        prompt = prompt_ids(_needed(tokenizer, row.place), messages, row.place)
    if output is None:
        text = row.text("output")
        if text is None:
            raise InputError(f"{row.place}: has no output; {_NEEDS}")
        output = output_ids(_needed(tokenizer, row.place), text)
    if not prompt or not output:
        what = "output" if prompt else "prompt"
        raise InputError(f"{row.place}: the {what} is empty; leave such requests out")
    return Sample(
        id=str(row.values.get("id", number)),
        workload=row.text("workload") or DEFAULT_WORKLOAD,
        sent=start,
        end=end,
        first=first,
        prompt_tokens=len(prompt),
        output_tokens=len(output),
        prompt_token_ids=prompt,
        output_token_ids=output,
        temperature=row.number("temperature", 0.0),
        top_p=row.number("top_p", 1.0),
    )


def _needed(tokenizer: PreTrainedTokenizerBase | None, place: str) -> PreTrainedTokenizerBase:
    if tokenizer is None:
        raise InputError(
            f"{place}: holds texts; give the model's folder with --tokenizer, or log "
            "prompt_token_ids and output_token_ids"
        )
    return tokenizer


def log_rate(samples: Sequence[Sample]) -> float:
    """Requests per second over the whole log."""
    seconds = max(each.end for each in samples) - min(each.sent for each in samples)
    return len(samples) / seconds if seconds > 0.0 else 0.0
