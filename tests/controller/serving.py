"""Simulated engines that serve requests under the text of a policy file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from autospec.config import parse_settings
from autospec.controller import Controller
from autospec.journal.writer import Journal
from autospec.metrics import Metrics
from autospec.records import BatchState, EngineInfo
from tests.simulated_engine import ENGINE, Clock, Drafter, SimulatedEngine, linear_seconds

CHEAP_TOKENS = linear_seconds(0.03, 0.001)
DEAR_TOKENS = linear_seconds(0.005, 0.01)


def serve(
    drafters: Sequence[Drafter],
    seconds: Callable[[int, int], float] = CHEAP_TOKENS,
    *,
    yaml: str = "",
    requests: int = 1,
    engine: EngineInfo = ENGINE,
    metrics: Metrics | None = None,
    journal: Journal | None = None,
    **options: Any,
) -> SimulatedEngine:
    """A simulated engine that runs some requests under a policy file's text."""
    clock = Clock()
    controller = Controller(
        parse_settings(f"version: 1\n{yaml}"),
        [drafter.info for drafter in drafters],
        engine,
        metrics=metrics,
        journal=journal,
        clock=clock,
        wall_clock=clock,
    )
    simulated = SimulatedEngine(controller, drafters, clock, seconds, **options)
    simulated.start(requests)
    return simulated


def modes(engine: SimulatedEngine, last: int | None = None) -> dict[str, int]:
    plans = engine.plans if last is None else engine.plans[-last:]
    return {mode: sum(plan.mode == mode for plan in plans) for mode in {p.mode for p in plans}}


def replace_in_policy(
    monkeypatch: pytest.MonkeyPatch,
    engine: SimulatedEngine,
    method: str,
    stand_in: Callable[..., Any],
) -> None:
    """Replace one method of the policy, which then is no compiled program any more."""
    monkeypatch.setattr(engine.controller.policy, "program", lambda *_: None)
    monkeypatch.setattr(engine.controller.policy, method, stand_in)


def state_of(engine: SimulatedEngine, **more: Any) -> BatchState:
    """A batch of the engine's requests with full offers."""
    n, controller = len(engine.handles), engine.controller
    p = len(controller.proposers)
    lengths = np.zeros((p, n), dtype=np.int16)
    for q, info in enumerate(controller.proposers):
        lengths[q] = info.max_k if info.kind == "lookup" else 0
    state = BatchState(
        np.array(engine.handles, dtype=np.int64),
        np.full(n, 100, dtype=np.int32),
        offer_lengths=lengths,
        offer_confidence=np.full((p, n, controller.k_max), 0.5, dtype=np.float32),
    )
    return replace(state, **more)
