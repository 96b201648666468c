"""What a controller decided and what came of it, step by step, for those who measure."""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from autospec.bench.phases import OFF, PLAIN, Choice
from autospec.controller import Controller
from autospec.records import BatchState, Float32Array, Int16Array, Plan, Request, StepResult


class Tap:
    """A controller as a decoder sees it, which notes what each step did."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._names = tuple(info.name for info in controller.proposers)
        self.choices: Counter[Choice] = Counter()
        self.drafted = 0
        self.accepted = 0
        self.last: Counter[Choice] = Counter()
        self.mode = PLAIN
        self._step: tuple[Plan, StepResult] | None = None

    @property
    def k_max(self) -> int:
        return self._controller.k_max

    def start(self, request: Request) -> int:
        return self._controller.start(request)

    def wants_offers(self) -> NDArray[np.bool_]:
        return self._controller.wants_offers()

    def plan(self, state: BatchState) -> Plan:
        return self._controller.plan(state)

    def trim(self, plan: Plan, drafted: Int16Array, confidence: Float32Array) -> Plan:
        return self._controller.trim(plan, drafted, confidence)

    def observe(self, plan: Plan, result: StepResult) -> None:
        self._controller.observe(plan, result)
        self._step = plan, result

    def count_step(self) -> None:
        """Count what the last step did; called outside the timed part."""
        if self._step is None:  # a step of prompts alone
            self.last = Counter()
            return
        plan, result = self._step
        self._step = None
        verified = result.verified.tolist()
        self.last = Counter(
            Choice(self._names[proposer], k) if k > 0 and proposer >= 0 else Choice(OFF, 0)
            for proposer, k in zip(plan.proposer.tolist(), verified, strict=True)
        )
        self.choices.update(self.last)
        self.drafted += sum(verified)
        self.accepted += int(np.sum(result.accepted))
        self.mode = plan.mode

    def finish(self, handle: int) -> None:
        self._controller.finish(handle)

    def clear(self) -> None:
        self.choices, self.drafted, self.accepted = Counter(), 0, 0
