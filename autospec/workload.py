"""Request -> workload label: the caller's, else the first matching rule's, else automatic."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from autospec.records import Int32Array, Request

OTHER = "other"
"""Label of the requests whose own label came after the last free place."""

MAX_LABEL_CHARACTERS = 64
MAX_CALLER_LABELS = 64
MAX_MATCHED_CHARACTERS = 16_384
"""``text_matches`` looks at this many leading characters: one request cannot stall a server."""

SHORT_PROMPT_TOKENS = 128
LONG_PROMPT_TOKENS = 512
GREEDY_TEMPERATURE = 0.3
REPETITIVE_SHARE = 0.05
"""From here on a prompt is repetitive: retrieval has about 0.1, chat and math less than 0.02."""

_NGRAM = 4
_WINDOW_TOKENS = 4096
_MIX = np.uint64(0x9E3779B97F4A7C15)
_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:/-]*")
_FOREIGN = re.compile(r"[^A-Za-z0-9_.:/-]+")


class _Form(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class TemperatureRange(_Form):
    """Sampling temperatures from ``min`` to ``max``, both included; null is open."""

    min: Annotated[float, Field(ge=0)] | None = None
    max: Annotated[float, Field(ge=0)] | None = None

    @model_validator(mode="after")
    def _check_order(self) -> TemperatureRange:
        _check_range(self.min, self.max)
        return self


class TokenRange(_Form):
    """Token counts from ``min`` to ``max``, both included; null is open."""

    min: Annotated[int, Field(ge=0)] | None = None
    max: Annotated[int, Field(ge=0)] | None = None

    @model_validator(mode="after")
    def _check_order(self) -> TokenRange:
        _check_range(self.min, self.max)
        return self


class WorkloadRule(_Form):
    """One line of ``workloads.rules``. Every condition given must hold; none given matches all."""

    label: Annotated[str, Field(description="label that a matching request gets")]
    tag: Annotated[str | None, Field(description="the request's tag, exactly")] = None
    temperature: TemperatureRange | None = None
    prompt_tokens: TokenRange | None = None
    text_matches: Annotated[
        str | None, Field(description="regular expression searched in the request's text")
    ] = None

    @field_validator("label")
    @classmethod
    def _check_label(cls, label: str) -> str:
        if not _LABEL.fullmatch(label) or len(label) > MAX_LABEL_CHARACTERS:
            raise ValueError(
                f"must be 1 to {MAX_LABEL_CHARACTERS} letters, digits or any of _ . : / -, "
                "starting with a letter or digit"
            )
        return label

    @field_validator("text_matches")
    @classmethod
    def _check_expression(cls, expression: str | None) -> str | None:
        if expression is not None:
            try:
                re.compile(expression)
            except re.error as error:
                raise ValueError(f"is not a regular expression: {error}") from None
        return expression


def _check_range(low: float | None, high: float | None) -> None:
    if low is None and high is None:
        raise ValueError("needs min, max or both")
    if low is not None and high is not None and low > high:
        raise ValueError(f"min {low} is above max {high}")


@dataclass(frozen=True, slots=True)
class Features:
    """What an automatic label is made of. ``repetition`` is in [0, 1]."""

    prompt_tokens: int
    repetition: float
    temperature: float


def repetition_share(tokens: Int32Array, ngram: int = _NGRAM) -> float:
    """Share of the n-grams of ``tokens`` [t] that occurred earlier in them; 0 when too short."""
    count = tokens.shape[0] - ngram + 1
    if count < 2:
        return 0.0
    ids = tokens.astype(np.uint64)
    hashes = ids[:count].copy()
    for shift in range(1, ngram):
        hashes *= _MIX
        hashes ^= hashes >> np.uint64(29)
        hashes += ids[shift : shift + count]
    hashes.sort()
    return float(np.count_nonzero(hashes[1:] == hashes[:-1]) / count)


def request_features(request: Request) -> Features:
    """Cheap features of a request; repetition is that of the last 4,096 prompt tokens."""
    tokens = _prompt(request)
    return Features(
        prompt_tokens=int(tokens.shape[0]),
        repetition=repetition_share(tokens[-_WINDOW_TOKENS:]),
        temperature=request.temperature,
    )


def _prompt(request: Request) -> Int32Array:
    """The prompt's tokens [t]. Raises ValueError."""
    tokens = np.asarray(request.prompt_token_ids)
    if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu"):
        raise ValueError(
            f"request {request.id!r}: prompt_token_ids must be a flat sequence of token ids, found "
            f"{type(request.prompt_token_ids).__name__} of {tokens.dtype} with shape {tokens.shape}"
        )
    return tokens


