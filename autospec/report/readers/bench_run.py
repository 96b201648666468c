"""What ``autospec demo`` and ``autospec bench`` measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pydantic import Field

from autospec.bench.phases import ADAPTIVE, PLAIN
from autospec.report.readers.form import Form, read_form
from autospec.report.wording import moment


class Spread(Form):
    """Median and extremes over rounds."""

    median: float
    low: float
    high: float


class ChoiceShare(Form):
    """The share of request steps in which a proposer drafted k tokens."""

    proposer: str
    k: int
    share: float


class Round(Form):
    """One block of an arm."""

    tokens: int
    seconds: float
    disturbed: bool = False


class Total(Form):
    """An arm's sums over all phases."""

    tokens: int
    seconds: float
    tokens_per_second: float | None
    acceptance_length: float | None
    drafted: int
    accepted: int
    requests: int
    outputs_equal_to_plain: int | None
    choices: tuple[ChoiceShare, ...] = ()
    ratio_to_plain: float | None


class PhaseArm(Form):
    """An arm's figures in one phase."""

    tokens: int
    seconds: float
    tokens_per_second: float | None
    acceptance_length: float | None
    drafted: int
    accepted: int
    choices: tuple[ChoiceShare, ...] = ()
    ratio_to_plain: Spread | None
    rounds: tuple[Round, ...] = ()


class Phase(Form):
    """One load over some workloads."""

    workload: str
    load: int
    rounds: int
    arms: dict[str, PhaseArm]

    @property
    def title(self) -> str:
        """Load and workload in words."""
        return f"{self.load}\u00a0× {self.workload}"


class _Settings(Form):
    target: str
    draft: str | None = None
    dtype: str = ""
    device: str = ""
    prompts: str = ""
    policy: str = ""
    warm_start_requests: float | None = None
    interrupted: bool = False


class _Document(Form):
    phases: tuple[Phase, ...]
    total: dict[str, Total]
    date: datetime
    settings: _Settings
    machine: dict[str, Any] = Field(default_factory=dict)
    versions: dict[str, str] = Field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BenchRun:
    """A measurement of arms on a real engine, in the phases that were reached."""

    name: str
    date: str
    phases: tuple[Phase, ...]
    total: Mapping[str, Total]
    facts: tuple[tuple[str, str], ...]
    warm_start_requests: float | None
    is_interrupted: bool

    @property
    def arms(self) -> tuple[str, ...]:
        """Names of the arms, in the order in which they were named."""
        return tuple(self.total)

    @property
    def fixed_arms(self) -> tuple[str, ...]:
        """Arms that speculate in one fixed way."""
        return tuple(arm for arm in self.arms if arm not in (PLAIN, ADAPTIVE))

    def best_fixed(self) -> str | None:
        """The fixed arm with the highest goodput over everything; None without one."""
        speeds = {arm: self.total[arm].tokens_per_second or 0.0 for arm in self.fixed_arms}
        return max(speeds, key=lambda arm: speeds[arm], default=None)


def read_bench(name: str, document: Mapping[str, Any], source: str) -> BenchRun:
    """``source`` names the document in errors. Raises InputError with the keys that are wrong."""
    read = read_form(_Document, document, source, "bench")
    settings, machine = read.settings, read.machine
    facts = [
        ("model", settings.target),
        ("draft model", settings.draft or ""),
        ("number format", settings.dtype),
        ("device", str(machine.get("accelerator") or machine.get("cpu") or settings.device)),
        ("cores", str(machine.get("cores") or "")),
        ("prompts", settings.prompts),
        ("policy", settings.policy),
        ("start", _start(settings.warm_start_requests)),
        ("versions", ", ".join(f"{key} {value}" for key, value in read.versions.items())),
    ]
    return BenchRun(
        name,
        moment(read.date),
        tuple(phase for phase in read.phases if phase.rounds > 0),
        read.total,
        tuple((key, value) for key, value in facts if value),
        settings.warm_start_requests,
        settings.interrupted,
    )


def _start(warm_start_requests: float | None) -> str:
    if warm_start_requests is None:
        return "cold"
    return f"warm, from a profile of {warm_start_requests:.0f} requests"
