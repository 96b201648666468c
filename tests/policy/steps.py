"""Views and outcomes for policies, made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from autospec.cost.step_cost import StepCost
from autospec.policy import make_policy
from autospec.policy.base import Decision, Outcome, Policy, PolicyOptions, View
from autospec.policy.promise import NUM_PROMISES
from autospec.records import NO_PROPOSER, EngineInfo, ProposerInfo

PROPOSERS = (
    ProposerInfo("ngram", "lookup", 8),
    ProposerInfo("suffix", "lookup", 16),
    ProposerInfo("draft", "sequential", 8, needs_state=True),
)
ENGINE = EngineInfo("target", "simulated", "1", "cpu", "float64")
NGRAM, SUFFIX, DRAFT = range(3)
MOST_K = 16
COST = StepCost(PROPOSERS, ENGINE)

PolicyT = TypeVar("PolicyT", bound=Policy[Any])


def policy_of(kind: type[PolicyT], options: PolicyOptions, seed: int = 0) -> PolicyT:
    """The policy of ``options``, which must be a ``kind``."""
    made = make_policy(options, PROPOSERS, np.random.default_rng(seed))
    assert isinstance(made, kind)
    return made


def view(
    handles: Sequence[int] | int = 1,
    limits: Sequence[Sequence[int]] | None = None,
    cost: StepCost = COST,
    stale: float = 0.0,
) -> View:
    """A step of requests ``handles`` (or that many); limits [p][n], by default all there is."""
    if isinstance(handles, int):
        handles = range(1, handles + 1)
    n, p = len(handles), len(PROPOSERS)
    most = np.array([[info.max_k] * n for info in PROPOSERS], dtype=np.int16)
    most = most if limits is None else np.array(limits, dtype=np.int16).reshape(p, n)
    return View(
        requests=n,
        waiting=0,
        context_tokens=100 * n,
        workloads=np.ones(n, dtype=np.int32),
        limits=most,
        confidence=np.full((p, n, MOST_K), 0.5, dtype=np.float32),
        hazards=np.full((n, p, MOST_K), 0.7, dtype=np.float32),
        stale_tokens=np.full((p, n), stale),
        behind=np.zeros(n),
        cost=cost,
        plain_seconds=cost.plain_seconds(n, 100 * n) if cost.is_known else 0.0,
        handles=np.array(handles, dtype=np.int64),
    )


def outcome(
    decision: Decision,
    accepted: Sequence[int] | None = None,
    *,
    seconds: float = 1.0,
    handles: Sequence[int] | None = None,
    matched: Sequence[Sequence[int]] | None = None,
    has_prefill: bool = False,
    arm: int | None = None,
    plain_seconds: float = 0.0,
    draft_seconds: Sequence[float] | None = None,
) -> Outcome:
    """What ``decision`` brought: everything drafted was verified, ``accepted`` [n] of it kept."""
    n, p = len(decision.k), len(PROPOSERS)
    kept = np.array([0] * n if accepted is None else accepted, dtype=np.int16)
    same = np.full((p, n), -1) if matched is None else np.array(matched).reshape(p, n)
    return Outcome(
        requests=n,
        workloads=np.ones(n, dtype=np.int32),
        proposer=decision.proposer,
        asked=decision.k,
        drafted=decision.k,
        kept=decision.k,
        verified=decision.k,
        accepted=kept,
        committed=(kept + 1).astype(np.int16),
        matched=same.astype(np.int16),
        offer_lengths=np.where(same >= 0, 8, 0).astype(np.int16),
        step_seconds=seconds,
        draft_seconds=None if draft_seconds is None else np.array(draft_seconds),
        plain_seconds=plain_seconds,
        has_prefill=has_prefill,
        handles=np.arange(1, n + 1) if handles is None else np.array(handles, dtype=np.int64),
        promised=np.zeros((NUM_PROMISES, p))
        if decision.promised is None
        else decision.promised.copy(),
        arm=decision.arm if arm is None else arm,
    )


def names(decision: Decision) -> list[tuple[str | None, int]]:
    """(proposer's name, k) of every row."""
    return [
        (None if p == NO_PROPOSER else PROPOSERS[p].name, int(k))
        for p, k in zip(decision.proposer, decision.k, strict=True)
    ]
