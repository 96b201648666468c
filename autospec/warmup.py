"""Compile every kernel of the hot path, or load it from the disk cache, ahead of requests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autospec.acceptance import NUM_TOKEN_BUCKETS, HazardTable, Shrinkage
from autospec.allocation import Prices, allocate, latency_gains, limits_of, throughput_gains
from autospec.cost import StepCost, StepLoad
from autospec.records import EngineInfo, ProposerInfo
from autospec.rows import (
    Nothing,
    RequestRows,
    StepRecord,
    bound_decision,
    bound_drafted,
    clean_result,
    fill_rows,
    select_drafted,
    sum_up_models,
)


def warm_up(proposers: Sequence[ProposerInfo], engine: EngineInfo, k_max: int) -> None:
    """Run each kernel once on a batch of one, with the types that serving uses."""
    n, p = 1, len(proposers)
    if p == 0:
        return
    lookup = np.array([info.kind == "lookup" for info in proposers], dtype=np.bool_)
    rows = RequestRows(2)
    record = StepRecord(p, k_max)
    record.resize(n)
    nothing = Nothing(p, k_max).fit(n)
    handles = np.array([rows.start(0, k_max, 0.0)], dtype=np.int64)
    rows.resolve(handles, record.slots)
    most = np.ones(p, dtype=np.int16)
    fill_rows(
        handles, rows.generation, rows.running, rows.max_k, rows.workload, nothing.last_tokens,
        nothing.last_tokens, nothing.room, most, lookup, nothing.lengths, NUM_TOKEN_BUCKETS,
        record.slots, record.workloads, record.token_buckets, record.limits, record.offer_lengths,
        record.reach,
    )  # fmt: skip
    for by_confidence in (lookup, np.ones_like(lookup)):
        table = HazardTable(lookup, by_confidence, 2, len(rows), Shrinkage())
        table.evidence(record.offer_lengths, nothing.confidence, record.bins)
        table.draft_evidence(nothing.confidence[0], record.limits, record.bins)
        table.hazards(
            record.slots, record.workloads, record.token_buckets, record.limits, record.bins,
            record.hazards,
        )  # fmt: skip
        zeros = np.zeros(n, dtype=np.int16)
        table.learn(
            record.slots, record.workloads, record.token_buckets, np.ones(n, dtype=np.bool_),
            zeros, zeros, zeros, zeros, nothing.matched, record.offer_lengths,
            record.bins, record.hazards,
        )  # fmt: skip
    step_cost = StepCost(proposers, engine)
    depth, draft_tokens, catch_up = np.zeros((3, p))
    for speculating in (False, True):
        load = StepLoad(1, 1, 1, speculating, depth, draft_tokens, catch_up)
        step_cost.observe(load, 1.0, None)
        step_cost.observe(load, 1.0, np.zeros(p))
    proposer, k = np.zeros((2, n), dtype=np.int16)
    bound_decision(
        proposer, k, record.limits, record.hazards, rows.last_proposer, record.slots, lookup,
        record.stale, proposer.copy(), k.copy(), depth, draft_tokens, catch_up,
    )  # fmt: skip
    confidence = nothing.confidence[0]
    select_drafted(proposer, k, confidence, lookup, record.draft_limits, record.draft_models)
    bound_drafted(k, k, k.copy())
    sum_up_models(proposer, k, record.stale, lookup, depth, draft_tokens, catch_up)
    clean_result(
        handles, rows.generation, rows.running, k, k, k, k, record.slots, record.known,
        k.copy(), k.copy(), k.copy(),
    )  # fmt: skip
    gains = np.zeros_like(record.hazards)
    latency_gains(
        record.hazards, record.limits, np.ones(record.hazards.shape[1]), np.ones(n), gains
    )
    limits_of(proposer, k, record.limits.copy())
    throughput_gains(record.hazards, record.limits, np.ones(record.hazards.shape[1]), gains)
    allocate(
        gains,
        record.limits,
        lookup,
        Prices(
            1.0, 0.0, step_cost.slopes, step_cost.draft_coefficients, "packed", step_cost.captured
        ),
        1.0,
    )
