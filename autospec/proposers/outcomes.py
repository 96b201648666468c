"""What became of a lookup's drafts: how much likelier some are right than their matches say.

Three offsets move the log-odds of a drafted token: that of the token, that of the token behind the
one before it, and that of the place it was copied from. All are learned from the texts as they go
on, whoever drafted and whatever was verified: each is a Gaussian belief that one Newton step of the
logistic likelihood updates per observation, as in ``acceptance.hazards``. Tokens share an
offset where they hash alike.
"""

from __future__ import annotations

from math import exp
from typing import NamedTuple

import numpy as np

from autospec.compiled import compiled
from autospec.records import Float32Array, Int32Array

IN_PROMPT, IN_OUTPUT, IN_CACHE = range(3)
"""Places a draft is copied from: the request's own text, or one that has ended."""

_TOKENS = 4096
_PAIRS = 1 << 14
_PAIR_SHIFT = np.uint64(64 - 14)
_OCTAVES = 16  # of how many tokens agree
_FIRST_PAIR = _TOKENS
_FIRST_PLACE = _TOKENS + _PAIRS
_ROWS = _FIRST_PLACE + 3 * _OCTAVES

_PRECISION = 4.0  # of an offset of nothing yet
_PLACE_PRECISION = 16.0  # all requests share it, and when they begin at once they are much alike
_MOST_PRECISION = 200.0
_MOST_OFFSET = 6.0


class Outcomes(NamedTuple):
    """Offsets and their precisions by row, and each slot's last draft until its text has gone on.

    Of a draft: where it began (0: none), its length, its tokens, the rows of their places, and
    their scores without offsets. ``prompts`` are the lengths of texts when they were seen first.
    """

    offsets: Float32Array  # [rows]
    precisions: Float32Array  # [rows]
    prompts: Int32Array  # [slots]
    starts: Int32Array  # [slots]
    counts: Int32Array  # [slots]
    drafts: Int32Array  # [slots, k]
    places: Int32Array  # [slots, k]
    scores: Float32Array  # [slots, k]

    @classmethod
    def empty(cls, slots: int, max_k: int) -> Outcomes:
        """Nothing seen yet."""
        precisions = np.full(_ROWS, _PRECISION, np.float32)
        precisions[_FIRST_PLACE:] = _PLACE_PRECISION
        of_drafts = (slots, max_k)
        return cls(
            np.zeros(_ROWS, np.float32),
            precisions,
            np.zeros(slots, np.int32),
            np.zeros(slots, np.int32),
            np.zeros(slots, np.int32),
            np.zeros(of_drafts, np.int32),
            np.zeros(of_drafts, np.int32),
            np.zeros(of_drafts, np.float32),
        )


@compiled
def token_row(token: int) -> int:
    """Row of a token's offset."""
    return token & (_TOKENS - 1)


@compiled
def pair_row(before: int, token: int) -> int:
    """Row of the offset of ``token`` behind ``before``."""
    mixed = (np.uint64(before) * np.uint64(0x9E3779B97F4A7C15)) ^ np.uint64(token)
    mixed *= np.uint64(0xD6E8FEB86659FD93)
    return _FIRST_PAIR + int(mixed >> _PAIR_SHIFT)


@compiled
def place_row(place: int, octave: int) -> int:
    """Row of the offset of a copy from ``place``, by the octave of how many tokens agree."""
    return _FIRST_PLACE + place * _OCTAVES + min(octave, _OCTAVES - 1)


@compiled
def learn_outcome(of: Outcomes, tokens: Int32Array, slot: int, length: int) -> None:
    """Compare a slot's last draft with its text, ``length`` tokens by now.

    Tokens after the first wrong one say nothing.
    """
    start = of.starts[slot]
    if start == 0 or length == start:
        return
    of.starts[slot] = 0
    if length < start:  # rewound, and maybe into a narrower history
        return
    offsets, precisions = of.offsets, of.precisions
    before = tokens[slot, start - 1]
    for j in range(min(of.counts[slot], length - start)):
        token = of.drafts[slot, j]
        rows = (token_row(token), pair_row(before, token), np.int64(of.places[slot, j]))
        score = of.scores[slot, j]
        for row in rows:
            score += offsets[row]
        p = 1.0 / (1.0 + exp(-score))
        is_right = token == tokens[slot, start + j]
        residual = (1.0 if is_right else 0.0) - p
        for row in rows:
            precisions[row] = min(precisions[row] + p * (1.0 - p), _MOST_PRECISION)
            offset = offsets[row] + residual / precisions[row]
            offsets[row] = min(max(offset, -_MOST_OFFSET), _MOST_OFFSET)
        if not is_right:
            return
        before = token
