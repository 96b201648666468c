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

Throughput uses gains S_j. Latency minimizes the mean of seconds / (1 + A_r) over requests, with
A_r the accepted tokens; its gains are 1/(1 + A_{j-1}) - 1/(1 + A_j), and the price is that of the
sum left. When the price of a second is given (``rate``), value - rate x seconds is maximized.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autospec.compiled import compiled
from autospec.cost import KNOTS, round_up, token_seconds
from autospec.records import Float32Array, Float64Array, Int16Array, Int32Array, Shape

SHAPES: dict[Shape, int] = {"packed": 0, "padded": 1, "stepped": 2}
_PADDED = 1
_STEPPED = 2
_MAX_COMBINATIONS = 2048
_PRICE_ROUNDS = 6
_LATENCY_STARTS = 6
_LEAST_GAIN = 0.01
_LEAST_SECONDS = 1e-12  # a step that costs nothing has no goodput
_NUM_BUCKETS = 512
_NOTHING_CAPTURED: Int32Array = np.zeros(0, dtype=np.int32)
_FLAT = 0.01  # share of a model's price that all its depths together may take to count as none
_BEND = 0.05  # relative change of a token's price that counts as a kink


class Prices(NamedTuple):
    """What the engine charges, in seconds, for one step.

    ``base`` is the target forward without its tokens, ``speculating`` what any draft adds to it,
    ``slopes`` the price of a token in each segment between ``cost.KNOTS``, ``draft`` [p, 4] what
    each model charges per step in use, per depth, per drafted and per caught-up token.
    """

    base: float
    speculating: float
    slopes: Float64Array
    draft: Float64Array
    shape: Shape = "packed"
    captured: Int32Array = _NOTHING_CAPTURED


class Allocation(NamedTuple):
    """The solution: ``proposer`` [n], ``k`` [n] and ``depth`` [p], its value and its seconds.

    ``advantage`` [p] is the value above its price that would be lost without a proposer, ``alone``
    what it would bring without the others.
    """

    proposer: Int16Array
    k: Int16Array
    depth: Int16Array
    advantage: Float64Array
    alone: Float64Array
    value: float
    seconds: float

    @classmethod
    def empty(cls, num_proposers: int, n: int) -> Allocation:
        """Room for one, to be handed to ``allocate`` again and again."""
        return cls(
            np.zeros(n, dtype=np.int16),
            np.zeros(n, dtype=np.int16),
            np.zeros(num_proposers, dtype=np.int16),
            np.zeros(num_proposers),
            np.zeros(num_proposers),
            0.0,
            0.0,
        )


@compiled
def throughput_gains(
    hazards: Float32Array, limits: Int16Array, share: Float64Array, gains: Float32Array
) -> None:
    """S_j [n, p, k] of hazards [n, p, k], up to ``limits`` [p, n].

    ``share`` [p] of a proposer's drafts will be verified, which the hazards take for granted.
    """
    for i in range(hazards.shape[0]):
        for p in range(hazards.shape[1]):
            survival = share[p]
            for j in range(limits[p, i]):
                survival *= hazards[i, p, j]
                gains[i, p, j] = survival


@compiled
def weigh(gains: Float32Array, limits: Int16Array, weights: Float64Array) -> None:
    """Multiply the gains [n, p, k] of each row by its weight [n]."""
    for i in range(gains.shape[0]):
        if weights[i] != 1.0:
            for p in range(gains.shape[1]):
                for j in range(limits[p, i]):
                    gains[i, p, j] *= weights[i]


@compiled
def latency_gains(
    hazards: Float32Array,
    limits: Int16Array,
    share: Float64Array,
    weights: Float64Array,
    gains: Float32Array,
) -> None:
    """What each position takes off weight / (1 + accepted), the request's time per token."""
    for i in range(hazards.shape[0]):
        for p in range(hazards.shape[1]):
            survival = share[p]
            accepted = 0.0
            for j in range(limits[p, i]):
                survival *= hazards[i, p, j]
                before = 1.0 / (1.0 + accepted)
                accepted += survival
                gains[i, p, j] = weights[i] * (before - 1.0 / (1.0 + accepted))


