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

from autospec.compiled import compiled_brief, inlined
from autospec.cost import KNOTS, PADDED, SHAPES, STEPPED, round_up, token_seconds
from autospec.records import Float32Array, Float64Array, Int16Array, Int32Array, Int64Array

_MAX_COMBINATIONS = 2048
_PRICE_ROUNDS = 6
_LATENCY_STARTS = 6
_LEAST_GAIN = 0.01
_LEAST_SECONDS = 1e-12  # a step that costs nothing has no goodput
_NUM_BUCKETS = 512
_FEW = 48  # gains that are sorted without buckets
_NOTHING_CAPTURED: Int32Array = np.zeros(0, dtype=np.int32)
_FLAT = 0.01  # share of a model's price that all its depths together may take to count as none
_BEND = 0.05  # relative change of a token's price that counts as a kink


class Prices(NamedTuple):
    """What the engine charges, in seconds, for one step.

    ``base`` is the target forward without its tokens, ``speculating`` what any draft adds to it,
    ``slopes`` the price of a token in each segment between ``cost.KNOTS``, ``draft`` [p, 4] what
    each model charges per step in use, per depth, per drafted and per caught-up token. ``shape``
    is one of ``cost.SHAPES``.
    """

    base: float
    speculating: float
    slopes: Float64Array
    draft: Float64Array
    shape: int = SHAPES["packed"]
    captured: Int32Array = _NOTHING_CAPTURED


class Aim(NamedTuple):
    """What is maximized: ``base_value`` is that of plain decoding, ``rate`` the price of a second.

    ``share`` [p] of a proposer's tokens will be verified: what is left after a second look.
    ``hold`` is the relative advantage that another set of models than ``held_depth`` [p] must have.
    """

    base_value: float
    latency: bool
    rate: float
    share: Float64Array
    held_depth: Int16Array
    hold: float


class Choice(NamedTuple):
    """``proposer`` [n], ``k`` [n] and ``depth`` [p].

    ``advantage`` [p] is the value above its price that would be lost without a proposer, ``alone``
    what it would bring without the others.
    """

    proposer: Int16Array
    k: Int16Array
    depth: Int16Array
    advantage: Float64Array
    alone: Float64Array

    @classmethod
    def empty(cls, num_proposers: int, n: int) -> Choice:
        """Room for one."""
        return cls(
            np.full(n, -1, dtype=np.int16),
            np.zeros(n, dtype=np.int16),
            np.zeros(num_proposers, dtype=np.int16),
            np.zeros(num_proposers),
            np.zeros(num_proposers),
        )


class Workspace(NamedTuple):
    """Room to solve steps of up to n requests in: the best choice so far, one on trial, scratch."""

    best: Choice
    trial: Choice
    surplus: Float64Array  # [p, k + 1, n]
    paying: Int16Array  # [p, n], positions worth their price
    best_lookup: Float64Array  # [n]
    worths: Float64Array  # [k + 1]
    capped: Int16Array  # [p, n]
    prices: Float64Array  # [p]
    models: Int64Array  # [p], the first of them
    deepest: Int16Array  # [p]
    pace: Int16Array  # [p]
    depth: Int16Array  # [p]
    counts: Int32Array  # [buckets + 1]
    sorted_gains: Float32Array  # [n * k]
    sorted_rows: Int32Array  # [n * k]
    found_gains: Float32Array  # [n * k]
    found_rows: Int32Array  # [n * k]

    @classmethod
    def empty(cls, num_proposers: int, n: int, positions: int) -> Workspace:
        """Room for up to ``n`` requests and drafts of ``positions`` tokens."""
        depths = np.zeros((3, num_proposers), dtype=np.int16)
        return cls(
            Choice.empty(num_proposers, n),
            Choice.empty(num_proposers, n),
            np.zeros((num_proposers, positions + 1, n)),
            np.zeros((num_proposers, n), dtype=np.int16),
            np.zeros(n),
            np.zeros(positions + 1),
            np.zeros((num_proposers, n), dtype=np.int16),
            np.zeros(num_proposers),
            np.zeros(num_proposers, dtype=np.int64),
            depths[0],
            depths[1],
            depths[2],
            np.zeros(_NUM_BUCKETS + 1, dtype=np.int32),
            np.zeros(n * positions, dtype=np.float32),
            np.zeros(n * positions, dtype=np.int32),
            np.zeros(n * positions, dtype=np.float32),
            np.zeros(n * positions, dtype=np.int32),
        )


