"""Which k values vLLM captures CUDA graphs for.

Model runner V2 captures decode graphs for the k values that its batch-size table names, so every k
that AutoSpec may choose is named there; AutoSpec itself ignores what the table says about batch
sizes. Model runner V1 captures sizes in tokens, whatever k: nothing is named to it (a table would
cost it its full graphs), and the controller is told the sizes that a step is padded to.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from autospec.errors import ConfigError

_STEPS = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64)
"""Candidates where nobody says otherwise: each costs a set of graphs."""

Table = list[tuple[int, int, int]]


def candidate_ks(most: int) -> tuple[int, ...]:
    """k values worth capturing up to ``most``, 0 and ``most`` included."""
    return tuple(sorted({k for k in _STEPS if k < most} | {most}))


def naming_table(ks: Sequence[int], max_requests: int) -> Table:
    """A ``num_speculative_tokens_per_batch_size`` that names every k of ``ks``.

    Larger k for smaller batches, which is what vLLM alone would make of it. Raises ConfigError when
    there are fewer batch sizes than k values.
    """
    ordered = sorted(set(ks), reverse=True)
    if not ordered or len(ordered) > max_requests or ordered[-1] < 0:
        raise ConfigError(
            f"ks {list(ks)}: needs 1 to {max_requests} values of at least 0 (one for each batch "
            "size at most)"
        )
    last = len(ordered)
    table = [(size, size, k) for size, k in enumerate(ordered, start=1)]
    table[-1] = (last, max_requests, ordered[-1])
    return table


def named_ks(table: Sequence[Sequence[int]] | None) -> tuple[int, ...]:
    """The k values that a table names, ascending; none if there is no table."""
    return tuple(sorted({int(k) for _, _, k in table or ()}))


def captured_k(k: int, ks: Sequence[int]) -> int:
    """The largest of ``ks`` (ascending) that is not above ``k``; ``k`` itself if none are named."""
    if not ks:
        return k
    place = bisect_right(ks, k)
    return ks[place - 1] if place else 0
