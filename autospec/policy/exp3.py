"""EXP3Spec: exponential weights over importance-weighted losses."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from autospec.policy.arms import ArmsOptions, ArmsPolicy
from autospec.policy.base import View
from autospec.records import Float64Array, ProposerInfo


class Exp3Options(ArmsOptions):
    """Nothing but the arms: the learning rate is the published one."""

    name: Literal["exp3"] = "exp3"


def losses(tokens: Float64Array, seconds: Float64Array, rounds: int) -> Float64Array:
    """Cumulated losses [arms] of ``rounds`` rounds: how far an arm's rate is below the best one's,
    as a share of the range of rates; 0 for an arm without any time, as it is for the best."""
    tried = seconds > 0.0
    rates = np.divide(tokens, seconds, out=np.zeros_like(tokens), where=tried)
    if not tried.any():
        return rates
    best, worst = rates[tried].max(), rates[tried].min()
    if best == worst:
        return np.zeros_like(rates)
    return np.where(tried, rounds * (best - rates) / (best - worst), 0.0)


class Exp3(ArmsPolicy[Exp3Options]):
    """BanditSpec, arXiv 2505.15141, algorithm 5: p ~ exp(-eta L), eta = sqrt(ln K / (t K)).

    The published loss of a round is (L + 1 - accepted) / (L p), which ignores time. Here tokens
    and seconds are each weighted by 1 / p and an arm's rate is the ratio of their sums.
    """

    def __init__(
        self, options: Exp3Options, proposers: Sequence[ProposerInfo], rng: np.random.Generator
    ) -> None:
        super().__init__(options, proposers, rng)
        self._tokens, self._seconds = np.zeros((2, len(self.arms)))
        self._rounds = 0

    def probabilities(self) -> Float64Array:
        """Of each arm in the next step."""
        count = len(self.arms)
        eta = math.sqrt(math.log(count) / (max(1, self._rounds) * count))
        lost = losses(self._tokens, self._seconds, self._rounds)
        weights = np.exp(-eta * (lost - lost.min()))
        chances: Float64Array = weights / weights.sum()
        return chances

    def choose(self, view: View | None) -> int:
        """Draw an arm."""
        return int(self.rng.choice(len(self.arms), p=self.probabilities()))

    def credit(self, arm: int, tokens: float, seconds: float, requests: int) -> None:
        """Add the step to its arm, weighted by how likely it was."""
        chance = float(self.probabilities()[arm])
        self._tokens[arm] += tokens / chance
        self._seconds[arm] += seconds / chance
        self._rounds += 1

    def state(self) -> Mapping[str, Any]:
        """The arms' weighted sums."""
        return {
            **super().state(),
            "tokens": self._tokens.tolist(),
            "seconds": self._seconds.tolist(),
            "rounds": self._rounds,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved ``state``."""
        super().restore(state)
        self._tokens = np.array(state["tokens"])
        self._seconds = np.array(state["seconds"])
        self._rounds = state["rounds"]
