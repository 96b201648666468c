"""What a profile knows: acceptance counts by position, and what steps cost."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from autospec.acceptance import hazard_table
from autospec.cost import step_cost
from autospec.errors import ProfileError
from autospec.outlook import Outlook, outlook
from autospec.profile.file import load_profile
from autospec.profile.fitted_cost import CostFit, cost_fit
from autospec.profile.learned import Profile, Statistics
from autospec.profile.tuned import Tuning
from autospec.report.readers.counts import POSITIONS, Counts
from autospec.report.wording import moment


@dataclass(frozen=True, slots=True)
class ProfileCounts:
    """A profile as a report reads it: requests by workload, counts by workload and proposer.

    ``outlooks`` are by workload, where the profile says enough; ``tuned`` is what a tuning added.
    """

    name: str
    date: str
    identity: tuple[tuple[str, str], ...]
    requests: Mapping[str, float]
    counts: Mapping[tuple[str, str], Counts]
    cost: CostFit | None
    provenance: tuple[str, ...]
    outlooks: Mapping[str, Outlook]
    tuned: Tuning | None


def read_profile(name: str, path: Path) -> ProfileCounts:
    """Raises ProfileError."""
    profile = load_profile(path)
    if profile.acceptance_layout != hazard_table.LAYOUT or profile.cost_layout != step_cost.LAYOUT:
        raise ProfileError(
            f"{path}: layouts are {profile.acceptance_layout} and {profile.cost_layout}, this "
            f"AutoSpec draws {hazard_table.LAYOUT} and {step_cost.LAYOUT}"
        )
    identity = profile.identity
    return ProfileCounts(
        name,
        moment(datetime.fromtimestamp(profile.updated, timezone.utc)),
        (
            ("model", identity.target),
            ("proposers", ", ".join(identity.proposers)),
            ("engine", f"{identity.engine} {identity.version}"),
            ("device", identity.device),
            ("number format", identity.dtype),
        ),
        {label: workload.requests for label, workload in profile.workloads.items()},
        {
            (label, proposer): _counts(path, statistics)
            for label, workload in profile.workloads.items()
            for proposer, statistics in workload.proposers.items()
        },
        cost_fit(str(path), profile),
        profile.provenance,
        _outlooks(profile),
        profile.tuned,
    )


def _outlooks(profile: Profile) -> dict[str, Outlook]:
    """What it lets predict, by workload; those that it says too little of are left out."""
    found = {}
    for label in profile.workloads if profile.tuned is None else profile.tuned.workloads:
        with contextlib.suppress(ProfileError):
            found[label] = outlook(profile, label)
    return found


def _counts(path: Path, statistics: Statistics) -> Counts:
    """Counts by position, whatever the confidence. A model's are those of its real drafts."""
    try:
        successes, trials = statistics["successes"], statistics["trials"]
        drafted = statistics.get("draft_trials")
        if drafted is not None and drafted.sum() > trials.sum():
            # Of a model whose drafts know their confidence: probes of what would be cut as well.
            successes, trials = statistics["draft_successes"], drafted
    except KeyError as error:
        raise ProfileError(f"{path}: acceptance counts lack {error}") from None
    if successes.shape[:1] != (len(POSITIONS),) or trials.shape != successes.shape:
        raise ProfileError(
            f"{path}: acceptance counts have {successes.shape} and {trials.shape} cells, "
            f"{len(POSITIONS)} positions are expected"
        )
    return Counts(
        tuple(each.name for each in POSITIONS),
        tuple(successes.sum(axis=1).tolist()),
        tuple(trials.sum(axis=1).tolist()),
    )
