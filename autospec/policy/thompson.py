"""Thompson sampling on goodput, forgetting the past."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from autospec.policy.arms import ArmsOptions, ArmsPolicy
from autospec.policy.base import View
from autospec.records import Float64Array, ProposerInfo

_COUNT, _TOKENS, _SECONDS, _TOKENS_SQUARED, _PRODUCT, _SECONDS_SQUARED = range(6)
_LEAST_WEIGHT = 0.5  # of an arm's steps after forgetting; below it the arm is new again


class ThompsonOptions(ArmsOptions):
    """``discount`` is the share of its weight that a step keeps at every later one."""

    name: Literal["thompson"] = "thompson"
    discount: Annotated[float, Field(gt=0, le=1)] = 0.999


def rate_and_deviation(sums: Float64Array) -> tuple[Float64Array, Float64Array]:
    """Posterior mean and standard deviation of each arm's goodput, from its sums [6, arms].

    Mean: tokens / seconds. Variance: sum (tokens - mean seconds)^2 / (sum seconds)^2, with the
    residuals relative to the mean pooled over the arms.
    """
    rate = sums[_TOKENS] / sums[_SECONDS]
    squares = sums[_TOKENS_SQUARED] - 2.0 * rate * sums[_PRODUCT] + rate**2 * sums[_SECONDS_SQUARED]
    mean_tokens = sums[_TOKENS] / sums[_COUNT]
    noise = max(0.0, float((squares / mean_tokens**2).sum() / sums[_COUNT].sum()))
    return rate, rate * np.sqrt(noise / sums[_COUNT])


class Thompson(ArmsPolicy[ThompsonOptions]):
    """Discounted Thompson sampling with Gaussian posteriors (arXiv 2305.10718).

    Every step discounts all arms, draws a goodput for each and plays the largest draw. An arm
    that was never tried, or so long ago that nothing is left of it, is played first.
    """

    def __init__(
        self, options: ThompsonOptions, proposers: Sequence[ProposerInfo], rng: np.random.Generator
    ) -> None:
        super().__init__(options, proposers, rng)
        self._sums = np.zeros((6, len(self.arms)))

    def choose(self, view: View | None) -> int:
        """The first forgotten arm, else the best draw."""
        forgotten = self._sums[_COUNT] < _LEAST_WEIGHT
        if forgotten.any():
            return int(np.argmax(forgotten))
        rate, deviation = rate_and_deviation(self._sums)
        return int(np.argmax(self.rng.normal(rate, deviation)))

    def credit(self, arm: int, tokens: float, seconds: float, requests: int) -> None:
        """Discount everything, then add the step to its arm."""
        self._sums *= self.options.discount
        step = (1.0, tokens, seconds, tokens * tokens, tokens * seconds, seconds * seconds)
        self._sums[:, arm] += step

    def state(self) -> Mapping[str, Any]:
        """The arms' discounted sums."""
        return {**super().state(), "sums": self._sums.tolist()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved ``state``."""
        super().restore(state)
        self._sums = np.array(state["sums"])
