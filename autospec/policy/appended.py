"""What drafts are worth of which more will be known before they are verified."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from autospec.acceptance.shared_heads import shared_heads
from autospec.compiled import compiled_brief
from autospec.cost.coefficients import KNOTS
from autospec.octave import NUM_OCTAVES
from autospec.policy.promise import APPENDED, PRICE
from autospec.records import Float32Array, Float64Array, Int16Array, ProposerInfo

_FIRST = 100.0  # expected tokens that the first guess weighs
_DEARNESS = 14.0  # how fast that guess falls with the price of a token
_MEMORY = 2000.0  # expected tokens that are remembered
_IDLE_KEEP = 1.0 - 1.0 / 128.0  # of what is known, from step to step without new evidence


class AppendedArrays(NamedTuple):
    """What was expected and came of tokens behind a head, by octave of load.

    The first ``head_k`` of a proposer's tokens are its head's, 0 where it has none.
    """

    head_k: Int16Array  # [p]
    brought: Float64Array  # [octave, p]
    expected: Float64Array  # [octave, p]


@compiled_brief
def fold_appended(
    appended: AppendedArrays,
    octave: int,
    n: int,
    limits: Int16Array,
    gains: Float32Array,
    slopes: Float64Array,
    draft: Float64Array,
    rate: float,
    gross: Float64Array,
    within: Int16Array,
) -> None:
    """Count what is appended to a head among the gains [n, p, k] of the head's last positions.

    Of the positions behind a head only what will be worth its price is verified, once drafted. The
    share of their gain that is left after that price comes with the whole head. ``gross`` [p, n]
    become the sums of their gains, ``within`` [p, n] the limits without them.
    """
    slope = _slope(slopes, n)
    for p in range(limits.shape[0]):
        head_k = appended.head_k[p]
        price = rate * (slope + draft[p, 2])
        brought = appended.brought[octave, p] + _FIRST / (1.0 + _DEARNESS * price)
        share = min(max(brought / (appended.expected[octave, p] + _FIRST), 0.0), 1.0)
        for i in range(n):
            within[p, i] = limits[p, i]
            gross[p, i] = 0.0
            if head_k == 0 or limits[p, i] <= head_k:
                continue
            within[p, i] = head_k
            for j in range(head_k, limits[p, i]):
                gross[p, i] += gains[i, p, j]
            # Gains must not increase with the position: as many as it takes share the sum.
            first = head_k - 1
            total = gains[i, p, first] + share * gross[p, i]
            while first > 0 and total > gains[i, p, first - 1] * (head_k - first):
                first -= 1
                total += gains[i, p, first]
            for j in range(first, head_k):
                gains[i, p, j] = total / (head_k - first)


@compiled_brief
def _slope(slopes: Float64Array, tokens: int) -> float:
    """Seconds of one more token beside so many."""
    segment = 0
    while segment + 1 < KNOTS.shape[0] and KNOTS[segment + 1] <= tokens:
        segment += 1
    return float(slopes[segment])


@compiled_brief
def unfold_appended(
    appended: AppendedArrays,
    n: int,
    limits: Int16Array,
    slopes: Float64Array,
    draft: Float64Array,
    rate: float,
    gross: Float64Array,
    proposer: Int16Array,
    k: Int16Array,
    promised: Float64Array,
) -> None:
    """Let whole heads [n] go on up to ``limits`` [p, n]; promise the gains of that, and note the
    price of a token then."""
    tokens = n
    for i in range(n):
        tokens += k[i]
    slope = _slope(slopes, tokens)
    for p in range(limits.shape[0]):
        promised[PRICE, p] = rate * (slope + draft[p, 2])
    for i in range(n):
        p = proposer[i]
        if p >= 0 and appended.head_k[p] > 0 and k[i] == appended.head_k[p]:
            k[i] = limits[p, i]
            if k[i] > appended.head_k[p]:
                promised[APPENDED, p] += gross[p, i]


@compiled_brief
def note_appended(
    appended: AppendedArrays,
    octave: int,
    proposer: Int16Array,
    verified: Int16Array,
    accepted: Int16Array,
    promised: Float64Array,
) -> None:
    """What came of what a step had ``promised`` [4, p]; of proposers that promised nothing the
    evidence fades, and so they are tried again."""
    for p in range(appended.head_k.shape[0]):
        expected = promised[APPENDED, p]
        if expected <= 0.0:
            appended.brought[octave, p] *= _IDLE_KEEP
            appended.expected[octave, p] *= _IDLE_KEEP
            continue
        brought = 0
        cost = 0
        for i in range(proposer.shape[0]):
            if proposer[i] == p:
                brought += max(accepted[i] - appended.head_k[p], 0)
                cost += max(verified[i] - appended.head_k[p], 0)
        keep = max(0.0, 1.0 - expected / _MEMORY)
        net = brought - cost * promised[PRICE, p]
        appended.brought[octave, p] = appended.brought[octave, p] * keep + net
        appended.expected[octave, p] = appended.expected[octave, p] * keep + expected


class Appended:
    """Tokens appended behind a head's: which share of their gain is left after their cost.

    Before drafting, nobody knows for which requests a lookup will go on from the head's tokens.
    ``trim`` then verifies those that are worth it, so the gain before drafting is not that of the
    positions asked for at full price. The share is learned, an octave of running requests apart;
    until then it is guessed by the price of a token: where tokens are cheap, most of it is left.
    """

    def __init__(self, proposers: Sequence[ProposerInfo]) -> None:
        size = (NUM_OCTAVES, len(proposers))
        self.arrays = AppendedArrays(
            np.ascontiguousarray(shared_heads(proposers)[:, 1]),
            np.zeros(size),
            np.zeros(size),
        )
        self.any = bool(self.arrays.head_k.any())

    def state(self) -> Mapping[str, Any]:
        """Everything, as JSON."""
        return {
            "brought": self.arrays.brought.tolist(),
            "expected": self.arrays.expected.tolist(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved ``state``."""
        self.arrays.brought[:] = state["brought"]
        self.arrays.expected[:] = state["expected"]
