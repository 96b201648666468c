"""Nightjar: a bandit per batch size that explores in ever longer blocks and prices switching."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from autospec.cost.coefficients import CATCH_UP
from autospec.policy.arms import ArmsOptions, ArmsPolicy
from autospec.policy.base import View
from autospec.records import NO_PROPOSER, Float64Array, ProposerInfo


class NightjarOptions(ArmsOptions):
    """``by`` is what counts as one batch size: the number itself (published) or its octave."""

    name: Literal["nightjar"] = "nightjar"
    by: Annotated[Literal["size", "octave"], Field(description="context of the bandit")] = "size"


@dataclass(slots=True)
class Context:
    """What is known at one batch size. Block j has 2^(j-1) steps in bins of its square root."""

    tokens: list[float]
    seconds: list[float]
    block: int = 1
    bin: int = 0
    bin_steps_left: int = 0
    block_steps_left: int = 1
    arm: int = 0

    def next_bin(self) -> None:
        """Go on to the next bin, and to the next block where this one is used up."""
        if self.block_steps_left <= 0:
            self.block, self.bin = self.block + 1, 0
            self.block_steps_left = 2 ** (self.block - 1)
        self.bin += 1
        self.bin_steps_left = math.ceil(math.sqrt(2 ** (self.block - 1)))


class Nightjar(ArmsPolicy[NightjarOptions]):
    """arXiv 2512.22420 (ADA-BINGREEDY): bin b of a block explores with probability 1 / b.

    Else it takes the least seconds per token, 1 / goodput + [was off and drafts now] C / k. The
    arm is kept for the whole bin. C is the catch-up of a model's cache as the engine's own step
    costs price it, where the paper has a table measured beforehand; lookups owe none.
    """

    chooses_ahead: ClassVar[bool] = False

    def __init__(
        self, options: NightjarOptions, proposers: Sequence[ProposerInfo], rng: np.random.Generator
    ) -> None:
        super().__init__(options, proposers, rng)
        self._contexts: dict[int, Context] = {}
        self._was_off = False

    def choose(self, view: View | None) -> int:
        """The bin's arm; at its start a new one."""
        assert view is not None
        context = self._context(view.requests)
        if context.bin_steps_left <= 0:
            context.next_bin()
            context.arm = self._arm_of_bin(context, view)
        context.bin_steps_left -= 1
        context.block_steps_left -= 1
        self._was_off = self.arms[context.arm].proposer == NO_PROPOSER
        return context.arm

    def _arm_of_bin(self, context: Context, view: View) -> int:
        seconds = np.array(context.seconds)
        if not seconds.all():
            return int(np.argmin(seconds > 0.0))
        if self.rng.random() < 1.0 / context.bin:
            return int(self.rng.integers(len(self.arms)))
        return int(np.argmin(seconds / np.array(context.tokens) + self._switching(view)))

    def _switching(self, view: View) -> Float64Array:
        """Seconds [arms] that turning each arm on costs now, spread over its k."""
        seconds = np.zeros(len(self.arms))
        if self._was_off:
            per_token = view.cost.draft_coefficients[:, CATCH_UP]
            for a, (p, k) in enumerate(self.arms):
                if p != NO_PROPOSER:
                    seconds[a] = per_token[p] * float(view.stale_tokens[p].sum()) / k
        return seconds

    def credit(self, arm: int, tokens: float, seconds: float, requests: int) -> None:
        """Add the step to its arm at its batch size."""
        context = self._context(requests)
        context.tokens[arm] += tokens
        context.seconds[arm] += seconds

    def _context(self, requests: int) -> Context:
        key = requests if self.options.by == "size" else (requests - 1).bit_length()
        zeros = [0.0] * len(self.arms)
        return self._contexts.setdefault(key, Context(zeros, zeros.copy()))

    def state(self) -> Mapping[str, Any]:
        """Every batch size's sums and where it is in its blocks."""
        contexts = [[key, asdict(context)] for key, context in self._contexts.items()]
        return {**super().state(), "contexts": contexts, "was_off": self._was_off}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved ``state``."""
        super().restore(state)
        self._contexts = {key: Context(**context) for key, context in state["contexts"]}
        self._was_off = state["was_off"]
