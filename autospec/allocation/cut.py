"""Where to cut a step's drafts, if a token's price depends on how many there are."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from autospec.allocation.choice import (
    LEAST_STEP_SECONDS,
    NUM_BUCKETS,
    Aim,
    Prices,
    Workspace,
    score_of,
)
from autospec.compiled import compiled_brief, inlined
from autospec.cost.coefficients import KNOTS
from autospec.cost.shapes import STEPPED, round_up
from autospec.records import Float32Array, Int16Array

_LEAST_GAIN = 0.01  # of the largest: smaller ones are not looked at
_FEW = 48  # gains that are sorted without buckets


@compiled_brief
def cut_drafts(
    n: int,
    gains: Float32Array,
    limits: Int16Array,
    lookup: NDArray[np.bool_],
    prices: Prices,
    aim: Aim,
    room: Workspace,
) -> None:
    """With proposers fixed, take positions by falling gain and stop at the best true score."""
    proposer, k, depth = room.trial.proposer, room.trial.k, room.trial.depth
    gain, row, draft = room.sorted_gains, room.sorted_rows, prices.draft
    top = 0.0
    for i in range(n):
        if proposer[i] >= 0 and limits[proposer[i], i] > 0:
            top = max(top, gains[i, proposer[i], 0])
    if top <= 0.0:
        return
    size = _sort_gains(n, gains, limits, lookup, top, room)
    slopes = prices.slopes
    segment = 0
    full_segments = 0.0  # seconds of the tokens up to where the last segment begins
    best_score = -np.inf
    best_size = 0
    value = 0.0
    drafting = 0.0
    verified = 0.0
    for size_now in range(size + 1):
        if size_now > 0:
            i = row[size_now - 1]
            value += gain[size_now - 1]
            drafting += draft[proposer[i], 2]
            verified += aim.share[proposer[i]]
        tokens = n + verified
        if prices.shape == STEPPED:
            tokens = float(round_up(int(np.ceil(tokens)), prices.captured))
        while segment + 1 < slopes.shape[0] and KNOTS[segment + 1] < tokens:
            full_segments += slopes[segment] * (KNOTS[segment + 1] - KNOTS[segment])
            segment += 1
        verifying = full_segments + slopes[segment] * (tokens - KNOTS[segment])
        seconds = LEAST_STEP_SECONDS + prices.base + verifying + drafting
        if size_now > 0:
            seconds += prices.speculating
            for p in range(depth.shape[0]):
                if depth[p] > 0:
                    seconds += draft[p, 0] + draft[p, 1] * depth[p]
        score = score_of(value, seconds, aim)
        if score > best_score:
            best_score = score
            best_size = size_now
    k[:] = 0
    for a in range(best_size):
        k[row[a]] += 1
    for i in range(n):
        if k[i] == 0:
            proposer[i] = -1


@compiled_brief
def _sort_gains(
    n: int,
    gains: Float32Array,
    limits: Int16Array,
    lookup: NDArray[np.bool_],
    top: float,
    room: Workspace,
) -> int:
    """Gains of the trial's proposers and their rows by falling gain; returns how many count.

    Many are put into buckets first; of equal gains the rows stay in order.
    """
    proposer, depth = room.trial.proposer, room.trial.depth
    gain, row, counts = room.sorted_gains, room.sorted_rows, room.counts
    found_gain, found_row = room.found_gains, room.found_rows
    least = _LEAST_GAIN * top
    size = 0
    for i in range(n):
        p = proposer[i]
        if p < 0:
            continue
        limit = limits[p, i] if lookup[p] else min(limits[p, i], depth[p])
        for j in range(limit):
            g = gains[i, p, j]
            if g < least:
                break
            found_gain[size] = g
            found_row[size] = i
            size += 1
    if size <= _FEW:
        for a in range(size):
            gain[a] = found_gain[a]
            row[a] = found_row[a]
    else:
        counts[:] = 0
        for a in range(size):
            counts[_bucket(found_gain[a], top) + 1] += 1
        for b in range(NUM_BUCKETS):
            counts[b + 1] += counts[b]
        for a in range(size):
            b = _bucket(found_gain[a], top)
            gain[counts[b]] = found_gain[a]
            row[counts[b]] = found_row[a]
            counts[b] += 1
    for a in range(1, size):
        g = gain[a]
        r = row[a]
        b = a - 1
        while b >= 0 and gain[b] < g:
            gain[b + 1] = gain[b]
            row[b + 1] = row[b]
            b -= 1
        gain[b + 1] = g
        row[b + 1] = r
    return size


@inlined
def _bucket(gain: float, top: float) -> int:
    return max(0, int((1.0 - gain / top) * (NUM_BUCKETS - 1)))
