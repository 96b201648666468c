"""Cost of deciding: microseconds of plan + trim + observe per step, and where they go.

Run ``python benchmarks/hot_path.py [--steps N] [--soak 1000000] [--json OUT]`` on one idle core
(``taskset -c 0``). The batch is synthetic: three proposers (ngram, suffix, eagle3) whose drafts are
accepted at rates that drift slowly, some rows with long confident offers, a few requests that end
and begin in every step. In the row 12-16 their number wanders from step to step, as it does where
requests come and go. In rows called cold the process sleeps for 20 ms before each step, which is
nearer to a server, where others use the caches meanwhile. Bounds are those that AutoSpec holds
itself to.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import pstats
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from autospec.config import load_settings
from autospec.controller import Controller
from autospec.records import (
    BatchState,
    EngineInfo,
    Float32Array,
    Float64Array,
    Int16Array,
    Int32Array,
    Int64Array,
    Plan,
    ProposerInfo,
    Request,
    StepResult,
)

PROPOSERS = (
    ProposerInfo("ngram", "lookup", 8),
    ProposerInfo("suffix", "lookup", 16),
    ProposerInfo("eagle3", "sequential", 8),
)
ENGINE = EngineInfo("synthetic", "benchmark", "1", "none", "none")
WARM_UP_STEPS = 300
PREPARED_STEPS = 64
TURNOVER = 0.005  # of the requests, in a step
PHASES = ("plan", "trim", "observe")


@dataclass(frozen=True, slots=True)
class Row:
    """How many requests run, and the bounds on mean and p99 in microseconds, if there are any."""

    fewest: int
    most: int
    bounds: tuple[float, float] | None = None
    pause: float = 0.0  # seconds before each step

    @property
    def label(self) -> str:
        """The number of requests, or the first and last of them."""
        number = str(self.most) if self.fewest == self.most else f"{self.fewest}-{self.most}"
        return f"{number} cold" if self.pause else number


ROWS = (
    Row(1, 1, (25.0, 80.0)),
    Row(32, 32, (60.0, 200.0)),
    Row(256, 256, (200.0, 500.0)),
    Row(12, 16),
    Row(1, 1, pause=0.02),
    Row(16, 16, pause=0.02),
)
MOST_PAUSES = 250


@dataclass(frozen=True, slots=True)
class Prepared:
    """What one step brings, made beforehand so that only deciding is timed."""

    context: Int32Array
    last_tokens: Int32Array
    room: Int16Array
    offer_lengths: Int16Array
    offer_confidence: Float32Array
    draft_confidence: Float32Array
    correct: Int16Array  # [p, n] tokens that would be accepted


class Server:
    """An engine that does nothing but report prepared results.

    From ``fewest`` to ``most`` requests run, one more or fewer from step to step.
    """

    def __init__(self, fewest: int, most: int, seed: int = 0) -> None:
        self.controller = Controller(load_settings("default"), PROPOSERS, ENGINE, seed=seed)
        self._rng = np.random.default_rng(seed)
        self._fewest, self._most = fewest, most
        self._started = 0
        self._handles: Int64Array = np.array([self._start() for _ in range(most)])
        self._steps = {
            n: [self._prepare(n) for _ in range(PREPARED_STEPS)] for n in range(fewest, most + 1)
        }
        self._number = 0

    def step(self, seconds: Float64Array) -> None:
        """One step; ``seconds`` [3] gets what plan, trim and observe took."""
        self._turn_over()
        prepared = self._steps[len(self._handles)][self._number % PREPARED_STEPS]
        self._number += 1
        batch = BatchState(
            self._handles,
            prepared.context,
            prepared.offer_lengths,
            prepared.offer_confidence,
            last_tokens=prepared.last_tokens,
            room=prepared.room,
        )
        begin = time.perf_counter()
        plan = self.controller.plan(batch)
        planned = time.perf_counter()
        plan = self.controller.trim(plan, plan.k, prepared.draft_confidence)
        trimmed = time.perf_counter()
        result = self._result(plan, prepared)
        ready = time.perf_counter()
        self.controller.observe(plan, result)
        observed = time.perf_counter()
        seconds[:] = planned - begin, trimmed - planned, observed - ready

    def _start(self) -> int:
        self._started += 1
        prompt = np.zeros(16, dtype=np.int32)
        workload = ("chat", "code-edit", "math")[self._started % 3]
        return self.controller.start(Request(str(self._started), prompt, workload))

    def _turn_over(self) -> None:
        if self._fewest < self._most:
            self._wander()
        ending = self._rng.random(len(self._handles)) < TURNOVER
        for i in np.flatnonzero(ending):
            self.controller.finish(int(self._handles[i]))
            self._handles[i] = self._start()

    def _wander(self) -> None:
        moved = len(self._handles) + int(self._rng.integers(-1, 2))
        n = min(max(moved, self._fewest), self._most)
        handles = self._handles.tolist()
        for handle in handles[n:]:
            self.controller.finish(handle)
        while len(handles) < n:
            handles.append(self._start())
        self._handles = np.array(handles[:n])

    def _prepare(self, n: int) -> Prepared:
        rng, p = self._rng, len(PROPOSERS)
        k_max = self.controller.k_max
        lengths = np.zeros((p, n), dtype=np.int16)
        confidence = np.zeros((p, n, k_max), dtype=np.float32)
        correct = np.zeros((p, n), dtype=np.int16)
        for index, info in enumerate(PROPOSERS):
            quality = rng.beta(1.5, 1.0, n)
            correct[index] = np.minimum(rng.geometric(1.0 - 0.95 * quality) - 1, info.max_k)
            if info.kind == "lookup":
                found = rng.random(n) < 0.6
                lengths[index] = np.where(found, rng.integers(1, info.max_k + 1, n), 0)
                confidence[index] = quality[:, None]
        return Prepared(
            rng.integers(200, 2000, n).astype(np.int32),
            rng.integers(0, 50_000, n).astype(np.int32),
            rng.integers(10, 500, n).astype(np.int16),
            lengths,
            confidence,
            rng.beta(2.0, 1.0, (n, k_max)).astype(np.float32),
            correct,
        )

    def _result(self, plan: Plan, prepared: Prepared) -> StepResult:
        n = len(self._handles)
        right = prepared.correct[plan.proposer, np.arange(n)]
        accepted = np.where(plan.proposer >= 0, np.minimum(plan.verify, right), 0)
        committed = (accepted + 1).astype(np.int16)
        matched = np.minimum(np.minimum(prepared.correct, prepared.offer_lengths), committed)
        matched[2] = -1
        tokens = n + int(plan.verify.sum())
        depth = int(plan.k[plan.proposer == 2].max(initial=0))
        drafting = np.array([4e-5, 4e-5, 7e-4 * depth])
        noise = float(self._rng.normal(1.0, 0.01))
        verifying = 7e-3 + 2e-5 * tokens + 4e-8 * float(prepared.context.sum())
        return StepResult(
            plan.verify,
            accepted.astype(np.int16),
            committed,
            noise * (verifying + float(drafting.sum())),
            drafting,
            matched.astype(np.int16),
        )


def measure(row: Row, steps: int) -> Float64Array:
    """Seconds [steps, phases] after warming up."""
    server = Server(row.fewest, row.most)
    seconds = np.zeros((min(steps, MOST_PAUSES) if row.pause else steps, len(PHASES)))
    for _ in range(WARM_UP_STEPS):
        server.step(seconds[0])
    gc.collect()
    gc.freeze()
    for step in seconds:
        if row.pause:
            time.sleep(row.pause)
        server.step(step)
    return seconds


def where_time_goes(row: Row, steps: int, lines: int) -> None:
    """Print the functions that most of it is spent in."""
    server = Server(row.fewest, row.most)
    scratch = np.zeros(len(PHASES))
    for _ in range(WARM_UP_STEPS):
        server.step(scratch)
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(steps):
        server.step(scratch)
    profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(lines)


def resident_mb() -> float:
    """Resident memory now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def soak(requests: int, steps: int, report: Callable[[str], None]) -> float:
    """Run many steps; returns how many MB the second half added."""
    server = Server(requests, requests)
    scratch = np.zeros(len(PHASES))
    halfway = 0.0
    for number in range(1, steps + 1):
        server.step(scratch)
        if number == steps // 2:
            gc.collect()
            halfway = resident_mb()
        if number % max(1, steps // 20) == 0:
            report(f"  {number:,} steps: {resident_mb():.1f} MB resident")
    gc.collect()
    return resident_mb() - halfway


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=5000, help="timed steps per row")
    parser.add_argument("--profile", type=int, metavar="LINES", help="show where time goes")
    parser.add_argument("--soak", type=int, metavar="STEPS", help="watch memory over many steps")
    parser.add_argument("--soak-requests", type=int, default=8)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    print("requests     mean      p99   bounds       ", *(f"{name:>8}" for name in PHASES), " us")
    for row in ROWS:
        seconds = measure(row, options.steps)
        total = seconds.sum(axis=1) * 1e6
        mean, p99 = float(total.mean()), float(np.percentile(total, 99))
        passed, verdict = None, ""
        if row.bounds is not None:
            passed = mean <= row.bounds[0] and p99 <= row.bounds[1]
            verdict = f"{row.bounds[0]:.0f} / {row.bounds[1]:.0f} {'pass' if passed else 'FAIL'}"
        phases = seconds.mean(axis=0) * 1e6
        print(
            f"{row.label:>8} {mean:8.1f} {p99:8.1f}   {verdict}".ljust(45),
            *(f"{each:8.1f}" for each in phases),
            flush=True,
        )
        rows.append(
            {
                "requests": row.label,
                "mean_us": mean,
                "p99_us": p99,
                "phases_us": dict(zip(PHASES, phases.tolist(), strict=True)),
                "bounds_us": row.bounds,
                "passed": passed,
            }
        )
    report = {"rows": rows}
    if options.profile:
        for row in (row for row in ROWS if not row.pause):
            print(f"== {row.label} requests")
            where_time_goes(row, 1000, options.profile)
    if options.soak:
        print(f"soaking with {options.soak_requests} requests", flush=True)
        grown = soak(options.soak_requests, options.soak, lambda line: print(line, flush=True))
        print(f"the second half of {options.soak:,} steps added {grown:.1f} MB")
        report["soak"] = [{"steps": options.soak, "second_half_mb": grown}]
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
