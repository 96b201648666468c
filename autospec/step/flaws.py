"""What can be wrong with a request's counts in a step's result, and how it is told."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from autospec.compiled import inlined
from autospec.records import Int16Array, StepResult


class Flaw(NamedTuple):
    """``name`` is the reason under which it is counted."""

    name: str
    advice: str


SOUND, NEGATIVE, OVER_VERIFIED, OVER_ACCEPTED, OVER_COMMITTED, NOTHING_COMMITTED, MISMATCHED = (
    range(7)
)

FLAWS = (
    Flaw("sound", ""),
    Flaw("negative count", "a count of tokens is 0 at least"),
    Flaw(
        "verified above drafted",
        "it counts draft tokens alone, at most those that were planned or told to trim",
    ),
    Flaw(
        "accepted above verified",
        "it counts draft tokens alone, without the recovered or bonus token",
    ),
    Flaw(
        "committed above accepted + 1",
        "it counts what this step added: the accepted tokens and one more",
    ),
    Flaw(
        "nothing committed",
        "a step adds one token at least to a request that it decodes, the token that ends it "
        "included",
    ),
    Flaw(
        "matched out of range",
        "it counts leading tokens of an offer; -1 where nothing is known",
    ),
)
"""By what ``flaw_of`` returns."""


@inlined
def flaw_of(
    drafted: int,
    verified: int,
    accepted: int,
    committed: int,
    matched: Int16Array,
    row: int,
    most_matched: int,
) -> int:
    """The first flaw of a row's counts, SOUND if there is none.

    Fewer verified than drafted, and fewer committed than accepted where a request ends, are sound;
    so are zeros, of a request that took no part in the step.
    """
    if min(verified, accepted, committed) < 0:
        return NEGATIVE
    if verified > drafted:
        return OVER_VERIFIED
    if accepted > verified:
        return OVER_ACCEPTED
    if committed > accepted + 1:
        return OVER_COMMITTED
    if committed == 0 and verified > 0:
        return NOTHING_COMMITTED
    for p in range(matched.shape[0]):
        if matched[p, row] < -1 or matched[p, row] > most_matched:
            return MISMATCHED
    return SOUND


def told(
    flaws: Int16Array, drafted: Int16Array, result: StepResult
) -> Iterator[tuple[Flaw, str, int]]:
    """Every kind of flaw among rows [n]: what the first row of it has, and how many there are."""
    kinds, rows, counts = np.unique(flaws, return_index=True, return_counts=True)
    for kind, row, count in zip(kinds.tolist(), rows.tolist(), counts.tolist(), strict=True):
        if kind == SOUND:
            continue
        matched = "" if result.matched is None else f", matched {result.matched[:, row].tolist()}"
        yield (
            FLAWS[kind],
            f"row {row} has verified {result.verified[row]}, accepted {result.accepted[row]}, "
            f"committed {result.committed[row]}{matched} of {drafted[row]} drafted tokens; "
            f"{FLAWS[kind].advice}",
            count,
        )
