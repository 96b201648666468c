"""How much of what a model is asked for will be worth verifying, once it is there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autospec.compiled import compiled
from autospec.octave import NUM_OCTAVES, octave_of
from autospec.records import Float64Array, Int16Array

_FIRST_TOKENS = 16.0
_MEMORY_TOKENS = 512.0


@compiled
def _count(
    proposer: Int16Array,
    asked: Int16Array,
    kept: Int16Array,
    watched: NDArray[np.bool_],
    kept_tokens: Float64Array,
    asked_tokens: Float64Array,
    share: Float64Array,
) -> None:
    for i in range(proposer.shape[0]):
        p = proposer[i]
        if p >= 0 and watched[p] and asked[i] > 0:
            keep = max(0.0, 1.0 - asked[i] / _MEMORY_TOKENS)
            kept_tokens[p] = kept_tokens[p] * keep + kept[i]
            asked_tokens[p] = asked_tokens[p] * keep + asked[i]
    for p in range(share.shape[0]):
        share[p] = kept_tokens[p] / asked_tokens[p]


class KeptShare:
    """Kept over asked tokens of each watched proposer, an octave of running requests apart.

    ``trim`` verifies only those drafts that turn out to be worth it: only they can be accepted, and
    only they cost a verification, while drafting is paid for all. Until something was seen, all.
    """

    def __init__(self, watched: NDArray[np.bool_]) -> None:
        self._watched = watched
        self._kept = np.full((NUM_OCTAVES, len(watched)), _FIRST_TOKENS)
        self._asked = np.full((NUM_OCTAVES, len(watched)), _FIRST_TOKENS)
        self._share = np.ones((NUM_OCTAVES, len(watched)))

    def at(self, requests: int) -> Float64Array:
        """The shares [p] at this load."""
        share: Float64Array = self._share[octave_of(requests)]
        return share

    def note(self, proposer: Int16Array, asked: Int16Array, kept: Int16Array) -> None:
        """A step is over; all are [n]."""
        octave = octave_of(len(proposer))
        _count(
            proposer, asked, kept, self._watched, self._kept[octave], self._asked[octave],
            self._share[octave],
        )  # fmt: skip

    def state(self) -> Mapping[str, Any]:
        """Everything, as JSON."""
        return {"kept": self._kept.tolist(), "asked": self._asked.tolist()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved ``state``."""
        self._kept = np.array(state["kept"])
        self._asked = np.array(state["asked"])
        self._share = self._kept / self._asked
