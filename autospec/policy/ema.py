"""A moving average of the accepted length moves k between tiers, one set of tiers per load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator

from autospec.policy.base import Decision, Outcome, Policy, PolicyOptions, View, uniform
from autospec.records import ProposerInfo

_Step = Annotated[int, Field(ge=0, le=64)]


class Tiers(PolicyOptions):
    """The steps to move between from ``min_requests`` running requests on."""

    min_requests: Annotated[int, Field(ge=1)]
    candidate_steps: Annotated[tuple[_Step, ...], Field(min_length=1)]
    up_hysteresis: float = 0.0
    down_hysteresis: float = 0.0


class EmaOptions(PolicyOptions):
    """SGLang's names and defaults; ``initial_steps`` is its --speculative-num-steps."""

    name: Literal["ema"] = "ema"
    proposer: Annotated[str, Field(description="who drafts")]
    initial_steps: Annotated[int, Field(ge=0, le=64, description="k to start with")] = 3
    ema_alpha: Annotated[float, Field(gt=0, le=1, description="weight of a new step")] = 0.2
    update_interval: Annotated[int, Field(ge=1, description="steps between two moves")] = 5
    warmup_batches: Annotated[int, Field(ge=0, description="steps before the first move")] = 10
    tiers: Annotated[tuple[Tiers, ...], Field(min_length=1)] = (
        Tiers(min_requests=1, candidate_steps=(1, 3, 7), down_hysteresis=-0.25),
        Tiers(min_requests=8, candidate_steps=(0, 1, 3)),
        Tiers(min_requests=32, candidate_steps=(0, 1)),
        Tiers(min_requests=64, candidate_steps=(0,)),
    )

    @field_validator("tiers")
    @classmethod
    def _check_order(cls, tiers: tuple[Tiers, ...]) -> tuple[Tiers, ...]:
        if any(a.min_requests >= b.min_requests for a, b in pairwise(tiers)):
            raise ValueError("min_requests must rise from entry to entry")
        return tiers


def start(tiers: Tiers, initial: int) -> int:
    """The initial k where it is a tier, else the middle one."""
    steps = sorted(set(tiers.candidate_steps))
    return initial if initial in steps else steps[len(steps) // 2]


def move(steps: int, ema: float, tiers: Tiers) -> int:
    """The next k: down while ema <= lower tier - 1/2, else up while ema > this tier - 1/2.

    From 0 it always tries the next tier, since nothing is accepted there; to 0 at ema <= 1/2.
    """
    candidates = sorted(set(tiers.candidate_steps))
    at = first = candidates.index(steps)
    if steps == 0:
        return candidates[min(1, len(candidates) - 1)]
    while at > 0 and ema <= max(candidates[at - 1] - 0.5, 0.5) + tiers.down_hysteresis:
        at -= 1
    while first <= at < len(candidates) - 1 and ema > candidates[at] - 0.5 + tiers.up_hysteresis:
        at += 1
    return candidates[at]


class Ema(Policy[EmaOptions]):
    """SGLang 0.5.23 ``AdaptiveSpeculativeParams`` (srt/speculative/adaptive_spec_params.py)."""

    def __init__(
        self, options: EmaOptions, proposers: Sequence[ProposerInfo], rng: np.random.Generator
    ) -> None:
        super().__init__(options, proposers, rng)
        self._steps = [start(tiers, options.initial_steps) for tiers in options.tiers]
        self._ema = [steps - 1.0 for steps in self._steps]
        self._batches = [0 for _ in options.tiers]

    def _place(self, requests: int) -> int:
        return max(0, sum(tier.min_requests <= requests for tier in self.options.tiers) - 1)

    def decide(self, view: View) -> Decision:
        """The load's k for everybody."""
        k = self._steps[self._place(view.requests)]
        return uniform(view, self.index_of(self.options.proposer), k)

    def learn(self, outcome: Outcome) -> None:
        """Average the accepted length of the requests that drafted; move every few steps."""
        if outcome.requests == 0:
            return
        at, options = self._place(outcome.requests), self.options
        accepted, was = outcome.accepted[outcome.verified > 0], self._steps[at]
        if was > 0 and len(accepted):
            self._ema[at] += options.ema_alpha * (float(accepted.mean()) - self._ema[at])
        self._batches[at] += 1
        since = self._batches[at] - options.warmup_batches
        if since > 0 and since % options.update_interval == 0:
            self._steps[at] = move(was, self._ema[at], options.tiers[at])
            if was == 0 and self._steps[at] > 0 and self._ema[at] < 0.0:
                self._ema[at] = self._steps[at] - 1.0

    def wants_offers(self) -> NDArray[np.bool_]:
        """The chosen lookup alone."""
        return self.lookup_alone(self.index_of(self.options.proposer))

    def state(self) -> Mapping[str, Any]:
        """Where every set of tiers stands."""
        return {"steps": [*self._steps], "ema": [*self._ema], "batches": [*self._batches]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved ``state``."""
        self._steps, self._ema = list(state["steps"]), list(state["ema"])
        self._batches = list(state["batches"])
