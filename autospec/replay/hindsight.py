"""What could have been had: policies without a controller, and with knowledge of the future."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autospec.cost.shapes import round_up
from autospec.cost.step_cost import StepCost
from autospec.policy import make_policy
from autospec.policy.base import PolicyOptions, View
from autospec.policy.off import OffOptions
from autospec.records import (
    NO_PROPOSER,
    BatchState,
    Float32Array,
    Float64Array,
    Int16Array,
    Int64Array,
    Plan,
    Request,
    StepResult,
)
from autospec.replay.cost_file import CostFile
from autospec.replay.engine import ReplayEngine
from autospec.replay.run import Progress, ReplayResult, make_engine, run_closed
from autospec.replay.trace import TraceRequest

CLAIRVOYANT_ROUNDS = 8
CLAIRVOYANT_TOLERANCE = 1e-3


class BarePolicy:
    """Obeys a policy that learns nothing, without the controller's learning around it.

    For searches over hundreds of fixed choices: ``static``, ``schedule``, ``lookup_first`` and
    ``off`` decide here exactly as under a controller, in a quarter of the time.
    """

    def __init__(self, options: PolicyOptions, engine: ReplayEngine) -> None:
        self._policy = make_policy(options, engine.proposers, np.random.default_rng(0))
        self._cost = StepCost(engine.proposers, engine.info)
        self._wanted = self._policy.wants_offers()
        self._lookup = engine.lookup
        self._max_k = engine.max_k
        self._next = 0
        p, k = len(engine.proposers), int(engine.max_k.max(initial=0))
        self._no_hazards = np.zeros((0, p, k), dtype=np.float32)
        self._nothing = np.zeros(0)
        self._workloads = np.zeros(0, dtype=np.int32)

    def start(self, request: Request) -> int:
        """Handles count up."""
        self._next += 1
        return self._next

    def finish(self, handle: int) -> None:
        """Nothing is kept of a request."""

    def wants_offers(self) -> NDArray[np.bool_]:
        """As the policy says."""
        return self._wanted

    def plan(self, batch: BatchState) -> Plan:
        """The policy's decision within the limits of every request."""
        assert batch.offer_lengths is not None
        assert batch.offer_confidence is not None
        assert batch.room is not None
        limits = np.minimum(self._max_k[:, None], batch.room[None, :])
        limits[self._lookup] = np.minimum(limits[self._lookup], batch.offer_lengths[self._lookup])
        n = len(batch.handles)
        decision = self._policy.decide(
            View(
                requests=n,
                waiting=batch.waiting_requests,
                context_tokens=int(batch.context_tokens.sum()),
                workloads=self._workloads,
                limits=limits,
                confidence=batch.offer_confidence,
                hazards=self._no_hazards,
                stale_tokens=self._nothing,
                behind=self._nothing,
                cost=self._cost,
                plain_seconds=0.0,
                handles=batch.handles,
                has_prefill=batch.prefill_tokens > 0,
            )
        )
        k = decision.k
        return Plan(0, batch.handles, decision.proposer, k, k, decision.mode)

    def trim(self, plan: Plan, drafted: Int16Array, confidence: Float32Array) -> Plan:
        """All that was drafted is verified."""
        return plan._replace(verify=np.minimum(plan.k, drafted))

    def observe(self, plan: Plan, result: StepResult) -> None:
        """Nothing is learned."""


def replay_bare(
    requests: Sequence[TraceRequest],
    cost: CostFile,
    options: PolicyOptions,
    concurrency: int,
    *,
    policy: str = "",
    progress: Progress | None = None,
) -> ReplayResult:
    """The closed loop under a policy that learns nothing."""
    engine = make_engine(requests, cost, concurrency)
    decider = BarePolicy(options, engine)
    return run_closed(engine, decider, requests, concurrency, policy=policy, progress=progress)


def replay_plain(
    requests: Sequence[TraceRequest], cost: CostFile, concurrency: int
) -> ReplayResult:
    """The closed loop with plain decoding."""
    return replay_bare(requests, cost, OffOptions(), concurrency, policy="plain")


class ClairvoyantEngine(ReplayEngine):
    """Charges only the lookups that were used: it is known before which will be."""

    def _charged_lookups(self, wanted: NDArray[np.bool_], plan: Plan) -> NDArray[np.bool_]:
        used = np.zeros_like(wanted)
        used[plan.proposer[plan.proposer >= 0]] = True
        return used & self.lookup


@dataclass(frozen=True, slots=True)
class _Choice:
    """Accepted draft tokens [n] of each request's best proposer [n], and what they are worth."""

    proposer: Int64Array
    tokens: Int64Array
    worth: float


