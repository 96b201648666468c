"""What ``autospec tune`` tried and found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pydantic import Field

from autospec.profile.tuned import Tuning
from autospec.report.readers.form import Form, read_form
from autospec.report.wording import moment


class SurfacePoint(Form):
    """Replicated steps of one kind: requests that all verify ``k`` tokens of a proposer."""

    requests: int
    context_tokens: float
    proposer: str | None = None
    k: int
    median_seconds: float
    spread_seconds: float = 0.0
    replicates: int = 1


class Trial(Form):
    """One setting that was tried; ``score`` is the mean logarithm of its speedups."""

    number: int
    settings: dict[str, Any] = Field(default_factory=dict)
    status: str
    score: float | None = None
    seconds: float = 0.0
    error: str | None = None


class Gain(Form):
    """A finalist's goodput over that of the untuned settings, with its interval."""

    value: float
    low: float
    high: float


class _Final(Form):
    gains: dict[str, Gain] = Field(default_factory=dict)
    kept: str | None = None


class _Document(Form):
    date: datetime
    surface: tuple[SurfacePoint, ...] = ()
    trials: tuple[Trial, ...] = ()
    final: _Final
    tuned: Tuning


@dataclass(frozen=True, slots=True)
class TuneRun:
    """A search of settings and what its finalists brought; ``kept`` names the winner."""

    name: str
    date: str
    surface: tuple[SurfacePoint, ...]
    trials: tuple[Trial, ...]
    gains: Mapping[str, Gain]
    kept: str | None
    tuned: Tuning
    facts: tuple[tuple[str, str], ...]


def read_tune(name: str, document: Mapping[str, Any], source: str) -> TuneRun:
    """``source`` names the document in errors. Raises InputError with the keys that are wrong."""
    read = read_form(_Document, document, source, "tune")
    known = read.tuned.provenance
    return TuneRun(
        name,
        moment(read.date),
        read.surface,
        read.trials,
        read.final.gains,
        read.final.kept,
        read.tuned,
        (
            ("engine", known.engine),
            ("device", known.device),
            ("requests", known.prompts),
            ("command", known.command),
            ("versions", ", ".join(f"{key} {value}" for key, value in known.versions.items())),
        ),
    )
