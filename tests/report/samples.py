"""Real inputs of reports, small: a controller's journal and profile, a measurement, a replay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from autospec.config import load_settings
from autospec.controller import Controller
from autospec.journal.writer import Journal
from tests.simulated_engine import (
    ENGINE,
    Clock,
    SimulatedEngine,
    linear_seconds,
    lookup,
    model,
)

STEPS = 200


def serve(journal_path: Path, profile_path: Path | None = None, steps: int = STEPS) -> None:
    """Journal a run whose load goes 1, 6, 24 requests, on a clock of its own."""
    clock = Clock()
    drafters = [lookup("suffix", 0.85, 6, fires=0.5), model("eagle", 0.6, 4, depth_seconds=0.002)]
    settings = load_settings("default")
    settings = settings.model_copy(
        update={"profile": settings.profile.model_copy(update={"path": None})}
    )
    with Journal(journal_path, clock=lambda: 1.7e9 + clock.now) as journal:
        controller = Controller(
            settings,
            [drafter.info for drafter in drafters],
            ENGINE,
            journal=journal,
            clock=clock,
            wall_clock=lambda: 1.7e9 + clock.now,
            seed=0,
        )
        engine = SimulatedEngine(controller, drafters, clock, linear_seconds(0.02, 0.001))
        for count, workload in ((1, "chat"), (5, "code"), (18, "chat")):
            engine.start(count, workload=workload)
            engine.run(steps)
        controller.save(profile_path or journal_path.with_suffix(".profile.json"))


def bench_document(**settings: object) -> dict[str, Any]:
    """A measurement of two workloads at two loads, three rounds each."""
    ratios = {
        ("code", 1): {"suffix:8": 4.6, "adaptive": 5.6},
        ("code", 16): {"suffix:8": 1.4, "adaptive": 1.5},
        ("chat", 1): {"suffix:8": 1.2, "adaptive": 1.3},
        ("chat", 16): {"suffix:8": 0.89, "adaptive": 0.98},
    }
    phases = []
    for (workload, load), arms in ratios.items():
        found = {"plain": _arm(1.0, [])}
        for arm, ratio in arms.items():
            found[arm] = _arm(ratio, [("suffix", 8, 0.75), ("off", 0, 0.25)])
        phases.append({"workload": workload, "load": load, "rounds": 3, "arms": found})
    total = {
        arm: {**_arm(ratio, []), "requests": 12, "outputs_equal_to_plain": 12}
        | {"ratio_to_plain": ratio}
        for arm, ratio in (("plain", 1.0), ("suffix:8", 1.5), ("adaptive", 1.6))
    }
    return {
        "phases": phases,
        "total": total,
        "date": "2026-11-29T17:24:12+00:00",
        "machine": {"cpu": "a processor", "cores": 2},
        "versions": {"autospec": "0.1.0"},
        "settings": {"target": "tiny", "policy": "default", **settings},
    }


def _arm(ratio: float, choices: list[tuple[str, int, float]]) -> dict[str, Any]:
    return {
        "tokens": 1200,
        "seconds": 12.0 / ratio,
        "tokens_per_second": 100.0 * ratio,
        "acceptance_length": 1.0 + ratio,
        "drafted": 800 if choices else 0,
        "accepted": 500 if choices else 0,
        "choices": [{"proposer": p, "k": k, "share": share} for p, k, share in choices],
        "ratio_to_plain": {"median": ratio, "low": 0.95 * ratio, "high": 1.05 * ratio},
        "rounds": [{"tokens": 400, "seconds": 4.0 / ratio, "disturbed": False}] * 3,
    }


def replay_document() -> dict[str, Any]:
    """One policy at three concurrencies and one rate of arrivals, with both bounds."""
    closed = [_row("default", load, None, ratio) for load, ratio in ((1, 2.4), (8, 1.7), (32, 0.9))]
    latency = {"p50": 0.01, "p95": 0.02, "p99": 0.03}
    spans = dict.fromkeys(("ttft_seconds", "tpot_seconds", "end_to_end_seconds"), latency)
    return {
        "results": [*closed, _row("default", 256, 2.0, 1.3) | spans],
        "plain": [_row("plain", 256, 2.0, 1.0) | spans],
        "best_fixed": {
            "1": {"arm": "suffix:8", "speedup_vs_plain": 2.0, "tokens_per_second": 200.0},
            "8": {"arm": "eagle:3", "speedup_vs_plain": 1.6, "tokens_per_second": 160.0},
            "32": {"arm": "eagle:1", "speedup_vs_plain": 1.1, "tokens_per_second": 110.0},
        },
        "clairvoyant": {},
        "date": "2026-11-29T18:05:01+00:00",
        "version": "0.1.0",
        "settings": {"traces": ["chat.jsonl"], "cost": "cost.yaml", "shape": "packed", "seed": 0},
    }


def _row(policy: str, concurrency: int, rate: float | None, speedup: float) -> dict[str, Any]:
    return {
        "policy": policy,
        "concurrency": concurrency,
        "rate": rate,
        "requests": 40,
        "tokens": 4000,
        "seconds": 40.0 / speedup,
        "tokens_per_second": 100.0 * speedup,
        "speedup_vs_plain": speedup,
        "steps": 1000,
    }
