"""Tokens and request-steps counted by who drafted and by workload, in compiled code."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from autospec.compiled import compiled_brief
from autospec.records import Int16Array, Int32Array, Int64Array

DRAFTED, VERIFIED, ACCEPTED, STEPS = range(4)
"""Planes of ``TokenCounts.drafts``; ``STEPS`` are those of single requests."""


class TokenCounts(NamedTuple):
    """Sums since the start. The last row of ``drafts`` is of requests that nobody drafted for."""

    drafts: Int64Array  # [plane, p + 1, w]
    committed: Int64Array  # [w]

    @classmethod
    def empty(cls, proposers: int, workloads: int) -> TokenCounts:
        """Nothing counted yet."""
        return cls(
            np.zeros((STEPS + 1, proposers + 1, workloads), dtype=np.int64),
            np.zeros(workloads, dtype=np.int64),
        )


@compiled_brief
def count_tokens(
    counts: TokenCounts,
    proposer: Int16Array,
    workload_rows: Int32Array,
    drafted: Int16Array,
    verified: Int16Array,
    accepted: Int16Array,
    committed: Int16Array,
) -> None:
    """Add a step's requests [n]; ``workload_rows`` are one more than the workloads' numbers."""
    drafts, by_workload = counts.drafts, counts.committed
    for i in range(proposer.shape[0]):
        p, w = proposer[i], workload_rows[i] - 1
        if not (p < drafts.shape[1] and 0 <= w < drafts.shape[2]):
            continue
        if p < 0:
            p = drafts.shape[1] - 1
        drafts[DRAFTED, p, w] += drafted[i]
        drafts[VERIFIED, p, w] += verified[i]
        drafts[ACCEPTED, p, w] += accepted[i]
        drafts[STEPS, p, w] += 1
        by_workload[w] += committed[i]