@compiled
def appended_gains(
    limits: Int16Array, head_k: Int16Array, price: Float64Array, share: Float64Array,
    gains: Float32Array, gross: Float64Array,
) -> None:  # fmt: skip
    """Gains of positions behind a head of ``head_k`` [p], which are looked at again when drafted.

    Of such a position only what will then be worth its ``price`` [p] is verified: the ``share`` [p]
    of its gain that is left after its cost comes on top of the price. ``gross`` [p, n] become the
    sums of their gains.
    """
    for p in range(limits.shape[0]):
        for i in range(limits.shape[1]):
            gross[p, i] = 0.0
            if head_k[p] > 0:
                for j in range(head_k[p], limits[p, i]):
                    gross[p, i] += gains[i, p, j]
                    gains[i, p, j] = price[p] * (1.0 + 1e-6) + share[p] * gains[i, p, j]


@compiled
def _surplus(
    gains: Float32Array,
    limits: Int16Array,
    prices: Float64Array,
    fees: Float64Array,
    surplus: Float64Array,
) -> None:
    """surplus[p, i, d]: the best sum of gains minus prices within d positions, fees paid once."""
    for p in range(limits.shape[0]):
        for i in range(limits.shape[1]):
            total = -fees[p, i]
            surplus[p, i, 0] = 0.0
            open_ended = True
            for j in range(surplus.shape[2] - 1):
                if open_ended and j < limits[p, i] and gains[i, p, j] > prices[p]:
                    total += gains[i, p, j] - prices[p]
                else:
                    open_ended = False
                surplus[p, i, j + 1] = max(0.0, total)


@compiled
def _batch_surplus(
    surplus: Float64Array,
    best_lookup: Float64Array,
    models: NDArray[np.int64],
    depth: Int16Array,
    draft: Float64Array,
    price: float,
) -> float:
    """Surplus of the whole batch when model p may draft up to depth[p]."""
    total = 0.0
    for m in range(models.shape[0]):
        p = models[m]
        if depth[p] > 0:
            total -= price * (draft[p, 0] + draft[p, 1] * depth[p])
    for i in range(best_lookup.shape[0]):
        best = best_lookup[i]
        for m in range(models.shape[0]):
            best = max(best, surplus[models[m], i, depth[models[m]]])
        total += best
    return total


@compiled
def _pattern_kept(depth: Int16Array, held: Int16Array) -> bool:
    """Whether the same models are in use."""
    changed = 0
    for p in range(depth.shape[0]):
        if (depth[p] > 0) != (held[p] > 0):
            changed += 1
    return changed == 0


@compiled
def _best_depths(
    surplus: Float64Array,
    best_lookup: Float64Array,
    models: NDArray[np.int64],
    deepest: Int16Array,
    draft: Float64Array,
    price: float,
    held: Int16Array,
    hold: float,
    depth: Int16Array,
) -> None:
    """Depth of every model: exhaustively where that is cheap, else one model at a time.

    Of a model that drafts any depth at one price, only its deepest is tried.
    """
    depth[:] = 0
    count = models.shape[0]
    if count == 0:
        return
    combinations = 1
    pace = np.ones_like(depth)
    for m in range(count):
        p = models[m]
        if deepest[p] > 1 and draft[p, 1] * deepest[p] <= _FLAT * draft[p, 0]:
            pace[p] = deepest[p]
        combinations *= deepest[p] // pace[p] + 1
    trial = np.zeros_like(depth)
    best = -np.inf
    if combinations * best_lookup.shape[0] <= 16 * _MAX_COMBINATIONS or count == 1:
        for c in range(combinations):
            rest = c
            for m in range(count):
                p = models[m]
                options = deepest[p] // pace[p] + 1
                trial[p] = rest % options * pace[p]
                rest //= options
            worth = _batch_surplus(surplus, best_lookup, models, trial, draft, price)
            if _pattern_kept(trial, held):
                worth += hold
            if worth > best:
                best = worth
                depth[:] = trial
        return
    for _ in range(2):
        for m in range(count):
            p = models[m]
            trial[:] = depth
            best = -np.inf
            for d in range(0, deepest[p] + 1, pace[p]):
                trial[p] = d
                worth = _batch_surplus(surplus, best_lookup, models, trial, draft, price)
                if _pattern_kept(trial, held):
                    worth += hold
                if worth > best:
                    best = worth
                    depth[p] = d


