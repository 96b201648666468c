"""What drafts are worth of which more will be known before they are verified."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from autospec.allocation import Prices, appended_gains
from autospec.cost import KNOTS
from autospec.octave import NUM_OCTAVES, octave_of
from autospec.records import Float32Array, Int16Array, ProposerInfo

_FIRST = 20.0  # expected tokens that the first guess weighs
_FIRST_SHARE = 0.3
_MEMORY = 2000.0  # expected tokens that are remembered


class Appended:
    """Tokens appended behind a head's: which share of their gain is left after their cost.

    Before drafting, nobody knows for which requests a lookup will go on from the head's tokens.
    ``trim`` then verifies those that are worth it, so the gain before drafting is not that of the
    positions asked for at full price. The share is learned, an octave of running requests apart.
    """

    def __init__(self, proposers: Sequence[ProposerInfo]) -> None:
        names = [info.name for info in proposers]
        known = [info.head_k if info.head in names else 0 for info in proposers]
        self.head_k = np.array(known, dtype=np.int16)
        self.any = bool(self.head_k.any())
        self._brought = np.full((NUM_OCTAVES, len(names)), _FIRST * _FIRST_SHARE)
        self._expected = np.full((NUM_OCTAVES, len(names)), _FIRST)
        self._price = np.zeros(len(names))
        self._gross = np.zeros((len(names), 0))

    def plan(self, limits: Int16Array, prices: Prices, rate: float, gains: Float32Array) -> None:
        """Rewrite the gains [n, p, k] of what is appended."""
        n = limits.shape[1]
        if self._gross.shape[1] != n:
            self._gross = np.zeros((limits.shape[0], n))
        segment = int(np.searchsorted(KNOTS, n, side="right")) - 1
        self._price = rate * (prices.slopes[max(segment, 0)] + prices.draft[:, 2])
        octave = octave_of(n)
        share = np.clip(self._brought[octave] / self._expected[octave], 0.0, 1.0)
        appended_gains(limits, self.head_k, self._price, share, gains, self._gross)

    def expect(self, proposer: Int16Array) -> None:
        """A step was planned."""
        if not self.any or self._gross.shape[1] != len(proposer):
            return
        octave = octave_of(len(proposer))
        for p in np.flatnonzero(self.head_k):
            gross = float(self._gross[p, proposer == p].sum())
            keep = max(0.0, 1.0 - gross / _MEMORY)
            self._brought[octave, p] *= keep
            self._expected[octave, p] = self._expected[octave, p] * keep + gross

    def note(self, proposer: Int16Array, verified: Int16Array, accepted: Int16Array) -> None:
        """What came of it."""
        if not self.any:
            return
        octave = octave_of(len(proposer))
        for p in np.flatnonzero(self.head_k):
            rows = proposer == p
            if rows.any():
                tail = np.maximum(accepted[rows] - self.head_k[p], 0).sum()
                cost = np.maximum(verified[rows] - self.head_k[p], 0).sum() * self._price[p]
                self._brought[octave, p] += float(tail - cost)

    def state(self) -> Mapping[str, Any]:
        """Everything, as JSON."""
        return {
            "brought": self._brought.tolist(),
            "expected": self._expected.tolist(),
            "price": self._price.tolist(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved ``state``."""
        self._brought = np.array(state["brought"])
        self._expected = np.array(state["expected"])
        self._price = np.array(state["price"])
