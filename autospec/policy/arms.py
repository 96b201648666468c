"""Arms of a bandit: every (proposer, k) worth trying, and plain decoding."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from autospec.policy.base import NO_ARM, Decision, Outcome, Policy, PolicyOptions, View, uniform
from autospec.records import NO_PROPOSER, ProposerInfo


class ArmsOptions(PolicyOptions):
    """Which arms there are; a proposer that the engine has not is left out."""

    proposers: Annotated[
        tuple[str, ...] | None, Field(min_length=1, description="who may draft; null for all")
    ] = None
    ks: Annotated[
        tuple[Annotated[int, Field(ge=1, le=64)], ...],
        Field(min_length=1, description="draft tokens to try, as far as a proposer can"),
    ] = (1, 2, 4, 8)
    off: Annotated[bool, Field(description="whether plain decoding is an arm")] = True


class Arm(NamedTuple):
    """One proposer and one k for the whole batch; NO_PROPOSER is plain decoding."""

    proposer: int
    k: int


def make_arms(options: ArmsOptions, proposers: Sequence[ProposerInfo]) -> tuple[Arm, ...]:
    """Plain decoding, then each proposer's ladder; plain decoding alone if nobody can draft."""
    arms = [
        Arm(p, k)
        for p, info in enumerate(proposers)
        if options.proposers is None or info.name in options.proposers
        for k in sorted({min(k, info.max_k) for k in options.ks if info.max_k > 0})
    ]
    if options.off or not arms:
        arms.insert(0, Arm(NO_PROPOSER, 0))
    return tuple(arms)


ArmsOptionsT = TypeVar("ArmsOptionsT", bound=ArmsOptions)


class ArmsPolicy(Policy[ArmsOptionsT]):
    """A bandit: one arm per step for the whole batch. A policy writes ``choose`` and ``credit``.

    Steps without a usable time and steps that also prefill teach nothing. Where the choice does
    not depend on the batch it is made before the lookups draft, so that only its own drafts.
    """

    chooses_ahead: ClassVar[bool] = True

    def __init__(
        self, options: ArmsOptionsT, proposers: Sequence[ProposerInfo], rng: np.random.Generator
    ) -> None:
        super().__init__(options, proposers, rng)
        self.arms = make_arms(options, proposers)
        self._ahead: int | None = None

    @abstractmethod
    def choose(self, view: View | None) -> int:
        """The arm of the next step; ``view`` is None when it is chosen ahead."""

    @abstractmethod
    def credit(self, arm: int, tokens: float, seconds: float, requests: int) -> None:
        """A step of ``arm`` with ``requests`` running committed ``tokens`` in ``seconds``."""

    def decide(self, view: View) -> Decision:
        """The chosen arm for everybody; rows without a lookup's offer do not speculate."""
        if view.requests == 0:
            return uniform(view, NO_PROPOSER, 0)
        arm = self.choose(view) if self._ahead is None else self._ahead
        self._ahead = None
        return uniform(view, *self.arms[arm])._replace(arm=arm)

    def learn(self, outcome: Outcome) -> None:
        """Credit the arm that was tried."""
        seconds, tokens = outcome.step_seconds, float(outcome.committed.sum())
        usable = math.isfinite(seconds) and seconds > 0.0 and tokens > 0.0
        if usable and not outcome.has_prefill and outcome.arm != NO_ARM:
            self.credit(outcome.arm, tokens, seconds, outcome.requests)

    def wants_offers(self) -> NDArray[np.bool_]:
        """The chosen arm's lookup; any arm's where the choice waits for the batch."""
        if self.chooses_ahead and self._ahead is None:
            self._ahead = self.choose(None)
        arms = self.arms if self._ahead is None else (self.arms[self._ahead],)
        wanted = np.zeros_like(self.lookup)
        drafting = [arm.proposer for arm in arms if arm.proposer != NO_PROPOSER]
        wanted[drafting] = self.lookup[drafting]
        return wanted

    def state(self) -> Mapping[str, Any]:
        """The random numbers to come and the choice made ahead."""
        return {"rng": self.rng.bit_generator.state, "ahead": self._ahead}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved ``state``."""
        self.rng.bit_generator.state = state["rng"]
        self._ahead = state["ahead"]
