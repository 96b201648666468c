"""What ``autospec replay`` simulated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from autospec.report.readers.form import Form, read_form
from autospec.report.readers.percentiles import Percentiles
from autospec.report.wording import moment


class PolicyRow(Form):
    """One policy at one concurrency, or at one rate of arrivals."""

    policy: str
    concurrency: int
    rate: float | None
    requests: int
    tokens: int
    seconds: float
    tokens_per_second: float
    speedup_vs_plain: float
    steps: int
    decision_seconds_mean: float = 0.0
    decision_seconds_p99: float = 0.0
    ttft_seconds: Percentiles | None = None
    tpot_seconds: Percentiles | None = None
    end_to_end_seconds: Percentiles | None = None


class Bound(Form):
    """The best that was possible at a concurrency; ``arm`` is a fixed choice's name."""

    speedup_vs_plain: float
    tokens_per_second: float
    arm: str = ""


class _Settings(Form):
    traces: tuple[str, ...]
    cost: str
    shape: str
    seed: int
    arrivals: str | None = None
    profile: str | None = None


class _Document(Form):
    results: tuple[PolicyRow, ...]
    plain: tuple[PolicyRow, ...]
    best_fixed: dict[int, Bound]
    clairvoyant: dict[int, Bound]
    date: datetime
    version: str
    settings: _Settings


@dataclass(frozen=True, slots=True)
class ReplayRun:
    """Policies on recorded traces and a simulated clock; bounds are by concurrency."""

    name: str
    date: str
    results: tuple[PolicyRow, ...]
    plain: tuple[PolicyRow, ...]
    best_fixed: Mapping[int, Bound]
    clairvoyant: Mapping[int, Bound]
    facts: tuple[tuple[str, str], ...]

    @property
    def policies(self) -> tuple[str, ...]:
        """Names in the order in which they were asked for."""
        return tuple(dict.fromkeys(row.policy for row in self.results))

    def closed(self, policy: str) -> tuple[PolicyRow, ...]:
        """A policy's closed loops, by rising concurrency."""
        rows = [row for row in self.results if row.policy == policy and row.rate is None]
        return tuple(sorted(rows, key=lambda row: row.concurrency))


def read_replay(name: str, document: Mapping[str, Any], source: str) -> ReplayRun:
    """``source`` names the document in errors. Raises InputError with the keys that are wrong."""
    read = read_form(_Document, document, source, "replay")
    settings = read.settings
    facts = [
        ("traces", ", ".join(settings.traces)),
        ("cost file", f"{settings.cost} ({settings.shape})"),
        ("arrivals", settings.arrivals or ""),
        ("start", "cold" if settings.profile is None else f"from {settings.profile}"),
        ("seed", str(settings.seed)),
        ("versions", f"autospec {read.version}"),
    ]
    return ReplayRun(
        name,
        moment(read.date),
        read.results,
        read.plain,
        read.best_fixed,
        read.clairvoyant,
        tuple((key, value) for key, value in facts if value),
    )
