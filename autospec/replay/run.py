"""Recorded traces and a cost model -> exact counterfactual runs of the real controller.

The controller, its policies and the lookup proposers are those of serving. Recorded proposers
answer from the trace, and time is the cost file's.

Closed loop: a fixed number of requests runs, and each that ends is replaced at once. They begin
after their prefill, which every policy would pay alike. The run ends when nothing waits and fewer
than half of that number are left, so that no policy is measured on the tail. Every policy begins
the same requests in the same order at an empty engine. Which of them run together follows from
how soon each ends, and what is left at the end is cut off: tokens and seconds differ by that, and
it is tokens per second that compare, the better the more requests there are for each place.

Open loop: requests arrive at given times, wait for one of ``max_running`` slots, and are prefilled
in chunks beside the decoding of the others; a prompt's last chunk brings the first output token.
The run ends with the last request.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from autospec.config import Settings
from autospec.controller import Controller
from autospec.errors import InputError
from autospec.profile.learned import Profile
from autospec.replay.cost_file import CostFile
from autospec.replay.engine import PREFILL_TOKENS, Decider, ReplayEngine
from autospec.replay.latency import LatencySummary, summarize_latency
from autospec.replay.trace import TraceRequest

MAX_RUNNING = 256

_CLOCK_SAMPLES = 100_000
_PROGRESS_STEPS = 256


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """One policy at one concurrency (closed loop) or arrival rate (open loop, in requests/s).

    ``concurrency`` is the most requests that run at once. Decision seconds are real ones, zero
    where no controller decided.
    """

    policy: str
    concurrency: int
    requests: int
    tokens: int
    seconds: float
    steps: int
    decision_seconds_mean: float = 0.0
    decision_seconds_p99: float = 0.0
    rate: float | None = None
    latency: LatencySummary | None = None

    @property
    def tokens_per_second(self) -> float:
        """Committed tokens over simulated seconds."""
        return self.tokens / self.seconds if self.seconds > 0.0 else 0.0


def shuffled(
    requests: Sequence[TraceRequest], limit: int | None, seed: int
) -> tuple[TraceRequest, ...]:
    """The first ``limit`` of the requests in an order that depends on the seed alone."""
    order = list(requests)
    random.Random(seed).shuffle(order)
    return tuple(order[:limit])


class ClosedLoop:
    """Keeps ``concurrency`` requests running while some wait; one ``step`` at a time.

    ``concurrency`` may be lowered and raised between steps: requests above it keep their slots and
    wait, the oldest run.
    """

    def __init__(
        self,
        engine: ReplayEngine,
        decider: Decider,
        requests: Sequence[TraceRequest],
        concurrency: int,
    ) -> None:
        self.engine = engine
        self.decider = decider
        self.concurrency = concurrency
        self._waiting = deque(requests)
        self._least = max(1.0, concurrency / 2)

    @property
    def waiting(self) -> int:
        """Requests that did not run yet."""
        return len(self._waiting)

    def step(self) -> bool:
        """Run a step; False, and no step, when the run is over."""
        engine = self.engine
        while self._waiting and engine.has_room and engine.running < self.concurrency:
            engine.start(self._waiting.popleft(), self.decider)
        if not self._waiting and engine.running < self._least:
            return False
        engine.step(self.decider, len(self._waiting), self.concurrency)
        return True


Progress = Callable[[int, int], None]
"""Called now and then with the number of requests that have ended, and of all."""


def run_closed(
    engine: ReplayEngine,
    decider: Decider,
    requests: Sequence[TraceRequest],
    concurrency: int,
    *,
    policy: str = "",
    progress: Progress | None = None,
) -> ReplayResult:
    """Serve the requests in order, ``concurrency`` at a time, whoever decides."""
    loop = ClosedLoop(engine, decider, requests, concurrency)
    clock = _DecisionClock(decider)
    while loop.step():
        clock.note()
        if progress is not None and engine.steps % _PROGRESS_STEPS == 0:
            progress(len(engine.finished), len(requests))
    mean, p99 = clock.summary()
    return ReplayResult(
        policy, concurrency, len(requests), engine.tokens, engine.seconds, engine.steps, mean, p99
    )


def run_open(
    engine: ReplayEngine,
    decider: Decider,
    requests: Sequence[TraceRequest],
    arrivals: Sequence[float],
    max_running: int,
    *,
    rate: float,
    policy: str = "",
    tpot_target_seconds: float | None = None,
    progress: Progress | None = None,
) -> ReplayResult:
    """Serve each request from its arrival on (seconds, rising), whoever decides."""
    clock = _DecisionClock(decider)
    coming = deque(zip(arrivals, requests, strict=True))
    queue: deque[tuple[float, TraceRequest]] = deque()
    while coming or queue or engine.running:
        if not queue and not engine.running:
            engine.seconds = max(engine.seconds, coming[0][0])
        while coming and coming[0][0] <= engine.seconds:
            queue.append(coming.popleft())
        while queue and engine.has_room:
            arrival, request = queue.popleft()
            engine.start(request, decider, arrival=arrival, tpot_target_seconds=tpot_target_seconds)
        engine.step(decider, len(queue))
        clock.note()
        if progress is not None and engine.steps % _PROGRESS_STEPS == 0:
            progress(len(engine.finished), len(requests))
    mean, p99 = clock.summary()
    return ReplayResult(
        policy,
        max_running,
        len(requests),
        engine.tokens,
        engine.seconds,
        engine.steps,
        mean,
        p99,
        rate,
        summarize_latency(engine.finished, tpot_target_seconds),
    )


def make_engine(
    requests: Sequence[TraceRequest],
    cost: CostFile,
    slots: int,
    *,
    prefill_tokens: int = PREFILL_TOKENS,
    profile: Profile | None = None,
) -> ReplayEngine:
    """An engine for these requests, with lookups as ``profile`` was tuned to.

    Raises InputError if there are no requests, or no slots.
    """
    if not requests:
        raise InputError("there are no requests to replay")
    if slots < 1 or prefill_tokens < 1:
        raise InputError(
            f"running requests and prefill tokens must be at least 1, found {slots} and "
            f"{prefill_tokens}"
        )
    tuned = None if profile is None or profile.tuned is None else profile.tuned.proposers
    return ReplayEngine(requests, cost, slots, prefill_tokens=prefill_tokens, tuned=tuned)


def replay_closed(
    requests: Sequence[TraceRequest],
    cost: CostFile,
    settings: Settings,
    concurrency: int,
    *,
    policy: str = "",
    profile: Profile | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> tuple[ReplayResult, Controller]:
    """Serve the requests in order, ``concurrency`` at a time, under a controller of its own."""
    engine = make_engine(requests, cost, concurrency, profile=profile)
    controller = make_controller(engine, settings, profile, seed)
    result = run_closed(engine, controller, requests, concurrency, policy=policy, progress=progress)
    return result, controller


def replay_open(
    requests: Sequence[TraceRequest],
    arrivals: Sequence[float],
    rate: float,
    cost: CostFile,
    settings: Settings,
    *,
    max_running: int = MAX_RUNNING,
    prefill_tokens: int = PREFILL_TOKENS,
    tpot_target_seconds: float | None = None,
    policy: str = "",
    profile: Profile | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> tuple[ReplayResult, Controller]:
    """Serve each request from its arrival on, under a controller of its own."""
    engine = make_engine(
        requests, cost, max_running, prefill_tokens=prefill_tokens, profile=profile
    )
    controller = make_controller(engine, settings, profile, seed)
    result = run_open(
        engine,
        controller,
        requests,
        arrivals,
        max_running,
        rate=rate,
        policy=policy,
        tpot_target_seconds=tpot_target_seconds,
        progress=progress,
    )
    return result, controller


def make_controller(
    engine: ReplayEngine, settings: Settings, profile: Profile | None = None, seed: int = 0
) -> Controller:
    """A controller that starts from ``profile`` alone and saves nothing."""
    return Controller(
        settings.without_files(),
        engine.proposers,
        engine.info,
        profile=profile,
        seed=seed,
    )


class _DecisionClock:
    """Reads each step's decision seconds off a controller; keeps a bounded sample for the tail."""

    def __init__(self, decider: Decider) -> None:
        self._controller = decider if isinstance(decider, Controller) else None
        self._samples: list[float] = []
        self._sum = 0.0
        self._count = 0

    def note(self) -> None:
        """A step went by."""
        if self._controller is None:
            return
        seconds = self._controller.last_decision_seconds
        self._sum += seconds
        self._count += 1
        if len(self._samples) < _CLOCK_SAMPLES:
            self._samples.append(seconds)

    def summary(self) -> tuple[float, float]:
        """(mean, p99) seconds; zeros without steps."""
        if self._count == 0:
            return 0.0, 0.0
        return self._sum / self._count, float(np.percentile(self._samples, 99))
