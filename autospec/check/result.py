"""What a check has found, and its JSON form.

The JSON is stable within its ``version``: keys may be added. ``{"kind": "check", "version": 1,
"source": "live" | "log" | "folders", "verdict": {...} | null, "levels": [...], "workloads": [...],
"speedups": [...], "crossover": {...} | null, "step_time": {...} | null, "sensitivity": [...],
"folders": {...} | null, "notes": [...], "date", "autospec", "settings"}``. Times are in seconds,
shares are from 0 to 1, ``null`` is "not known".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from typing import Any, Literal

from autospec import __version__
from autospec.check.folders import FolderFacts
from autospec.check.lookups import Acceptance, Crossover, Speedup
from autospec.check.samples import Level
from autospec.check.verdict import Verdict

VERSION = 1
Source = Literal["live", "log", "folders"]


@dataclass(frozen=True, slots=True)
class WorkloadFacts:
    """One kind of requests. ``repetitiveness`` is the share of output tokens that the better lookup
    would have drafted right; ``acceptance`` has every lookup at every k. ``ttft`` and ``tpot`` are
    medians at the lowest load, in seconds."""

    name: str
    requests: int
    prompt_tokens: float
    output_tokens: float
    ttft: float | None
    tpot: float | None
    repetitiveness: float
    acceptance: tuple[Acceptance, ...]
    speedups: tuple[Speedup, ...]

    @property
    def best(self) -> Acceptance:
        """The most tokens per step; of equals the one with fewer drafts."""
        return max(
            self.acceptance, key=lambda each: (each.tokens_per_step, -each.verified_per_step)
        )


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """The best lookup's acceptance under other sampling."""

    temperature: float
    top_p: float
    requests: int
    best: Acceptance


@dataclass(frozen=True, slots=True)
class StepTimeFacts:
    """What the speedups rest on: seconds of a plain step by running requests."""

    source: str
    seconds: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class CheckResult:
    """Everything found; empty and None where nothing was looked at."""

    source: Source
    settings: Mapping[str, Any]
    verdict: Verdict | None = None
    levels: tuple[Level, ...] = ()
    workloads: tuple[WorkloadFacts, ...] = ()
    speedups: tuple[Speedup, ...] = ()
    crossover: Crossover | None = None
    step_time: StepTimeFacts | None = None
    sensitivity: tuple[Sensitivity, ...] = ()
    folders: FolderFacts | None = None
    notes: tuple[str, ...] = ()
    date: datetime = field(default_factory=lambda: datetime.now(timezone.utc))


def result_json(result: CheckResult) -> dict[str, Any]:
    """See the head of this file."""
    return {
        "kind": "check",
        "version": VERSION,
        "source": result.source,
        "verdict": None if result.verdict is None else asdict(result.verdict),
        "levels": [asdict(each) for each in result.levels],
        "workloads": [
            asdict(each)
            | {
                "best": asdict(each.best),
                "acceptance": [
                    asdict(one) | {"accepted_share": one.accepted_share} for one in each.acceptance
                ],
            }
            for each in result.workloads
        ],
        "speedups": [asdict(each) for each in result.speedups],
        "crossover": None if result.crossover is None else asdict(result.crossover),
        "step_time": None
        if result.step_time is None
        else {
            "source": result.step_time.source,
            "points": [
                {"running": running, "seconds": seconds}
                for running, seconds in result.step_time.seconds.items()
            ],
        },
        "sensitivity": [asdict(each) for each in result.sensitivity],
        "folders": None if result.folders is None else _folders_json(result.folders),
        "notes": list(result.notes),
        "date": result.date.isoformat(timespec="seconds"),
        "autospec": __version__,
        "settings": dict(result.settings),
    }


def _folders_json(facts: FolderFacts) -> dict[str, Any]:
    agreement = facts.agreement
    return asdict(facts) | {
        "agreement": None
        if agreement is None
        else asdict(agreement) | {"is_compatible": agreement.is_compatible},
        "memory": asdict(facts.memory) | {"needed": facts.memory.needed, "fits": facts.memory.fits},
        "parameter_ratio": None
        if facts.draft is None
        else facts.draft.parameters / facts.target.parameters,
    }