class Clairvoyant:
    """Knows every accepted length, and takes in each step what is worth most at a going rate.

    Of all ways to let lookups run or not and models draft to some depth, each request takes the
    proposer that brings it most, and only tokens that will be accepted are verified. A step's
    worth is its tokens less ``rate`` (tokens per second) times its seconds. With the rate that the
    run itself reaches, found by iterating, this maximizes tokens over time as far as it can be
    done step by step: at which positions later steps begin is not planned ahead.
    """

    def __init__(self, engine: ClairvoyantEngine, rate: float) -> None:
        self._engine = engine
        self._rate = rate
        self._next = 0
        parts = [engine.cost.proposers[info.name] for info in engine.proposers]
        charges = [engine.cost.charge(part) for part in parts]
        self._fraction, self._per_depth, self._per_context = np.array(charges).reshape(-1, 3).T
        sequential = np.array([info.kind == "sequential" for info in engine.proposers], dtype=bool)
        options = [
            range(k + 1) if by_depth else (0, k)
            for by_depth, k in zip(sequential, engine.max_k.tolist(), strict=True)
        ]
        self._caps = np.array(list(itertools.product(*options)), dtype=np.int64)  # [c, p]
        self._forwards = np.where(sequential, self._caps, self._caps > 0)
        self._factor = 1.0 + (self._caps > 0) @ self._fraction  # [c] of the target forward

    def start(self, request: Request) -> int:
        """Handles count up."""
        self._next += 1
        return self._next

    def finish(self, handle: int) -> None:
        """Nothing is kept of a request."""

    def wants_offers(self) -> NDArray[np.bool_]:
        """All lookups."""
        return self._engine.lookup

    def plan(self, batch: BatchState) -> Plan:
        """The choice of most worth."""
        assert batch.room is not None
        correct = np.minimum(self._engine.correct, np.maximum(batch.room, 0)).astype(np.int64)
        shape = self._engine.cost.shape
        longest = int(correct.max(initial=0))
        most = range(1, longest + 1) if shape == "padded" else (longest,)
        best = _Choice(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), -np.inf)
        for cap in most:
            choice = self._choose(np.minimum(correct, cap), batch, cap)
            if choice.worth > best.worth:
                best = choice
        n = len(batch.handles)
        k = np.zeros(n, dtype=np.int16)
        proposer = np.full(n, NO_PROPOSER, dtype=np.int16)
        if best.worth > 0.0:
            k[:] = best.tokens
            proposer[k > 0] = best.proposer[k > 0]
        return Plan(0, batch.handles, proposer, k, k, "speculate")

    def trim(self, plan: Plan, drafted: Int16Array, confidence: Float32Array) -> Plan:
        """It was known before."""
        return plan

    def observe(self, plan: Plan, result: StepResult) -> None:
        """Nothing is learned."""

    def _choose(self, correct: Int64Array, batch: BatchState, cap: int) -> _Choice:
        """The best combination [c], its worth being that beyond a plain step's."""
        step, shape = self._engine.cost.step, self._engine.cost.shape
        n, rate = len(batch.handles), self._rate
        context = batch.context_tokens.astype(np.float64)
        tokens = np.minimum(self._caps[:, :, None], correct)  # [c, p, n]
        per_token = rate * step.per_token_seconds * self._factor  # [c]
        value = 1.0 - per_token if shape == "packed" else np.ones_like(per_token)
        gain = value[:, None, None] * tokens - rate * (
            (self._forwards * self._per_context)[:, :, None] * context
        )
        best = gain.argmax(axis=1)  # [c, n]
        rows = np.arange(n)
        gain = np.take_along_axis(gain, best[:, None], axis=1)[:, 0]
        taken = np.where(gain > 0.0, np.take_along_axis(tokens, best[:, None], axis=1)[:, 0], 0)
        base = step.fixed_seconds + step.overhead_seconds + step.per_token_seconds * n
        base += step.per_context_token_seconds * float(context.sum())
        extra = rate * ((self._factor - 1.0) * base + self._forwards @ self._per_depth)
        worth = np.maximum(gain, 0.0).sum(axis=1) - extra
        if shape == "padded":
            worth -= per_token * n * cap
        totals = taken.sum(axis=1)
        if shape == "stepped":
            totals, worth = self._step_totals(totals, worth, per_token, n)
        c = int(worth.argmax())
        chosen = taken[c].copy()
        for i in rows[::-1]:  # of a step cut short it does not matter whose tokens are left out
            surplus = int(chosen.sum() - totals[c])
            if surplus <= 0:
                break
            chosen[i] -= min(surplus, int(chosen[i]))
        return _Choice(best[c], chosen, float(worth[c]))

    def _step_totals(
        self, totals: Int64Array, worth: Float64Array, per_token: Float64Array, n: int
    ) -> tuple[Int64Array, Float64Array]:
        """Where a stepped engine should cut: at a captured size, or not at all."""
        captured = np.array(self._engine.cost.captured_sizes, dtype=np.int32)
        plain = int(round_up(n, captured))
        best_totals, best_worth = totals.copy(), np.full_like(worth, -np.inf)
        for c, total in enumerate(totals.tolist()):
            for cut in {total, *(size - n for size in captured.tolist() if 0 < size - n < total)}:
                paid = int(round_up(n + cut, captured)) - plain
                at = float(worth[c] - (total - cut) - per_token[c] * paid)
                if at > best_worth[c]:
                    best_totals[c], best_worth[c] = cut, at
        return best_totals, best_worth


def replay_clairvoyant(
    requests: Sequence[TraceRequest],
    cost: CostFile,
    concurrency: int,
    *,
    rate: float,
    progress: Progress | None = None,
) -> ReplayResult:
    """The closed loop of ``Clairvoyant``, the best of the rounds from a first guess at the rate."""
    best: ReplayResult | None = None
    for _ in range(CLAIRVOYANT_ROUNDS):
        engine = ClairvoyantEngine(requests, cost, concurrency)
        result = run_closed(
            engine,
            Clairvoyant(engine, rate),
            requests,
            concurrency,
            policy="clairvoyant",
            progress=progress,
        )
        if best is None or result.tokens_per_second > best.tokens_per_second:
            best = result
        if abs(result.tokens_per_second / rate - 1.0) < CLAIRVOYANT_TOLERANCE:
            break
        rate = result.tokens_per_second
    assert best is not None
    return best
