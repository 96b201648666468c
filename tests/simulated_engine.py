"""A server loop without a model: drafts come true at known rates, on a clock of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autospec.controller import Controller
from autospec.records import BatchState, EngineInfo, Plan, ProposerInfo, Request, StepResult

ENGINE = EngineInfo("target", "simulated", "1", "cpu", "float64")
PROMPT = np.arange(40, dtype=np.int32)


@dataclass
class Drafter:
    """A proposer whose token at position j is right with ``hazards[j]``, given those before.

    Lookups offer ``offer`` tokens with probability ``fires``. Times in seconds.
    """

    info: ProposerInfo
    hazards: Sequence[float]
    fires: float = 1.0
    confidence: float = 0.5
    depth_seconds: float = 0.0
    call_seconds: float = 0.0


def lookup(name: str = "ngram", hazard: float = 0.8, max_k: int = 8, **more: float) -> Drafter:
    """A lookup with the same hazard everywhere."""
    return Drafter(ProposerInfo(name, "lookup", max_k), [hazard] * max_k, **more)


def model(name: str = "draft", hazard: float = 0.8, max_k: int = 8, **more: float) -> Drafter:
    """A sequential model with the same hazard everywhere."""
    return Drafter(ProposerInfo(name, "sequential", max_k), [hazard] * max_k, **more)


class Clock:
    """Seconds that pass only when the engine says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def linear_seconds(fixed: float, per_token: float) -> Callable[[int, int], float]:
    """Step time of a packed engine: (requests, verified tokens) -> seconds."""
    return lambda requests, verified: fixed + per_token * (requests + verified)


class SimulatedEngine:
    """Runs a controller; ``seconds`` and the drafters' rates may be changed while it runs."""

    def __init__(
        self,
        controller: Controller,
        drafters: Sequence[Drafter],
        clock: Clock,
        seconds: Callable[[int, int], float],
        *,
        noise: float = 0.03,
        seed: int = 0,
        reports_drafting: bool = False,
        reports_matches: bool = True,
    ) -> None:
        self.controller = controller
        self.drafters = list(drafters)
        self.clock = clock
        self.seconds = seconds
        self.noise = noise
        self.rng = np.random.default_rng(seed)
        self.handles: list[int] = []
        self.tokens = 0
        self.plans: list[Plan] = []
        self.results: list[StepResult] = []
        self._reports_drafting = reports_drafting
        self._reports_matches = reports_matches
        self._context: dict[int, int] = {}

    def start(self, count: int = 1, **request: object) -> list[int]:
        """Start requests."""
        started = [
            self.controller.start(Request(f"r{i}", PROMPT, **request))  # type: ignore[arg-type]
            for i in range(count)
        ]
        self.handles += started
        self._context.update(dict.fromkeys(started, len(PROMPT)))
        return started

    def finish(self, count: int) -> None:
        """Finish the oldest requests."""
        for handle in self.handles[:count]:
            self.controller.finish(handle)
            del self._context[handle]
        del self.handles[:count]

    def run(self, steps: int) -> float:
        """Take steps; returns their tokens per second."""
        tokens, started = self.tokens, self.clock.now
        for _ in range(steps):
            self.step()
        return (self.tokens - tokens) / max(self.clock.now - started, 1e-12)

    def step(self, prefill_tokens: int = 0, **batch: object) -> tuple[Plan, StepResult]:
        """One step of the server loop."""
        n, p, k_max = len(self.handles), len(self.drafters), self.controller.k_max
        right = self._right(n)
        offers = np.zeros((p, n), dtype=np.int16)
        confidence = np.zeros((p, n, k_max), dtype=np.float32)
        wanted = self.controller.wants_offers()
        for q, drafter in enumerate(self.drafters):
            if drafter.info.kind == "lookup" and wanted[q]:
                offers[q] = np.where(self.rng.random(n) < drafter.fires, drafter.info.max_k, 0)
                confidence[q] = drafter.confidence
        state = BatchState(
            np.array(self.handles, dtype=np.int64),
            np.array([self._context[handle] for handle in self.handles], dtype=np.int32),
            offer_lengths=offers,
            offer_confidence=confidence,
            prefill_tokens=prefill_tokens,
            **batch,  # type: ignore[arg-type]
        )
        plan = self.controller.plan(state)
        by_model = np.full((n, k_max), np.nan, dtype=np.float32)
        draft_seconds = np.zeros(p)
        for q, drafter in enumerate(self.drafters):
            rows = (plan.proposer == q) & (plan.k > 0)
            if drafter.info.kind != "lookup" and rows.any():
                by_model[rows] = drafter.confidence
                draft_seconds[q] = drafter.call_seconds + drafter.depth_seconds * plan.k[rows].max()
        plan = self.controller.trim(plan, plan.k, by_model)
        accepted = np.zeros(n, dtype=np.int16)
        for i in np.flatnonzero(plan.verify):
            accepted[i] = min(plan.verify[i], right[plan.proposer[i], i])
        committed = (accepted + 1).astype(np.int16)
        matched = np.minimum(np.minimum(right, offers), committed).astype(np.int16)
        for q, drafter in enumerate(self.drafters):
            if drafter.info.kind != "lookup":
                matched[q] = -1
        verifying = self.seconds(n, int(plan.verify.sum()))
        step_seconds = (verifying + draft_seconds.sum()) * np.exp(
            self.noise * self.rng.standard_normal()
        )
        self.clock.now += step_seconds
        result = StepResult(
            plan.verify,
            accepted,
            committed,
            float(step_seconds),
            draft_seconds=draft_seconds if self._reports_drafting else None,
            matched=matched if self._reports_matches else None,
            prefill_tokens=prefill_tokens,
        )
        self.controller.observe(plan, result)
        self.tokens += int(committed.sum())
        for handle, count in zip(self.handles, committed.tolist(), strict=True):
            self._context[handle] += count
        self.plans.append(plan)
        self.results.append(result)
        return plan, result

    def mean_k(self, last: int) -> float:
        """Mean k over requests in the last steps."""
        return float(np.mean(np.concatenate([plan.k for plan in self.plans[-last:]])))

    def share_off(self, last: int) -> float:
        """Share of the last steps without any draft."""
        return float(np.mean([not plan.k.any() for plan in self.plans[-last:]]))

    def _right(self, n: int) -> NDArray[np.int64]:
        """How many leading draft tokens of each proposer would be right [p, n]."""
        right = np.zeros((len(self.drafters), n), dtype=np.int64)
        for q, drafter in enumerate(self.drafters):
            hits = self.rng.random((n, drafter.info.max_k)) < np.asarray(drafter.hazards)
            right[q] = np.cumprod(hits, axis=1).sum(axis=1)
        return right
