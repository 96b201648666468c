"""Who drafts and how many tokens: the fractional program of one step, solved.

Maximize ``score = value / seconds`` over a proposer and a k for every request, where

    value   = base value + sum of gains of the draft positions taken
    seconds = base + F(paid tokens) + drafting

Gains never increase with the position, so for a price L (value per second, the score itself at
the optimum) a position is worth taking exactly when its gain exceeds L x its seconds, and a request
takes the proposer with the larger sum of such surpluses (Dinkelbach, Management Science 13(7),
1967). The depth of a model is paid by the whole batch and is enumerated. Where a token's price
depends on how many there are (captured sizes, kinks), the chosen positions are sorted by gain and
every cut is tried at its true cost. A padded engine pays for its longest row, which is enumerated.

For latency the price is that of the sum left. When the price of a second is given (``rate``),
value - rate x seconds is maximized.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from autospec.allocation.choice import Aim, Prices, Workspace, copy_choice, evaluate, score_of
from autospec.allocation.cut import cut_drafts
from autospec.allocation.depths import best_depths, pattern_kept
from autospec.compiled import compiled_brief
from autospec.cost.coefficients import KNOTS, token_seconds
from autospec.cost.shapes import PADDED, STEPPED
from autospec.records import Float32Array, Float64Array, Int16Array

_PRICE_ROUNDS = 6
_LATENCY_STARTS = 6
_BEND = 0.05  # relative change of a token's price that counts as a kink


@compiled_brief
def _surplus(
    n: int,
    gains: Float32Array,
    limits: Int16Array,
    stale: Float64Array,
    lookup: NDArray[np.bool_],
    draft: Float64Array,
    price: float,
    room: Workspace,
) -> None:
    """The best sum of gains minus prices within d positions, fees paid once: ``surplus[p, d, i]``.

    Of lookups only that of all positions: ``surplus[p, 0, i]``; the best of them is kept as well.
    """
    surplus, prices, best_lookup = room.surplus, room.prices, room.best_lookup
    deepest, paying = room.deepest, room.paying
    best_lookup[:] = 0.0
    for p in range(limits.shape[0]):
        cost = prices[p]
        for i in range(n):
            total = -(price * draft[p, 3] * stale[p, i])
            j = 0
            if lookup[p]:
                while j < limits[p, i] and gains[i, p, j] > cost:
                    total += gains[i, p, j] - cost
                    j += 1
                paying[p, i] = j
                surplus[p, 0, i] = max(0.0, total)
                best_lookup[i] = max(best_lookup[i], surplus[p, 0, i])
                continue
            surplus[p, 0, i] = 0.0
            while j < limits[p, i] and gains[i, p, j] > cost:
                total += gains[i, p, j] - cost
                j += 1
                surplus[p, j, i] = max(0.0, total)
            paying[p, i] = j
            for d in range(j + 1, deepest[p] + 1):
                surplus[p, d, i] = max(0.0, total) if j > 0 else 0.0


@compiled_brief
def _assign(n: int, lookup: NDArray[np.bool_], room: Workspace) -> None:
    """Each request takes the proposer with the largest surplus and its positions worth taking."""
    surplus, paying = room.surplus, room.paying
    trial = room.trial
    proposer, k, depth = trial.proposer, trial.k, trial.depth
    advantage, alone = trial.advantage, trial.alone
    advantage[:] = 0.0
    alone[:] = 0.0
    for i in range(n):
        best = 0.0
        second = 0.0
        chosen = -1
        for p in range(lookup.shape[0]):
            worth = surplus[p, 0 if lookup[p] else depth[p], i]
            alone[p] += worth
            if worth > best:
                second = best
                best = worth
                chosen = p
            else:
                second = max(second, worth)
        if chosen >= 0:
            advantage[chosen] += best - second
        proposer[i] = chosen
        k[i] = 0
        if chosen >= 0:
            taken = paying[chosen, i]
            if not lookup[chosen]:
                taken = min(taken, depth[chosen])
            k[i] = taken
            if taken == 0:
                proposer[i] = -1


@compiled_brief
def solve(
    n: int,
    gains: Float32Array,
    limits: Int16Array,
    stale: Float64Array,
    lookup: NDArray[np.bool_],
    prices: Prices,
    aim: Aim,
    room: Workspace,
) -> tuple[float, float]:
    """Solve one step of ``n`` requests: fill ``room.best``; returns (sum of gains, seconds).

    ``gains`` [n, p, k] fall with the position, ``limits`` [p, n] say how many positions each
    proposer has, ``lookup`` [p] which drafts are already there. ``stale`` [p, n] tokens are charged
    to a request that takes a model.
    """
    num_proposers = limits.shape[0]
    slopes, draft, shape, deepest = prices.slopes, prices.draft, prices.shape, room.deepest
    base_value, latency, rate = aim.base_value, aim.latency, aim.rate
    best, trial, token_prices = room.best, room.trial, room.prices
    models = room.models
    num_models = 0
    for p in range(num_proposers):
        deepest[p] = 0
        if not lookup[p]:
            models[num_models] = p
            num_models += 1
    models = models[:num_models]
    reachable = n
    longest = 0
    for i in range(n):
        most = 0
        for p in range(num_proposers):
            most = max(most, limits[p, i])
            if not lookup[p]:
                deepest[p] = max(deepest[p], limits[p, i])
        reachable += most
        longest = max(longest, most)
    best.proposer[:] = -1
    best.k[:] = 0
    best.advantage[:] = 0.0
    best.alone[:] = 0.0
    best_value, best_seconds = evaluate(n, gains, stale, lookup, prices, aim.share, best)
    best_score = score_of(best_value, best_seconds, aim)
    if pattern_kept(best.depth, aim.held_depth):
        best_score += aim.hold * (base_value if rate > 0.0 else best_score)
    if longest == 0:
        return best_value, best_seconds
    capped = room.capped if shape == PADDED else limits

    first = 0
    while first + 1 < slopes.shape[0] and KNOTS[first + 1] <= n:
        first += 1
    last = first
    while last + 1 < slopes.shape[0] and KNOTS[last + 1] < reachable:
        last += 1
    bent = shape == STEPPED
    convex = not bent
    for s in range(first, last):
        bent = bent or abs(slopes[s + 1] - slopes[first]) > _BEND * slopes[first]
        convex = convex and slopes[s + 1] >= (1.0 - _BEND) * slopes[s]
    # Where the score is not quasi-convex (latency, kinks, captured sizes), try several starts.
    num_prices = longest if shape == PADDED else last - first + 1
    chord = 0.0
    if shape != PADDED and not convex:
        chord = (token_seconds(reachable, slopes, KNOTS) - token_seconds(n, slopes, KNOTS)) / max(
            reachable - n, 1
        )
        num_prices += 4
    num_starts = _LATENCY_STARTS if latency else 1
    tried = -1.0
    for attempt in range(num_prices * num_starts):
        which = attempt // num_starts
        start = attempt % num_starts
        token_price = 0.0
        if shape == PADDED:
            for p in range(num_proposers):
                for i in range(n):
                    capped[p, i] = min(limits[p, i], which + 1)
        elif which > last - first:
            token_price = chord * (0.0, 0.5, 1.0, 2.0)[which - (last - first) - 1]
        else:
            token_price = slopes[first + which]
            if start == 0:
                if tried >= 0.0 and abs(token_price - tried) < _BEND * (token_price + tried):
                    continue
                tried = token_price
        price = (
            max(base_value - best_value, 1e-9) if latency else base_value + best_value
        ) / best_seconds
        price *= 0.6**start
        if rate > 0.0:
            price = rate
        for _ in range(_PRICE_ROUNDS):
            for p in range(num_proposers):
                token_prices[p] = price * (aim.share[p] * token_price + draft[p, 2])
            _surplus(n, gains, capped, stale, lookup, draft, price, room)
            best_depths(n, room, models, draft, price, aim)
            _assign(n, lookup, room)
            if bent and shape != PADDED:
                cut_drafts(n, gains, capped, lookup, prices, aim, room)
            value, seconds = evaluate(n, gains, stale, lookup, prices, aim.share, trial)
            score = score_of(value, seconds, aim)
            if pattern_kept(trial.depth, aim.held_depth):
                score += aim.hold * (base_value if rate > 0.0 else score)
            if score > best_score:
                best_score = score
                best_value = value
                best_seconds = seconds
                copy_choice(n, trial, best)
            next_price = (
                max(base_value - value, 1e-9) if latency else base_value + value
            ) / seconds
            if rate > 0.0 or abs(next_price - price) <= 1e-6 * price:
                break
            price = next_price
    return best_value, best_seconds
