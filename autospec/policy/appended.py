"""What drafts are worth of which more will be known before they are verified."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from autospec.allocation.choice import Prices
from autospec.compiled import compiled_brief
from autospec.cost.coefficients import KNOTS
from autospec.octave import NUM_OCTAVES
from autospec.records import Float32Array, Float64Array, Int16Array, ProposerInfo

_FIRST = 20.0  # expected tokens that the first guess weighs
_FIRST_SHARE = 0.3
_MEMORY = 2000.0  # expected tokens that are remembered


class AppendedArrays(NamedTuple):
    """What was expected and came of tokens behind a head, by octave of load.

    The first ``head_k`` of a proposer's tokens are its head's, 0 where it has none. ``price`` is
    that of a token in the last step planned.
    """

    head_k: Int16Array  # [p]
    brought: Float64Array  # [octave, p]
    expected: Float64Array  # [octave, p]
    price: Float64Array  # [p]


@compiled_brief
def appended_gains(
    appended: AppendedArrays,
    octave: int,
    n: int,
    limits: Int16Array,
    prices: Prices,
    rate: float,
    gains: Float32Array,
    gross: Float64Array,
) -> None:
    """Gains [n, p, k] of positions behind a head, which are looked at again when drafted.

    Of such a position only what will then be worth its price is verified: the share of its gain
    that is left after its cost comes on top of the price. ``gross`` [p, n] become the sums of their
    gains.
    """
    segment = 0
    while segment + 1 < KNOTS.shape[0] and KNOTS[segment + 1] <= n:
        segment += 1
    for p in range(limits.shape[0]):
        price = rate * (prices.slopes[segment] + prices.draft[p, 2])
        share = min(max(appended.brought[octave, p] / appended.expected[octave, p], 0.0), 1.0)
        appended.price[p] = price
        for i in range(n):
            gross[p, i] = 0.0
            if appended.head_k[p] > 0:
                for j in range(appended.head_k[p], limits[p, i]):
                    gross[p, i] += gains[i, p, j]
                    gains[i, p, j] = price * (1.0 + 1e-6) + share * gains[i, p, j]


@compiled_brief
def expect_appended(
    appended: AppendedArrays, octave: int, n: int, proposer: Int16Array, gross: Float64Array
) -> None:
    """A step was planned."""
    for p in range(gross.shape[0]):
        if appended.head_k[p] == 0:
            continue
        total = 0.0
        for i in range(n):
            if proposer[i] == p:
                total += gross[p, i]
        keep = max(0.0, 1.0 - total / _MEMORY)
        appended.brought[octave, p] *= keep
        appended.expected[octave, p] = appended.expected[octave, p] * keep + total


@compiled_brief
def note_appended(
    appended: AppendedArrays,
    octave: int,
    proposer: Int16Array,
    verified: Int16Array,
    accepted: Int16Array,
) -> None:
    """What came of it."""
    for p in range(appended.head_k.shape[0]):
        if appended.head_k[p] == 0:
            continue
        brought = 0
        cost = 0
        for i in range(proposer.shape[0]):
            if proposer[i] == p:
                brought += max(accepted[i] - appended.head_k[p], 0)
                cost += max(verified[i] - appended.head_k[p], 0)
        appended.brought[octave, p] += brought - cost * appended.price[p]


class Appended:
    """Tokens appended behind a head's: which share of their gain is left after their cost.

    Before drafting, nobody knows for which requests a lookup will go on from the head's tokens.
    ``trim`` then verifies those that are worth it, so the gain before drafting is not that of the
    positions asked for at full price. The share is learned, an octave of running requests apart.
    """

    def __init__(self, proposers: Sequence[ProposerInfo]) -> None:
        names = [info.name for info in proposers]
        known = [info.head_k if info.head in names else 0 for info in proposers]
        size = (NUM_OCTAVES, len(names))
        self.arrays = AppendedArrays(
            np.array(known, dtype=np.int16),
            np.full(size, _FIRST * _FIRST_SHARE),
            np.full(size, _FIRST),
            np.zeros(len(names)),
        )
        self.any = bool(self.arrays.head_k.any())

    def state(self) -> Mapping[str, Any]:
        """Everything, as JSON."""
        return {
            "brought": self.arrays.brought.tolist(),
            "expected": self.arrays.expected.tolist(),
            "price": self.arrays.price.tolist(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved ``state``."""
        self.arrays.brought[:] = state["brought"]
        self.arrays.expected[:] = state["expected"]
        self.arrays.price[:] = state["price"]
