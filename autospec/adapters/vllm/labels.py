"""What a request may say to AutoSpec, in ``extra_args`` or, over HTTP, in ``vllm_xargs``.

In process it is one mapping, ``extra_args={"autospec": {"workload": "chat", "max_k": 4}}``. vLLM's
HTTP API takes flat strings and numbers only, so there each key is spelled with the prefix
``autospec_``: ``"vllm_xargs": {"autospec_workload": "chat", "autospec_speculate": 0}``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

PREFIX = "autospec_"
KEYS = ("workload", "tag", "max_k", "speculate", "tpot_target_ms")


@dataclass(frozen=True, slots=True)
class RequestLabels:
    """A request's own wishes. ``max_k`` 0 opts out of speculation."""

    workload: str | None = None
    tag: str | None = None
    max_k: int | None = None
    tpot_target_seconds: float | None = None


def read_labels(extra_args: Mapping[str, object] | None) -> tuple[RequestLabels, tuple[str, ...]]:
    """The labels, and what was wrong with others: a bad label must not fail a request."""
    if not extra_args:
        return RequestLabels(), ()
    given: dict[str, object] = {}
    mistakes: list[str] = []
    nested = extra_args.get("autospec")
    if isinstance(nested, Mapping):
        given.update({str(key): value for key, value in nested.items()})
    elif nested is not None:
        mistakes.append(f"autospec must be a mapping, found {nested!r}")
    given.update(
        {
            key.removeprefix(PREFIX): value
            for key, value in extra_args.items()
            if key.startswith(PREFIX)
        }
    )
    for key in given:
        if key not in KEYS:
            mistakes.append(f"unknown key {key!r}; the keys are {', '.join(KEYS)}")
    workload = _text(given, "workload", mistakes)
    tag = _text(given, "tag", mistakes)
    max_k = _number(given, "max_k", mistakes)
    if _number(given, "speculate", mistakes) == 0:
        max_k = 0
    target = _number(given, "tpot_target_ms", mistakes)
    labels = RequestLabels(
        workload,
        tag,
        None if max_k is None else int(max_k),
        target / 1000.0 if target else None,
    )
    return labels, tuple(mistakes)


def _text(given: Mapping[str, object], key: str, mistakes: list[str]) -> str | None:
    value = given.get(key)
    if value is None or isinstance(value, str):
        return value
    mistakes.append(f"{key} must be text, found {value!r}")
    return None


def _number(given: Mapping[str, object], key: str, mistakes: list[str]) -> float | None:
    value = given.get(key)
    if value is None:
        return None
    if isinstance(value, bool | int | float) and 0 <= value < 1e9:
        return float(value)
    mistakes.append(f"{key} must be a number of at least 0, found {value!r}")
    return None
