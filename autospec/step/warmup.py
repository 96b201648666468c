"""Compile every kernel of the hot path, or load it from the disk cache, ahead of requests."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from autospec.compiled import CACHE, is_ready, prepared
from autospec.config import LearningSettings
from autospec.cost.step_cost import StepLoad
from autospec.estimators import Estimators
from autospec.policy import make_policy
from autospec.policy.base import Decision, Outcome, PolicyOptions, View
from autospec.rails.guard import Guard
from autospec.rails.probe import ProbeClocks
from autospec.rails.speedup import Speedup
from autospec.records import EngineInfo, ProposerInfo
from autospec.step.counts import TokenCounts
from autospec.step.fused import Fused
from autospec.step.kernels import (
    bound_decision,
    bound_drafted,
    conclude,
    foresee,
    look_again,
    look_ahead,
)
from autospec.step.record import StepRecord, Watch
from autospec.step.rows import RequestRows

log = logging.getLogger("autospec")


def tell_compiling() -> None:
    """Say it before somebody has to wait for it."""
    if not is_ready(conclude):
        log.warning(
            "compiling kernels, once, for about a minute; %s",
            f"they are kept in {CACHE} (NUMBA_CACHE_DIR says where)"
            if CACHE is not None
            else "nothing can be written where they would be kept: let NUMBA_CACHE_DIR say where",
        )


def warm_up(
    options: PolicyOptions,
    proposers: Sequence[ProposerInfo],
    engine: EngineInfo,
    k_max: int,
) -> Fused:
    """Run each kernel once on a step of one request, with the types that serving uses.

    Returns those that a policy that is a program is served by.
    """
    n, p = 1, len(proposers)
    if p == 0:
        return Fused()
    rows = RequestRows(2)
    learned = Estimators(proposers, engine, LearningSettings(), 1, len(rows))
    policy = make_policy(options, proposers, np.random.default_rng(0))
    watch = Watch(
        ProbeClocks(learned.cost.models, 1, 1.0, 1).reference,
        Guard(0.0, 1, 1).reference,
        Speedup().sums,
    )
    record = StepRecord(n, p, k_max)
    record.refer_to(learned.standing(rows.arrays, TokenCounts.empty(p, 1), watch))
    arrays, nothing = record.arrays, record.nothing
    handles = np.array([rows.start(0, k_max, 0.0)], dtype=np.int64)
    for speculating in (False, True):
        load = StepLoad(1, 1, 1, speculating, arrays.depth, arrays.draft_tokens, arrays.catch_up)
        learned.cost.observe(load, 1.0, None)
        learned.cost.observe(load, 1.0, np.zeros(p))
        learned.cost.observe(load, 1.0, None, 1)
        learned.cost.predict(load)
    learned.cost.learned(1, 1, 1.0, True)
    _, context, plain_seconds = look_ahead(
        record.reference, handles, nothing.last_tokens,
        nothing.last_tokens, nothing.room, np.ones(p, dtype=np.int16), nothing.lengths,
        nothing.confidence, True,
    )  # fmt: skip
    view = View(
        n, 0, context, arrays.workloads, arrays.limits, nothing.confidence, arrays.hazards,
        arrays.stale, nothing.behind, learned.cost, plain_seconds, handles,
    )  # fmt: skip
    proposer, k = np.zeros((2, n), dtype=np.int16)
    bound_decision(
        record.reference, proposer, k, context, plain_seconds, False, True, True,
        proposer.copy(), k.copy(),
    )  # fmt: skip
    bound_drafted(record.reference, k)
    look_again(record.reference, nothing.confidence[0])
    foresee(record.reference, k, context)
    observed = (
        k, k, k, arrays.unmatched, np.zeros(p), 1.0, plain_seconds, context,
        True, False, True, True, True, True, True, True,
    )  # fmt: skip
    conclude(record.reference, observed)
    fused = Fused()
    program = policy.program(n, k_max, learned.cost)
    if program is not None:
        planning = (
            record.reference, program, handles, nothing.last_tokens, nothing.last_tokens,
            nothing.room, np.ones(p, dtype=np.int16), nothing.lengths, nothing.confidence, 1.0,
            True, True, proposer, k,
        )  # fmt: skip
        trimming = (
            record.reference, program, k, nothing.confidence[0], context, plain_seconds, 1.0,
            False,
        )  # fmt: skip
        observing = (record.reference, program, observed)
        fused.plan(*planning)
        fused.trim(*trimming)
        fused.observe(*observing)
        fused = Fused(
            prepared(fused.plan, *planning),
            prepared(fused.trim, *trimming),
            prepared(fused.observe, *observing),
        )
    if policy.adaptive:
        policy.decide(view)
        policy.trim(view, Decision(proposer, k), arrays.draft_hazards)
        policy.learn(
            Outcome(
                n, arrays.workloads, proposer, k, k, arrays.kept, arrays.verified, arrays.accepted,
                arrays.committed, arrays.unmatched, arrays.offer_lengths, 1.0, np.zeros(p), 1.0,
                False, handles, arrays.promised,
            )
        )  # fmt: skip
    return fused