@compiled
def _assign(
    gains: Float32Array,
    limits: Int16Array,
    surplus: Float64Array,
    lookup: NDArray[np.bool_],
    prices: Float64Array,
    depth: Int16Array,
    proposer: Int16Array,
    k: Int16Array,
    advantage: Float64Array,
    alone: Float64Array,
) -> None:
    """Each request takes the proposer with the largest surplus and its positions worth taking."""
    last = surplus.shape[2] - 1
    advantage[:] = 0.0
    alone[:] = 0.0
    for i in range(proposer.shape[0]):
        best = 0.0
        second = 0.0
        chosen = -1
        for p in range(limits.shape[0]):
            worth = surplus[p, i, last if lookup[p] else depth[p]]
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
            limit = limits[chosen, i]
            if not lookup[chosen]:
                limit = min(limit, depth[chosen])
            taken = 0
            while taken < limit and gains[i, chosen, taken] > prices[chosen]:
                taken += 1
            k[i] = taken
            if taken == 0:
                proposer[i] = -1


@compiled
def _score(value: float, seconds: float, base_value: float, latency: bool, rate: float) -> float:
    if latency:
        return 1.0 / (seconds * max(base_value - value, 1e-9))
    if rate > 0.0:
        return base_value + value - rate * seconds
    return (base_value + value) / seconds


@compiled
def _cut(
    gains: Float32Array,
    limits: Int16Array,
    depth: Int16Array,
    lookup: NDArray[np.bool_],
    base_value: float,
    latency: bool,
    rate: float,
    base_seconds: float,
    speculating: float,
    slopes: Float64Array,
    knots: Float64Array,
    captured: Int32Array,
    shape: int,
    draft: Float64Array,
    share: Float64Array,
    proposer: Int16Array,
    k: Int16Array,
) -> None:
    """With proposers fixed, take positions by falling gain and stop at the best true score."""
    n = proposer.shape[0]
    total = 0
    for i in range(n):
        if proposer[i] >= 0:
            limit = limits[proposer[i], i]
            total += limit if lookup[proposer[i]] else min(limit, depth[proposer[i]])
    if total == 0:
        return
    gain = np.empty(total, dtype=np.float32)
    row = np.empty(total, dtype=np.int32)
    counts = np.zeros(_NUM_BUCKETS + 1, dtype=np.int32)
    top = 0.0
    for i in range(n):
        if proposer[i] >= 0 and limits[proposer[i], i] > 0:
            top = max(top, gains[i, proposer[i], 0])
    if top <= 0.0:
        return
    least = _LEAST_GAIN * top
    for fill in range(2):
        if fill == 1:
            for b in range(_NUM_BUCKETS):
                counts[b + 1] += counts[b]
        for i in range(n):
            p = proposer[i]
            if p < 0:
                continue
            limit = limits[p, i] if lookup[p] else min(limits[p, i], depth[p])
            for j in range(limit):
                g = gains[i, p, j]
                if g < least:
                    break
                b = int((1.0 - g / top) * (_NUM_BUCKETS - 1))
                if fill == 0:
                    counts[b + 1] += 1
                else:
                    gain[counts[b]] = g
                    row[counts[b]] = i
                    counts[b] += 1
    size = counts[_NUM_BUCKETS - 1]
    for a in range(1, size):  # exact order within buckets; rows stay in order of position
        g = gain[a]
        r = row[a]
        b = a - 1
        while b >= 0 and gain[b] < g:
            gain[b + 1] = gain[b]
            row[b + 1] = row[b]
            b -= 1
        gain[b + 1] = g
        row[b + 1] = r
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
            verified += share[proposer[i]]
        tokens = n + verified
        if shape == _STEPPED:
            tokens = float(round_up(int(np.ceil(tokens)), captured))
        seconds = _LEAST_SECONDS + base_seconds + token_seconds(tokens, slopes, knots) + drafting
        if size_now > 0:
            seconds += speculating
            for p in range(depth.shape[0]):
                if depth[p] > 0:
                    seconds += draft[p, 0] + draft[p, 1] * depth[p]
        score = _score(value, seconds, base_value, latency, rate)
        if score > best_score:
            best_score = score
            best_size = size_now
    k[:] = 0
    for a in range(best_size):
        k[row[a]] += 1
    for i in range(n):
        if k[i] == 0:
            proposer[i] = -1


