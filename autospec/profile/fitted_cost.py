"""The step-cost model that a profile holds, as a controller would start from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from autospec.cost import coefficients
from autospec.cost.step_cost import LAYOUT, StepCost
from autospec.errors import ProfileError
from autospec.octave import NUM_OCTAVES
from autospec.profile.learned import Profile
from autospec.records import EngineInfo, Float64Array, ProposerInfo
from autospec.replay.cost_file import LOOKUPS

DRAFT_LENGTHS = (1, 4)
"""Tokens for each request whose verifying and drafting is told."""


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
    """The step-cost model, the models that draft in its order, and the means it was fitted to."""

    model: StepCost
    names: tuple[str, ...]
    cells: tuple[CostCell, ...]


@dataclass(frozen=True, slots=True)
class LoadTimes:
    """What the model says of so many running requests with the context that they had.

    ``verifying_seconds`` is how much longer than a plain step verifying takes, ``drafting_seconds``
    what drafting takes, by model; both where every request has a draft, of each ``DRAFT_LENGTHS``.
    """

    requests: int
    steps: float
    plain_seconds: float
    verifying_seconds: tuple[float, ...]
    drafting_seconds: Mapping[str, tuple[float, ...]]


def cost_fit(source: str, profile: Profile) -> CostFit | None:
    """None where too few steps were counted. Raises ProfileError, which names ``source``."""
    if profile.cost_layout != LAYOUT:
        raise ProfileError(
            f"{source}: cost_layout is {profile.cost_layout}, this AutoSpec reads {LAYOUT}"
        )
    statistics = profile.cost.get("step")
    if statistics is None:
        return None
    try:
        gram, moment, weight = statistics["gram"], statistics["moment"], statistics["weight"]
        reference = statistics["reference"]
    except KeyError as error:
        raise ProfileError(f"{source}: cost.step lacks {error}") from None
    models = (gram.shape[-1] - coefficients.NUM_VERIFY) // coefficients.NUM_DRAFT
    if gram.shape[0] != 2 * NUM_OCTAVES + models or reference[-1] <= 0.0:
        return None
    proposers = _proposers(profile, models)
    model = StepCost(proposers, _engine(profile))
    model.load(statistics)
    cells = tuple(
        _cell(index, float(weight[index]), gram[index], moment[index], model.beta)
        for index in range(2 * NUM_OCTAVES)
        if weight[index] >= 1.0 and gram[index, 0, 0] > 0.0
    )
    return CostFit(model, tuple(info.name for info in proposers), cells) if cells else None


def load_times(fit: CostFit) -> tuple[LoadTimes, ...]:
    """At the upper end of every octave of load that had steps."""
    return tuple(_load_times(fit, octave) for octave in sorted({each.octave for each in fit.cells}))


def _load_times(fit: CostFit, octave: int) -> LoadTimes:
    cells = [each for each in fit.cells if each.octave == octave]
    requests = 1 << octave
    steps = sum(each.steps for each in cells)
    cached = sum(each.context_tokens / max(1.0, each.requests) * each.steps for each in cells)
    context = round(requests * cached / steps)
    plain = fit.model.plain_seconds(requests, context)
    return LoadTimes(
        requests,
        steps,
        plain,
        tuple(
            fit.model.verify_seconds((1 + k) * requests, requests, context, speculating=True)
            - plain
            for k in DRAFT_LENGTHS
        ),
        {
            name: tuple(_drafting_seconds(fit, p, k, requests) for k in DRAFT_LENGTHS)
            for p, name in enumerate(fit.names)
        },
    )


def _drafting_seconds(fit: CostFit, proposer: int, k: int, requests: int) -> float:
    depth, tokens, none = np.zeros((3, len(fit.names)))
    depth[proposer], tokens[proposer] = k, k * requests
    return fit.model.drafting_seconds(depth, tokens, none)


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