def automatic_label(features: Features) -> str:
    """One of ``AUTOMATIC_LABELS``, e.g. ``auto/long-repetitive-greedy``."""
    sampling = "greedy" if features.temperature <= GREEDY_TEMPERATURE else "sampled"
    if features.prompt_tokens < SHORT_PROMPT_TOKENS:
        return f"auto/short-{sampling}"
    length = "long" if features.prompt_tokens >= LONG_PROMPT_TOKENS else "medium"
    texture = "repetitive" if features.repetition >= REPETITIVE_SHARE else "varied"
    return f"auto/{length}-{texture}-{sampling}"


AUTOMATIC_LABELS: tuple[str, ...] = tuple(
    f"auto/{kind}-{sampling}"
    for kind in (
        "short",
        "medium-varied",
        "medium-repetitive",
        "long-varied",
        "long-repetitive",
    )
    for sampling in ("greedy", "sampled")
)


def clean_label(label: str) -> str | None:
    """A caller's label made safe for metrics and files; None when nothing of it is left."""
    cleaned = _FOREIGN.sub("_", label.strip()).lstrip("_.:/-")[:MAX_LABEL_CHARACTERS]
    return cleaned or None


class Workloads:
    """Assigns every request a label out of a bounded, numbered set.

    ``labels[i]`` is the label of index ``i``. Labels are only ever appended: those of the rules,
    the automatic ones, ``other``, then up to ``max_caller_labels`` of the callers': those of
    ``known`` (a loaded profile's), the rest as they come. Requests with further labels go to
    ``other`` and are counted in ``overflowed``.
    """

    def __init__(
        self,
        rules: Sequence[WorkloadRule] = (),
        known: Iterable[str] = (),
        max_caller_labels: int = MAX_CALLER_LABELS,
    ) -> None:
        self._rules = tuple(
            (rule, re.compile(rule.text_matches) if rule.text_matches is not None else None)
            for rule in rules
        )
        self._index: dict[str, int] = {}
        for label in (*(rule.label for rule in rules), *AUTOMATIC_LABELS, OTHER):
            self._index.setdefault(label, len(self._index))
        self.capacity = len(self._index) + max_caller_labels
        self.overflowed = 0
        for label in known:
            if len(self._index) < self.capacity:
                self._index.setdefault(label, len(self._index))

    @property
    def labels(self) -> tuple[str, ...]:
        """All labels so far, by index."""
        return tuple(self._index)

    def index(self, request: Request) -> int:
        """The number of the request's label, below ``capacity``."""
        if request.workload is not None:
            label = clean_label(request.workload)
            if label is not None:
                return self._caller_index(label)
        for rule, expression in self._rules:
            if _matches(rule, expression, request):
                return self._index[rule.label]
        return self._index[automatic_label(request_features(request))]

    def _caller_index(self, label: str) -> int:
        known = self._index.get(label)
        if known is not None:
            return known
        if len(self._index) >= self.capacity:
            self.overflowed += 1
            return self._index[OTHER]
        self._index[label] = len(self._index)
        return self._index[label]


def _matches(rule: WorkloadRule, expression: re.Pattern[str] | None, request: Request) -> bool:
    if rule.tag is not None and rule.tag != request.tag:
        return False
    if rule.temperature is not None and not _within(
        request.temperature, rule.temperature.min, rule.temperature.max
    ):
        return False
    if rule.prompt_tokens is not None and not _within(
        _prompt(request).shape[0], rule.prompt_tokens.min, rule.prompt_tokens.max
    ):
        return False
    if expression is None:
        return True
    text = request.text
    return text is not None and expression.search(text[:MAX_MATCHED_CHARACTERS]) is not None


def _within(value: float, low: float | None, high: float | None) -> bool:
    return (low is None or value >= low) and (high is None or value <= high)