@compiled
def _evaluate(
    gains: Float32Array,
    stale: Float64Array,
    lookup: NDArray[np.bool_],
    base_seconds: float,
    speculating: float,
    slopes: Float64Array,
    knots: Float64Array,
    captured: Int32Array,
    shape: int,
    draft: Float64Array,
    share: Float64Array,
    proposer: Int16Array,
    k: Int16Array,
    depth: Int16Array,
) -> tuple[float, float]:
    """(sum of gains, seconds) of a finished allocation; ``depth`` becomes what it really uses."""
    n = proposer.shape[0]
    value = 0.0
    seconds = base_seconds
    depth[:] = 0
    verified = 0.0
    longest = 0
    for i in range(n):
        p = proposer[i]
        if p < 0:
            continue
        for j in range(k[i]):
            value += gains[i, p, j]
        verified += share[p] * k[i]
        longest = max(longest, k[i])
        if not lookup[p]:
            depth[p] = max(depth[p], k[i])
            seconds += draft[p, 2] * k[i] + draft[p, 3] * stale[p, i]
    for p in range(depth.shape[0]):
        if depth[p] > 0:
            seconds += draft[p, 0] + draft[p, 1] * depth[p]
    if verified > 0.0:
        seconds += speculating
    tokens = n + verified
    if shape == _PADDED:
        tokens = float(n * (1 + longest))
    elif shape == _STEPPED:
        tokens = float(round_up(int(np.ceil(tokens)), captured))
    return value, max(seconds + token_seconds(tokens, slopes, knots), _LEAST_SECONDS)


@compiled
def solve(
    gains: Float32Array,
    limits: Int16Array,
    stale: Float64Array,
    lookup: NDArray[np.bool_],
    base_value: float,
    latency: bool,
    rate: float,
    base_seconds: float,
    speculating: float,
    slopes: Float64Array,
    knots: Float64Array,
    captured: Int32Array,
    shape: int,
    draft: Float64Array,
    share: Float64Array,
    held: Int16Array,
    hold: float,
    proposer: Int16Array,
    k: Int16Array,
    depth: Int16Array,
    advantage: Float64Array,
    alone: Float64Array,
) -> tuple[float, float]:
    """Fill ``proposer`` [n], ``k`` [n], ``depth`` [p]; returns (sum of gains, seconds)."""
    n = proposer.shape[0]
    num_proposers = limits.shape[0]
    models = np.nonzero(~lookup)[0]
    positions = gains.shape[2]
    deepest = np.zeros(num_proposers, dtype=np.int16)
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
    proposer[:] = -1
    k[:] = 0
    depth[:] = 0
    advantage[:] = 0.0
    alone[:] = 0.0
    best_value, best_seconds = _evaluate(
        gains, stale, lookup, base_seconds, speculating, slopes, knots, captured, shape, draft,
        share, proposer, k, depth,
    )  # fmt: skip
    best_score = _score(best_value, best_seconds, base_value, latency, rate)
    if _pattern_kept(depth, held):
        best_score += hold * (base_value if rate > 0.0 else best_score)
    if longest == 0:
        return best_value, best_seconds
    surplus = np.zeros((num_proposers, n, positions + 1))
    fees = np.zeros((num_proposers, n))
    prices = np.zeros(num_proposers)
    best_lookup = np.zeros(n)
    capped = limits.copy()
    trial_proposer = np.empty_like(proposer)
    trial_k = np.empty_like(k)
    trial_depth = np.zeros_like(depth)
    trial_advantage = np.zeros(num_proposers)
    trial_alone = np.zeros(num_proposers)

    first = 0
    while first + 1 < slopes.shape[0] and knots[first + 1] <= n:
        first += 1
    last = first
    while last + 1 < slopes.shape[0] and knots[last + 1] < reachable:
        last += 1
    bent = shape == _STEPPED
    convex = not bent
    for s in range(first, last):
        bent = bent or abs(slopes[s + 1] - slopes[first]) > _BEND * slopes[first]
        convex = convex and slopes[s + 1] >= (1.0 - _BEND) * slopes[s]
    # Where the score is not quasi-convex (latency, kinks, captured sizes), try several starts.
    num_prices = longest if shape == _PADDED else last - first + 1
    chord = 0.0
    if shape != _PADDED and not convex:
        chord = (token_seconds(reachable, slopes, knots) - token_seconds(n, slopes, knots)) / max(
            reachable - n, 1
        )
        num_prices += 4
    num_starts = _LATENCY_STARTS if latency else 1
    tried = -1.0
    for attempt in range(num_prices * num_starts):
        which = attempt // num_starts
        start = attempt % num_starts
        token_price = 0.0
        if shape == _PADDED:
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
                prices[p] = price * (share[p] * token_price + draft[p, 2])
                for i in range(n):
                    fees[p, i] = price * draft[p, 3] * stale[p, i]
            _surplus(gains, capped, prices, fees, surplus)
            for i in range(n):
                best_lookup[i] = 0.0
                for p in range(num_proposers):
                    if lookup[p]:
                        best_lookup[i] = max(best_lookup[i], surplus[p, i, positions])
            _best_depths(
                surplus, best_lookup, models, deepest, draft, price, held, hold * base_value,
                trial_depth,
            )  # fmt: skip
            _assign(
                gains, capped, surplus, lookup, prices, trial_depth, trial_proposer, trial_k,
                trial_advantage, trial_alone,
            )  # fmt: skip
            if bent and shape != _PADDED:
                _cut(
                    gains, capped, trial_depth, lookup, base_value, latency, rate, base_seconds,
                    speculating, slopes, knots, captured, shape, draft, share, trial_proposer,
                    trial_k,
                )  # fmt: skip
            value, seconds = _evaluate(
                gains, stale, lookup, base_seconds, speculating, slopes, knots, captured, shape,
                draft, share, trial_proposer, trial_k, trial_depth,
            )  # fmt: skip
            score = _score(value, seconds, base_value, latency, rate)
            if _pattern_kept(trial_depth, held):
                score += hold * (base_value if rate > 0.0 else score)
            if score > best_score:
                best_score = score
                best_value = value
                best_seconds = seconds
                proposer[:] = trial_proposer
                k[:] = trial_k
                depth[:] = trial_depth
                advantage[:] = trial_advantage
                alone[:] = trial_alone
            next_price = (
                max(base_value - value, 1e-9) if latency else base_value + value
            ) / seconds
            if rate > 0.0 or abs(next_price - price) <= 1e-6 * price:
                break
            price = next_price
    return best_value, best_seconds


