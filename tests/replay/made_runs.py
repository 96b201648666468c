"""Requests whose drafts are known, and a cost file of round numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autospec.policy.base import PolicyOptions
from autospec.records import BatchState, Plan, Request, StepResult
from autospec.replay.cost_file import CostFile
from autospec.replay.engine import ReplayEngine
from autospec.replay.hindsight import BarePolicy
from autospec.replay.trace import TraceRequest

FIXED, OVERHEAD, TOKEN, CONTEXT, DEPTH, DRAFT_CONTEXT = 1.0, 0.5, 0.01, 0.001, 0.1, 0.0001


def cost_file(shape: str = "packed", captured: Sequence[int] = (), **proposers: Any) -> CostFile:
    model = {
        "kind": "sequential",
        "per_depth_seconds": DEPTH,
        "per_context_token_seconds": DRAFT_CONTEXT,
        "max_k": 4,
    }
    return CostFile.model_validate(
        {
            "shape": shape,
            "captured_sizes": list(captured),
            "step": {
                "fixed_seconds": FIXED,
                "overhead_seconds": OVERHEAD,
                "per_token_seconds": TOKEN,
                "per_context_token_seconds": CONTEXT,
            },
            "proposers": proposers or {"model": model},
        }
    )


def request(
    name: str, prompt: Sequence[int], output: Sequence[int], accepted: Sequence[int] | None = None
) -> TraceRequest:
    return TraceRequest(
        name,
        "chat",
        np.array(prompt, dtype=np.int32),
        np.array(output, dtype=np.int32),
        {} if accepted is None else {"model": np.array(accepted, dtype=np.int16)},
    )


# Six output tokens; drafts at positions 0..5 would have this many tokens accepted.
FIRST = request("a", [1, 2, 3], [4, 5, 6, 7, 8, 9], [2, 0, 0, 1, 0, 0])


def step_seconds(tokens: int, cached: int) -> float:
    return FIXED + OVERHEAD + TOKEN * tokens + CONTEXT * cached


def model_seconds(depth: int, context: int) -> float:
    return depth * (DEPTH + DRAFT_CONTEXT * context)


def random_requests(count: int, seed: int = 0, tokens: int = 40) -> tuple[TraceRequest, ...]:
    rng = np.random.default_rng(seed)
    return tuple(
        request(
            str(i),
            rng.integers(0, 4, 12).tolist(),
            rng.integers(0, 4, tokens).tolist(),
            rng.integers(0, 5, tokens).tolist(),
        )
        for i in range(count)
    )


LOOKUPS_AND_MODEL: dict[str, Any] = {
    "model": {"kind": "sequential", "per_depth_seconds": 0.05, "max_k": 4},
    "ngram": {"kind": "lookup", "step_fraction": 0.01, "max_k": 5},
    "suffix": {"kind": "lookup", "step_fraction": 0.01, "max_k": 6},
}


class Watch:
    """Obeys a bare policy and keeps what the engine reported."""

    def __init__(self, options: PolicyOptions, engine: ReplayEngine) -> None:
        self._inner = BarePolicy(options, engine)
        self.batches: list[BatchState] = []
        self.results: list[StepResult] = []
        self.drafted: list[tuple[NDArray[np.int16], NDArray[np.float32]]] = []
        self.requests: list[Request] = []

    def start(self, request: Request) -> int:
        self.requests.append(request)
        return self._inner.start(request)

    def finish(self, handle: int) -> None:
        self._inner.finish(handle)

    def wants_offers(self) -> NDArray[np.bool_]:
        return self._inner.wants_offers()

    def plan(self, batch: BatchState) -> Plan:
        self.batches.append(batch)
        return self._inner.plan(batch)

    def trim(self, plan: Plan, drafted: NDArray[np.int16], confidence: NDArray[np.float32]) -> Plan:
        self.drafted.append((drafted, confidence))
        return self._inner.trim(plan, drafted, confidence)

    def observe(self, plan: Plan, result: StepResult) -> None:
        self.results.append(result)


APPENDED: dict[str, Any] = {
    "model": {"kind": "sequential", "per_depth_seconds": DEPTH, "max_k": 4},
    "suffix": {"kind": "lookup", "step_fraction": 0.1, "max_k": 6},
    "both": {"kind": "appended", "head": "model", "head_k": 2, "max_k": 6},
}
