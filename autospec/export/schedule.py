"""A k for every batch size, in few bands: least goodput lost, then few bands, then small k."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autospec.records import Float64Array

TOLERANCE = 0.005
"""A loss of goodput that is not worth a larger k or another band."""

MOST_BANDS = 6


@dataclass(frozen=True, slots=True)
class Band:
    """Batch sizes ``first`` to ``last``, both included, draft ``k`` tokens."""

    first: int
    last: int
    k: int


def fit_bands(
    sizes: Sequence[int],
    goodputs: Float64Array,
    *,
    falling: bool = False,
    most_bands: int = MOST_BANDS,
    tolerance: float = TOLERANCE,
) -> tuple[Band, ...]:
    """Bands over ``sizes``, which rise from 1; with ``falling`` k never rises with the batch.

    ``goodputs`` [size, k] are those of each k at each size, NaN where a k is not to be had; k = 0
    always is. Sizes between two of ``sizes`` belong to the next one. Each octave of batch sizes
    counts alike. Losses of up to ``tolerance`` at a size count as none; a further band must
    bring down the mean loss by a tenth of it.
    """
    count, depth = goodputs.shape
    best = np.nanmax(goodputs, axis=1, keepdims=True)
    with np.errstate(invalid="ignore"):
        loss = np.log(best / goodputs)
    loss = np.where(np.isnan(loss), np.inf, loss)
    loss = np.where(loss <= tolerance, 0.0, loss)
    ends = np.array(sizes, dtype=np.float64)
    begins = np.concatenate(([0.0], ends[:-1])) + 1.0
    weights = np.log2((ends + 1.0) / begins)
    weights /= weights.sum()
    tie = 1e-9 * (1.0 + np.arange(depth)) / depth  # of equal k the smaller
    cost = weights[:, None] * (loss + tie)
    chosen = _fewest(cost, most_bands, 0.1 * tolerance, falling)
    bands: list[Band] = []
    first = 1
    for index in range(count):
        if index + 1 == count or chosen[index + 1] != chosen[index]:
            bands.append(Band(first, int(sizes[index]), int(chosen[index])))
            first = int(sizes[index]) + 1
    return tuple(bands)


def _fewest(cost: Float64Array, most_bands: int, price: float, falling: bool) -> list[int]:
    """The k of each size with the least sum of costs plus ``price`` per band.

    ``total[b, i, k]`` is the least cost of sizes 0..i in b + 1 bands, the last of them at k.
    """
    count, depth = cost.shape
    total = np.full((most_bands, count, depth), np.inf)
    came_from = np.full((most_bands, count, depth), -1, dtype=np.int64)
    total[0, 0] = cost[0]
    for index in range(1, count):
        for band in range(most_bands):
            total[band, index] = total[band, index - 1]
            if band == 0:
                continue
            before = total[band - 1, index - 1]
            for k in range(depth):
                sources = np.arange(k + 1, depth) if falling else np.delete(np.arange(depth), k)
                if len(sources) == 0:
                    continue
                source = int(sources[np.argmin(before[sources])])
                if before[source] < total[band, index, k]:
                    total[band, index, k] = before[source]
                    came_from[band, index, k] = source
        total[:, index] += cost[index]
    priced = total[:, -1] + price * np.arange(most_bands)[:, None]
    band, k = (int(each) for each in np.unravel_index(np.argmin(priced), priced.shape))
    chosen = [k]
    for index in range(count - 1, 0, -1):
        source = int(came_from[band, index, k])
        if source >= 0:
            k = source
            band -= 1
        chosen.append(k)
    return chosen[::-1]