@compiled
def limits_of(proposer: Int16Array, k: Int16Array, limits: Int16Array) -> int:
    """Write the limits [p, n] that leave each request its own k; returns how many there are."""
    limits[:] = 0
    count = 0
    for i in range(proposer.shape[0]):
        if proposer[i] >= 0 and k[i] > 0:
            limits[proposer[i], i] = k[i]
            count += 1
    return count


def even_shares(tokens: int, takers: NDArray[np.bool_]) -> Int16Array:
    """Draft tokens dealt out evenly [n] to the requests that can take some."""
    rank = np.cumsum(takers) - 1
    share, left = divmod(tokens, int(takers.sum()))
    return np.where(takers, share + (rank < left), 0).astype(np.int16)


def allocate(
    gains: Float32Array,
    limits: Int16Array,
    lookup: NDArray[np.bool_],
    prices: Prices,
    base_value: float,
    *,
    stale_tokens: Float64Array | None = None,
    latency: bool = False,
    rate: float = 0.0,
    share: Float64Array | None = None,
    held_depth: Int16Array | None = None,
    hold: float = 0.0,
    into: Allocation | None = None,
) -> Allocation:
    """Solve one step.

    ``gains`` [n, p, k] fall with the position, ``limits`` [p, n] say how many positions each
    proposer has, ``lookup`` [p] which drafts are already there. ``stale_tokens`` [p, n] are charged
    to a request that takes a model. ``share`` [p] of a proposer's tokens will be verified: what is
    left after a second look; all by default. ``hold`` is the relative advantage that another set
    of models than ``held_depth`` [p] must have. Latency's base value is the sum of its weights.
    The arrays of ``into`` are written over and returned.
    """
    num_proposers, n = limits.shape
    if into is None:
        into = Allocation.empty(num_proposers, n)
    proposer, k, depth, advantage, alone, _, _ = into
    value, seconds = solve(
        gains,
        limits,
        np.zeros(limits.shape) if stale_tokens is None else stale_tokens,
        lookup,
        base_value,
        latency,
        rate,
        prices.base,
        prices.speculating,
        prices.slopes,
        KNOTS,
        prices.captured,
        SHAPES[prices.shape],
        prices.draft,
        np.ones(num_proposers) if share is None else share,
        np.zeros(num_proposers, dtype=np.int16) if held_depth is None else held_depth,
        hold,
        proposer,
        k,
        depth,
        advantage,
        alone,
    )
    return Allocation(proposer, k, depth, advantage, alone, value, seconds)
