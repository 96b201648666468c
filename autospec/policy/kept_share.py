"""How much of what a model drafts will be worth verifying, once it is there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from autospec.compiled import compiled_brief
from autospec.octave import NUM_OCTAVES
from autospec.records import Float64Array, Int16Array

_FIRST_TOKENS = 16.0
_MEMORY_TOKENS = 512.0


class ShareArrays(NamedTuple):
    """Kept and drafted tokens, and their ratio, by octave of load; of the ``watched`` [p] alone."""

    watched: NDArray[np.bool_]  # [p]
    kept: Float64Array  # [octave, p]
    drafted: Float64Array  # [octave, p]
    share: Float64Array  # [octave, p]


@compiled_brief
def note_kept(
    shares: ShareArrays, octave: int, proposer: Int16Array, drafted: Int16Array, kept: Int16Array
) -> None:
    """A step is over; all are [n]."""
    kept_tokens, drafted_tokens = shares.kept[octave], shares.drafted[octave]
    watched, share = shares.watched, shares.share[octave]
    for i in range(proposer.shape[0]):
        p = proposer[i]
        if p >= 0 and watched[p] and drafted[i] > 0:
            keep = max(0.0, 1.0 - drafted[i] / _MEMORY_TOKENS)
            kept_tokens[p] = kept_tokens[p] * keep + kept[i]
            drafted_tokens[p] = drafted_tokens[p] * keep + drafted[i]
    for p in range(kept_tokens.shape[0]):
        share[p] = kept_tokens[p] / drafted_tokens[p]


class KeptShare:
    """Kept over drafted tokens of each watched proposer, an octave of running requests apart.

    ``trim`` verifies only those drafts that turn out to be worth it: only they can be accepted, and
    only they cost a verification, while drafting is paid for all. Until something was seen, all.
    """

    def __init__(self, watched: NDArray[np.bool_]) -> None:
        size = (NUM_OCTAVES, len(watched))
        self.arrays = ShareArrays(
            watched, np.full(size, _FIRST_TOKENS), np.full(size, _FIRST_TOKENS), np.ones(size)
        )

    def state(self) -> Mapping[str, Any]:
        """Everything, as JSON."""
        return {"kept": self.arrays.kept.tolist(), "drafted": self.arrays.drafted.tolist()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved ``state``."""
        self.arrays.kept[:] = state["kept"]
        self.arrays.drafted[:] = state["drafted"]
        self.arrays.share[:] = self.arrays.kept / self.arrays.drafted
