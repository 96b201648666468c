"""What ``autospec check`` found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pydantic import Field

from autospec.report.readers.form import Form, read_form
from autospec.report.readers.percentiles import Percentiles
from autospec.report.wording import moment


class CheckVerdict(Form):
    """Whether the service is a candidate, why, and what to do."""

    kind: str
    sentence: str
    reason: str
    next_steps: tuple[str, ...] = ()


class Shares(Form):
    """Where the time of requests goes."""

    queue: float
    prefill: float
    decode: float


class Level(Form):
    """One step of the load, or a whole log; ``rate`` is requests per second."""

    rate: float
    requests: int
    failed: int
    running: float
    prompt_tokens: float
    output_tokens: float
    tokens_per_second: float
    ttft: Percentiles | None = None
    tpot: Percentiles | None = None
    end_to_end: Percentiles
    shares: Shares | None = None
    gpu_use: float | None = None


class Acceptance(Form):
    """One lookup at one k."""

    proposer: str
    k: int
    tokens_per_step: float
    verified_per_step: float

    @property
    def accepted_share(self) -> float | None:
        """Accepted over verified drafts; None without any."""
        if self.verified_per_step <= 0.0:
            return None
        return (self.tokens_per_step - 1.0) / self.verified_per_step


class Speedup(Form):
    """The best choice at a number of running requests, with its interval."""

    running: int
    proposer: str
    k: int
    speedup: float
    low: float
    high: float


class CheckWorkload(Form):
    """One kind of requests."""

    name: str
    requests: int
    prompt_tokens: float
    output_tokens: float
    repetitiveness: float
    best: Acceptance
    speedups: tuple[Speedup, ...] = ()


class Crossover(Form):
    """Where speculation stops paying, and up to where that is known."""

    off_from: int | None
    known_to: int


class _Document(Form):
    source: str
    verdict: CheckVerdict | None
    levels: tuple[Level, ...] = ()
    workloads: tuple[CheckWorkload, ...] = ()
    speedups: tuple[Speedup, ...] = ()
    crossover: Crossover | None = None
    notes: tuple[str, ...] = ()
    date: datetime
    autospec: str
    settings: dict[str, Any] = Field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CheckRun:
    """A service looked at from outside: its times, and what drafts would bring."""

    name: str
    date: str
    verdict: CheckVerdict | None
    levels: tuple[Level, ...]
    workloads: tuple[CheckWorkload, ...]
    speedups: tuple[Speedup, ...]
    crossover: Crossover | None
    notes: tuple[str, ...]
    facts: tuple[tuple[str, str], ...]


def read_check(name: str, document: Mapping[str, Any], source: str) -> CheckRun:
    """``source`` names the document in errors. Raises InputError with the keys that are wrong."""
    read = read_form(_Document, document, source, "check")
    facts = [("looked at", {"live": "a live server", "log": "a log"}.get(read.source, read.source))]
    facts += [
        (str(key).replace("_", " "), str(value))
        for key, value in read.settings.items()
        if isinstance(value, str | int | float) and value not in ("", None)
    ]
    return CheckRun(
        name,
        moment(read.date),
        read.verdict,
        read.levels,
        read.workloads,
        read.speedups,
        read.crossover,
        read.notes,
        (*facts, ("versions", f"autospec {read.autospec}")),
    )
