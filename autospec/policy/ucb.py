"""UCBSpec: the arm with the highest upper confidence bound."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from autospec.policy.arms import ArmsOptions, ArmsPolicy
from autospec.policy.base import View
from autospec.records import Float64Array, ProposerInfo


class UcbOptions(ArmsOptions):
    """``exploration`` 1 is the published radius for rewards between 0 and the best arm's."""

    name: Literal["ucb"] = "ucb"
    exploration: Annotated[
        float, Field(ge=0, le=10, description="factor on the confidence radius")
    ] = 1.0
    delta: Annotated[
        float, Field(gt=0, lt=1, description="probability that a bound may be wrong")
    ] = 0.05


def confidence_radius(pulls: Float64Array, rounds: int, arms: int, delta: float) -> Float64Array:
    """For rewards that span 1: sqrt((1 + n) / n^2 (1 + 2 ln(K t^2 sqrt(1 + n) / delta))) / 2."""
    log = np.log(arms * rounds**2 * np.sqrt(1.0 + pulls) / delta)
    radius: Float64Array = np.sqrt((1.0 + pulls) / pulls**2 * (1.0 + 2.0 * log)) / 2.0
    return radius


class Ucb(ArmsPolicy[UcbOptions]):
    """BanditSpec, arXiv 2505.15141, algorithm 4, with throughput as the reward (its section 6.2).

    Each arm is tried once; then the largest rate + radius, where rate is an arm's tokens over its
    seconds and the radius is in units of the best rate. A round is one request's step, so a batch
    of n is n rounds at once.
    """

    def __init__(
        self, options: UcbOptions, proposers: Sequence[ProposerInfo], rng: np.random.Generator
    ) -> None:
        super().__init__(options, proposers, rng)
        self._pulls, self._tokens, self._seconds = np.zeros((3, len(self.arms)))

    def choose(self, view: View | None) -> int:
        """The first arm never tried, else the highest bound."""
        if not self._pulls.all():
            return int(np.argmin(self._pulls > 0.0))
        rates = self._tokens / self._seconds
        rounds = math.ceil(self._pulls.sum())
        radius = confidence_radius(self._pulls, rounds, len(self.arms), self.options.delta)
        return int(np.argmax(rates + self.options.exploration * rates.max() * radius))

    def credit(self, arm: int, tokens: float, seconds: float, requests: int) -> None:
        """Add the step to its arm."""
        self._pulls[arm] += requests
        self._tokens[arm] += tokens
        self._seconds[arm] += seconds

    def state(self) -> Mapping[str, Any]:
        """The arms' sums."""
        sums = {"pulls": self._pulls, "tokens": self._tokens, "seconds": self._seconds}
        return {**super().state(), **{key: value.tolist() for key, value in sums.items()}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved ``state``."""
        super().restore(state)
        self._pulls = np.array(state["pulls"])
        self._tokens = np.array(state["tokens"])
        self._seconds = np.array(state["seconds"])
