"""What was learned: statistics matched by identity, faded by age, merged by adding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TypeAlias

from autospec.errors import ProfileMismatch
from autospec.profile.tuned import Tuning
from autospec.records import EngineInfo, Float64Array, ProposerInfo

SECONDS_PER_DAY = 86_400.0

Statistics: TypeAlias = Mapping[str, Float64Array]
"""Named arrays that add up: counts, weighted sums. What they mean is their section's layout."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What a profile was learned on. Statistics of another identity say nothing here."""

    target: str
    proposers: tuple[str, ...]
    engine: str
    version: str
    device: str
    dtype: str

    @classmethod
    def of(cls, engine: EngineInfo, proposers: tuple[ProposerInfo, ...]) -> Identity:
        """Identity of a running engine; the order of its proposers does not matter."""
        return cls(
            target=engine.target,
            proposers=tuple(sorted(info.name for info in proposers)),
            engine=engine.engine,
            version=engine.version,
            device=engine.device,
            dtype=engine.dtype,
        )

    def require(self, other: Identity) -> None:
        """Raise ProfileMismatch that names the first field in which ``other`` differs."""
        for each in fields(self):
            mine, theirs = getattr(self, each.name), getattr(other, each.name)
            if mine != theirs:
                raise ProfileMismatch(
                    f"profile does not fit: {each.name} is {shown(theirs)}, expected {shown(mine)}"
                )


@dataclass(frozen=True, slots=True)
class WorkloadProfile:
    """One workload's acceptance statistics by proposer, and how many requests they come from."""

    requests: float = 0.0
    proposers: Mapping[str, Statistics] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Profile:
    """Everything learned about one identity; counts are as of ``updated`` (unix seconds).

    ``acceptance_layout`` and ``cost_layout`` name the meaning of the arrays ("acceptance/1"), so
    that a later AutoSpec with other estimators refuses them rather than misreads them.
    ``cost`` is by engine part. ``provenance`` lists where the statistics come from. ``tuned`` is
    what ``autospec tune`` found, None in a profile that was learned while serving alone. One that
    ``outdates_cost`` was learned after all steps had changed: added to a file, it takes the place
    of what that says of cost.
    """

    identity: Identity
    acceptance_layout: str
    cost_layout: str
    workloads: Mapping[str, WorkloadProfile]
    cost: Mapping[str, Statistics]
    provenance: tuple[str, ...]
    updated: float
    tuned: Tuning | None = None
    outdates_cost: bool = False

    def require(self, identity: Identity, acceptance_layout: str, cost_layout: str) -> None:
        """Raise ProfileMismatch unless this was learned on ``identity`` with these layouts."""
        identity.require(self.identity)
        for name, mine, wanted in (
            ("acceptance_layout", self.acceptance_layout, acceptance_layout),
            ("cost_layout", self.cost_layout, cost_layout),
        ):
            if mine != wanted:
                raise ProfileMismatch(
                    f"profile does not fit: {name} is {shown(mine)}, expected {shown(wanted)}"
                )

    def faded(self, now: float, half_life_days: float | None) -> Profile:
        """The profile as of ``now``: statistics halve every ``half_life_days``; None keeps them.

        A clock that went back changes nothing.
        """
        age_days = max(0.0, now - self.updated) / SECONDS_PER_DAY
        weight = 1.0 if half_life_days is None else 0.5 ** (age_days / half_life_days)
        return replace(
            self,
            workloads={
                label: WorkloadProfile(
                    workload.requests * weight,
                    {name: _scaled(each, weight) for name, each in workload.proposers.items()},
                )
                for label, workload in self.workloads.items()
            },
            cost={part: _scaled(each, weight) for part, each in self.cost.items()},
            updated=max(self.updated, now),
        )


def merge(first: Profile, second: Profile, half_life_days: float | None = None) -> Profile:
    """Both profiles' statistics added up, as of the newer one's time. Order does not matter.

    Raises ProfileMismatch when identity, layout or the shape of an array differs.
    """
    second.require(first.identity, first.acceptance_layout, first.cost_layout)
    now = max(first.updated, second.updated)
    mine, theirs = first.faded(now, half_life_days), second.faded(now, half_life_days)
    workloads = {
        label: _merged_workloads(
            label,
            mine.workloads.get(label, WorkloadProfile()),
            theirs.workloads.get(label, WorkloadProfile()),
        )
        for label in sorted({*mine.workloads, *theirs.workloads})
    }
    return replace(
        mine,
        workloads=workloads,
        cost=_merged_groups("cost", mine.cost, theirs.cost),
        provenance=tuple(sorted({*mine.provenance, *theirs.provenance})),
        updated=now,
        tuned=_newer(first.tuned, second.tuned),
    )


def _newer(first: Tuning | None, second: Tuning | None) -> Tuning | None:
    """The later of two tunings: settings do not add up."""
    found = [each for each in (first, second) if each is not None]
    return max(found, key=lambda each: (each.provenance.date, str(each)), default=None)


def _merged_workloads(
    label: str, first: WorkloadProfile, second: WorkloadProfile
) -> WorkloadProfile:
    return WorkloadProfile(
        requests=first.requests + second.requests,
        proposers=_merged_groups(f"workloads.{label}", first.proposers, second.proposers),
    )


def _merged_groups(
    place: str, first: Mapping[str, Statistics], second: Mapping[str, Statistics]
) -> dict[str, Statistics]:
    return {
        name: _added(f"{place}.{name}", first.get(name, {}), second.get(name, {}))
        for name in sorted({*first, *second})
    }


def _added(place: str, first: Statistics, second: Statistics) -> Statistics:
    if not first or not second:
        return dict(first or second)
    if set(first) != set(second):
        raise ProfileMismatch(
            f"profile does not fit: {place} has {shown(tuple(sorted(second)))}, "
            f"expected {shown(tuple(sorted(first)))}"
        )
    for name in first:
        if first[name].shape != second[name].shape:
            raise ProfileMismatch(
                f"profile does not fit: {place}.{name} has shape {second[name].shape}, "
                f"expected {first[name].shape}"
            )
    return {name: first[name] + second[name] for name in sorted(first)}


def _scaled(statistics: Statistics, weight: float) -> Statistics:
    return {name: array * weight for name, array in statistics.items()}


def shown(value: object) -> str:
    """A value as errors name it."""
    text = ", ".join(value) if isinstance(value, tuple) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
