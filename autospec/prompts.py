"""Prompts files: JSON Lines, one prompt a line, with the workload it stands for.

A line is ``{"id", "workload", "prompt" | "turns" | "messages"}`` and may add ``"max_tokens"`` and
``"temperature"``; other keys are ignored. Of ``turns``, the user's side of a conversation, the
first is used: later ones need the answers to those before them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from autospec.errors import InputError

DEFAULT_WORKLOAD = "default"
"""The workload of prompts for which a file names none."""

_TEXTS = ("prompt", "turns", "messages")
_ROLES = ("system", "user", "assistant")


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation; ``role`` is system, user or assistant."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request to serve. ``max_tokens`` None leaves the length to the caller."""

    id: str
    workload: str
    messages: tuple[Message, ...]
    max_tokens: int | None = None
    temperature: float = 0.0

    @property
    def label(self) -> str | None:
        """The workload as a caller would name it: None where the file names none."""
        return None if self.workload == DEFAULT_WORKLOAD else self.workload

    @property
    def text(self) -> str:
        """The contents alone, for models without a chat template."""
        return "\n\n".join(message.content for message in self.messages)


def read_prompts(path: Path) -> tuple[Prompt, ...]:
    """Prompts of a JSONL file in file order; raises InputError with the file and line."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: is not UTF-8 text (byte {error.start})") from None
    prompts: list[Prompt] = []
    lines: dict[str, int] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        place = f"{path}:{number}"
        prompt = _prompt(line, number, place)
        if prompt.id in lines:
            raise InputError(
                f"{place}: id {prompt.id!r} is already used in line {lines[prompt.id]}; "
                "every prompt needs its own"
            )
        lines[prompt.id] = number
        prompts.append(prompt)
    if not prompts:
        raise InputError(f'{path}: holds no prompts; a line is {{"id", "workload", "prompt"}}')
    return tuple(prompts)


def workload_names(prompts: Sequence[Prompt]) -> tuple[str, ...]:
    """Workloads in the order of their first prompt."""
    return tuple(dict.fromkeys(prompt.workload for prompt in prompts))


def _prompt(line: str, number: int, place: str) -> Prompt:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"{place}: is not JSON: {error.msg} at column {error.colno}") from None
    if not isinstance(row, dict):
        raise InputError(f"{place}: must be a JSON object, found {type(row).__name__}")
    given = [key for key in _TEXTS if key in row]
    if len(given) != 1:
        found = " and ".join(given) if given else "none of them"
        raise InputError(f"{place}: needs exactly one of {', '.join(_TEXTS)}; found {found}")
    prompt_id = row.get("id", number)
    if not isinstance(prompt_id, (str, int)) or isinstance(prompt_id, bool) or prompt_id == "":
        raise InputError(f"{place}: id is {prompt_id!r}; it must be a text or a whole number")
    workload = row.get("workload", DEFAULT_WORKLOAD)
    if not isinstance(workload, str) or not workload.strip():
        raise InputError(f"{place}: workload is {workload!r}; it must be a text")
    return Prompt(
        id=str(prompt_id),
        workload=workload,
        messages=_messages(row, given[0], place),
        max_tokens=_max_tokens(row, place),
        temperature=_temperature(row, place),
    )


def _messages(row: dict[str, Any], key: str, place: str) -> tuple[Message, ...]:
    value = row[key]
    if key == "prompt":
        return (Message("user", _content(value, key, place)),)
    if not isinstance(value, list) or not value:
        raise InputError(f"{place}: {key} must be a list with at least one entry")
    if key == "turns":
        return (Message("user", _content(value[0], "turns[0]", place)),)
    messages = []
    for index, entry in enumerate(value):
        where = f"messages[{index}]"
        if not isinstance(entry, dict) or entry.get("role") not in _ROLES:
            raise InputError(f"{place}: {where} must have a role: {', '.join(_ROLES)}")
        content = _content(entry.get("content"), f"{where}.content", place)
        messages.append(Message(cast(str, entry["role"]), content))
    return tuple(messages)


def _content(value: object, key: str, place: str) -> str:
    if not isinstance(value, str):
        raise InputError(f"{place}: {key} must be a text, found {type(value).__name__}")
    if not value.strip():
        raise InputError(f"{place}: {key} is empty; it must hold at least one word")
    return value


def _max_tokens(row: dict[str, Any], place: str) -> int | None:
    value = row.get("max_tokens")
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise InputError(f"{place}: max_tokens is {value!r}; it must be a whole number from 1 on")
    return value


def _temperature(row: dict[str, Any], place: str) -> float:
    value = row.get("temperature", 0.0)
    usable = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not usable or not 0.0 <= value < float("inf"):
        raise InputError(f"{place}: temperature is {value!r}; it must be 0 (greedy) or above")
    return float(value)
