"""Planning and trimming step by step, where a policy is no program or may be overruled."""

from __future__ import annotations

from typing import Any

import numpy as np

from autospec.cost.step_cost import StepCost
from autospec.policy.base import Decision, Policy, View
from autospec.rails.overruling import Rails
from autospec.records import BatchState, Float32Array, Float64Array, Int16Array, Mode, Plan
from autospec.step.kernels import (
    Planned,
    Trimmed,
    bound_decision,
    bound_drafted,
    foresee,
    look_again,
    look_ahead,
)
from autospec.step.record import Offered, StepRecord
from autospec.step.rows import RequestArrays


class Stepwise:
    """Shows a policy its steps, unless the rails overrule it; ``fused`` does the same at once."""

    def __init__(self, policy: Policy[Any], cost: StepCost, rails: Rails) -> None:
        self._policy = policy
        self._cost = cost
        self._rails = rails

    def plan(
        self,
        record: StepRecord,
        batch: BatchState,
        offered: Offered,
        requests: RequestArrays | None,
        proposer: Int16Array,
        k: Int16Array,
    ) -> tuple[Mode, Planned]:
        """Fill ``proposer`` and ``k`` [n]; ``requests`` are None while none has a target."""
        unknown, context_tokens, plain_seconds = look_ahead(
            record.reference, *offered, self._cost.is_known
        )
        arrays = record.arrays
        handles, _, _, _, _, _, confidence = offered
        behind = record.nothing.behind if requests is None else _behind(record, requests)
        record.view = view = View(
            record.n, batch.waiting_requests, context_tokens, arrays.workloads, arrays.limits,
            confidence, arrays.hazards, arrays.stale, behind, self._cost, plain_seconds, handles,
            batch.prefill_tokens > 0,
        )  # fmt: skip
        decision = self._rails.overrule(view)
        if decision is None:
            decision = self._policy.decide(view)
        record.arm = decision.arm
        arrays.promised[:] = 0.0 if decision.promised is None else decision.promised
        expected, verified, switches, predicted, has_models = bound_decision(
            record.reference, decision.proposer, decision.k, context_tokens, plain_seconds,
            decision.mode == "probe", self._rails.probes is not None,
            self._policy.adaptive and decision.mode != "probe", proposer, k,
        )  # fmt: skip
        return decision.mode, (
            True, unknown, context_tokens, plain_seconds, expected, verified, switches, predicted,
            has_models,
        )  # fmt: skip

    def trim(
        self, record: StepRecord, plan: Plan, drafted: Int16Array, confidence: Float32Array
    ) -> Trimmed:
        """What the drafts' confidences say is worth verifying is then in the record's ``kept``."""
        arrays, view = record.arrays, record.view
        is_less = bound_drafted(record.reference, drafted)
        if view is None or look_again(record.reference, confidence) == 0:
            return is_less, False, 0.0, 0.0
        decision = Decision(plan.proposer, arrays.drafted)
        kept = self._policy.trim(view, decision, arrays.draft_hazards)
        np.minimum(arrays.drafted, kept, out=arrays.kept)
        verify = arrays.drafted if plan.mode == "probe" else arrays.kept
        return is_less, True, *foresee(record.reference, verify, record.context_tokens)


def _behind(record: StepRecord, requests: RequestArrays) -> Float64Array:
    """How far each request's time per output token is above its target [n]; 0: no target."""
    slots = record.arrays.slots
    tokens = np.maximum(requests.decode_tokens[slots], 1.0)
    target = requests.target_seconds[slots]
    pace = requests.decode_seconds[slots] / tokens
    return np.divide(pace, target, out=np.zeros_like(pace), where=target > 0.0)