@compiled_brief
def throughput_gains(
    hazards: Float32Array,
    limits: Int16Array,
    share: Float64Array,
    weights: Float64Array,
    gains: Float32Array,
) -> None:
    """S_j [n, p, k] of hazards [n, p, k], up to ``limits`` [p, n], times the row's weight [n].

    ``share`` [p] of a proposer's drafts will be verified, which the hazards take for granted.
    """
    for i in range(hazards.shape[0]):
        for p in range(hazards.shape[1]):
            survival = share[p]
            for j in range(limits[p, i]):
                survival *= hazards[i, p, j]
                gains[i, p, j] = survival
                if weights[i] != 1.0:
                    gains[i, p, j] *= weights[i]


@compiled_brief
def weigh(n: int, gains: Float32Array, limits: Int16Array, weights: Float64Array) -> None:
    """Multiply the gains [n, p, k] of each row by its weight [n]."""
    for i in range(n):
        if weights[i] != 1.0:
            for p in range(gains.shape[1]):
                for j in range(limits[p, i]):
                    gains[i, p, j] *= weights[i]


@compiled_brief
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
def _batch_surplus(
    n: int,
    surplus: Float64Array,
    best_lookup: Float64Array,
    models: Int64Array,
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
    for i in range(n):
        best = best_lookup[i]
        for m in range(models.shape[0]):
            best = max(best, surplus[models[m], depth[models[m]], i])
        total += best
    return total


@compiled_brief
def _only_model_worths(n: int, room: Workspace, p: int, draft: Float64Array, price: float) -> None:
    """``_batch_surplus`` of every depth of the only model p, all in one pass: ``worths[d]``."""
    surplus, best_lookup, worths = room.surplus, room.best_lookup, room.worths
    depths = range(0, room.deepest[p] + 1, room.pace[p])
    for d in depths:
        worths[d] = 0.0 if d == 0 else 0.0 - price * (draft[p, 0] + draft[p, 1] * d)
    for i in range(n):
        for d in depths:
            worths[d] += max(best_lookup[i], surplus[p, d, i])


@compiled_brief
def _pattern_kept(depth: Int16Array, held: Int16Array) -> bool:
    """Whether the same models are in use."""
    changed = 0
    for p in range(depth.shape[0]):
        if (depth[p] > 0) != (held[p] > 0):
            changed += 1
    return changed == 0


@compiled_brief
def copy_depths(depth: Int16Array, into: Int16Array) -> None:
    """Copy [p]; a slice's assignment takes many times as long to compile."""
    for p in range(depth.shape[0]):
        into[p] = depth[p]


@compiled_brief
def _best_depths(
    n: int, room: Workspace, models: Int64Array, draft: Float64Array, price: float, aim: Aim
) -> None:
    """Depth of every model: exhaustively where that is cheap, else one model at a time.

    Of a model that drafts any depth at one price, only its deepest is tried.
    """
    surplus, best_lookup, deepest = room.surplus, room.best_lookup, room.deepest
    pace, trial, depth = room.pace, room.depth, room.trial.depth
    hold = aim.hold * aim.base_value
    depth[:] = 0
    count = models.shape[0]
    if count == 0:
        return
    combinations = 1
    pace[:] = 1
    for m in range(count):
        p = models[m]
        if deepest[p] > 1 and draft[p, 1] * deepest[p] <= _FLAT * draft[p, 0]:
            pace[p] = deepest[p]
        combinations *= deepest[p] // pace[p] + 1
    trial[:] = 0
    best = -np.inf
    if count == 1:
        p = models[0]
        _only_model_worths(n, room, p, draft, price)
        for d in range(0, deepest[p] + 1, pace[p]):
            trial[p] = d
            worth = room.worths[d]
            if _pattern_kept(trial, aim.held_depth):
                worth += hold
            if worth > best:
                best = worth
                depth[p] = d
        return
    if combinations * n <= 16 * _MAX_COMBINATIONS:
        for _ in range(combinations):
            worth = _batch_surplus(n, surplus, best_lookup, models, trial, draft, price)
            if _pattern_kept(trial, aim.held_depth):
                worth += hold
            if worth > best:
                best = worth
                copy_depths(trial, depth)
            for m in range(count):  # count up, the first model's depth first
                p = models[m]
                trial[p] += pace[p]
                if trial[p] <= deepest[p]:
                    break
                trial[p] = 0
        return
    for _ in range(2):
        for m in range(count):
            p = models[m]
            copy_depths(depth, trial)
            best = -np.inf
            for d in range(0, deepest[p] + 1, pace[p]):
                trial[p] = d
                worth = _batch_surplus(n, surplus, best_lookup, models, trial, draft, price)
                if _pattern_kept(trial, aim.held_depth):
                    worth += hold
                if worth > best:
                    best = worth
                    depth[p] = d


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


@inlined
def _score(value: float, seconds: float, aim: Aim) -> float:
    if aim.latency:
        return 1.0 / (seconds * max(aim.base_value - value, 1e-9))
    if aim.rate > 0.0:
        return aim.base_value + value - aim.rate * seconds
    return (aim.base_value + value) / seconds


@compiled_brief
def _cut(
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
        seconds = _LEAST_SECONDS + prices.base + verifying + drafting
        if size_now > 0:
            seconds += prices.speculating
            for p in range(depth.shape[0]):
                if depth[p] > 0:
                    seconds += draft[p, 0] + draft[p, 1] * depth[p]
        score = _score(value, seconds, aim)
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
        for b in range(_NUM_BUCKETS):
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
    return max(0, int((1.0 - gain / top) * (_NUM_BUCKETS - 1)))


@compiled_brief
def _evaluate(
    n: int,
    gains: Float32Array,
    stale: Float64Array,
    lookup: NDArray[np.bool_],
    prices: Prices,
    share: Float64Array,
    choice: Choice,
) -> tuple[float, float]:
    """(sum of gains, seconds) of a choice; its ``depth`` becomes what it really uses."""
    proposer, k, depth, draft = choice.proposer, choice.k, choice.depth, prices.draft
    value = 0.0
    seconds = prices.base
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
        seconds += prices.speculating
    tokens = n + verified
    if prices.shape == PADDED:
        tokens = float(n * (1 + longest))
    elif prices.shape == STEPPED:
        tokens = float(round_up(int(np.ceil(tokens)), prices.captured))
    return value, max(seconds + token_seconds(tokens, prices.slopes, KNOTS), _LEAST_SECONDS)


@compiled_brief
def _keep(n: int, trial: Choice, best: Choice) -> None:
    """Copy a choice."""
    proposer, k, depth = best.proposer, best.k, best.depth
    advantage, alone = best.advantage, best.alone
    trial_proposer, trial_k, trial_depth = trial.proposer, trial.k, trial.depth
    trial_advantage, trial_alone = trial.advantage, trial.alone
    for i in range(n):
        proposer[i] = trial_proposer[i]
        k[i] = trial_k[i]
    for p in range(depth.shape[0]):
        depth[p] = trial_depth[p]
        advantage[p] = trial_advantage[p]
        alone[p] = trial_alone[p]


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
    best_value, best_seconds = _evaluate(n, gains, stale, lookup, prices, aim.share, best)
    best_score = _score(best_value, best_seconds, aim)
    if _pattern_kept(best.depth, aim.held_depth):
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
            _best_depths(n, room, models, draft, price, aim)
            _assign(n, lookup, room)
            if bent and shape != PADDED:
                _cut(n, gains, capped, lookup, prices, aim, room)
            value, seconds = _evaluate(n, gains, stale, lookup, prices, aim.share, trial)
            score = _score(value, seconds, aim)
            if _pattern_kept(trial.depth, aim.held_depth):
                score += aim.hold * (base_value if rate > 0.0 else score)
            if score > best_score:
                best_score = score
                best_value = value
                best_seconds = seconds
                _keep(n, trial, best)
            next_price = (
                max(base_value - value, 1e-9) if latency else base_value + value
            ) / seconds
            if rate > 0.0 or abs(next_price - price) <= 1e-6 * price:
                break
            price = next_price
    return best_value, best_seconds
