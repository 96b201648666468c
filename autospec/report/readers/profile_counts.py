"""What a profile knows: acceptance counts by position, and what steps cost."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import numpy as np

from autospec.acceptance import hazard_table
from autospec.cost import coefficients, step_cost
from autospec.cost.step_cost import StepCost
from autospec.errors import ProfileError
from autospec.octave import NUM_OCTAVES
from autospec.outlook import Outlook, outlook
from autospec.profile.file import load_profile
from autospec.profile.learned import Profile, Statistics
from autospec.profile.tuned import Tuning
from autospec.records import EngineInfo, Float64Array, ProposerInfo
from autospec.replay.cost_file import LOOKUPS
from autospec.report.readers.counts import POSITIONS, Counts
from autospec.report.wording import moment


@dataclass(frozen=True, slots=True)
class CostCell:
    """Mean of the steps of one octave of load, plain or speculative, and the model's time for it.

    Means are weighted as the fit weighs steps, by 1 / seconds squared.
    """

    octave: int
    is_speculative: bool
    steps: float
    tokens: float
    requests: float
    context_tokens: float
    seconds: float
    predicted_seconds: float


@dataclass(frozen=True, slots=True)
class CostFit:
    """The step-cost model that a profile holds, and the means it was fitted to."""

    model: StepCost
    cells: tuple[CostCell, ...]


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
        _cost_fit(path, profile),
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


def _cost_fit(path: Path, profile: Profile) -> CostFit | None:
    """The model as a controller would start from it; None where no step was counted."""
    statistics = profile.cost.get("step")
    if statistics is None:
        return None
    try:
        gram, moment, weight = statistics["gram"], statistics["moment"], statistics["weight"]
        reference = statistics["reference"]
    except KeyError as error:
        raise ProfileError(f"{path}: cost.step lacks {error}") from None
    models = (gram.shape[-1] - coefficients.NUM_VERIFY) // coefficients.NUM_DRAFT
    if gram.shape[0] != 2 * NUM_OCTAVES + models or reference[-1] <= 0.0:
        return None
    model = StepCost(_proposers(profile, models), _engine(profile))
    model.load(statistics)
    cells = tuple(
        _cell(index, float(weight[index]), gram[index], moment[index], model.beta)
        for index in range(2 * NUM_OCTAVES)
        if weight[index] >= 1.0 and gram[index, 0, 0] > 0.0
    )
    return CostFit(model, cells) if cells else None


def _proposers(profile: Profile, models: int) -> list[ProposerInfo]:
    """As many models as the statistics are about; which are lookups, their names say."""
    names = [name for name in profile.identity.proposers if name not in LOOKUPS][:models]
    names += [f"model {number}" for number in range(len(names), models)]
    return [ProposerInfo(name, "sequential", 1) for name in names]


def _engine(profile: Profile) -> EngineInfo:
    known = profile.identity
    return EngineInfo(known.target, known.engine, known.version, known.device, known.dtype)


def _cell(
    index: int, steps: float, gram: Float64Array, moment: Float64Array, beta: Float64Array
) -> CostCell:
    means = gram[coefficients.FIXED] / gram[coefficients.FIXED, coefficients.FIXED]
    return CostCell(
        octave=index % NUM_OCTAVES,
        is_speculative=index >= NUM_OCTAVES,
        steps=steps,
        tokens=float(means[coefficients.SLOPES : coefficients.CONTEXT].sum()),
        requests=float(means[coefficients.REQUESTS]),
        context_tokens=float(means[coefficients.CONTEXT]),
        seconds=float(moment[coefficients.FIXED] / gram[coefficients.FIXED, coefficients.FIXED]),
        predicted_seconds=float(np.dot(means, beta)),
    )
