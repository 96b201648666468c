"""Finalists against plain and the untuned settings, on held-out requests: what really wins."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev

from autospec.profile.tuned import Interval
from autospec.tune.state import Round

PLAIN, UNTUNED = "plain", "untuned"
LEAST_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Verdict:
    """The arm to keep, and whether it is not the untuned one. ``gains`` are the intervals of every
    finalist's mean log ratio to the untuned settings, over the loads."""

    arm: str
    kept: bool
    gains: dict[str, tuple[float, float, float]]


def log_ratios(
    rounds: Sequence[Round], arm: str, base: str, load_index: int | None = None
) -> list[float]:
    """Log of goodput over ``base``'s, one per round: at one load, or the mean over all."""
    found = []
    for each in rounds:
        mine, theirs = each.goodputs.get(arm), each.goodputs.get(base)
        if mine is None or theirs is None:
            continue
        pairs = list(zip(mine, theirs, strict=True))
        if load_index is not None:
            pairs = pairs[load_index : load_index + 1]
        logs = [math.log(a / b) for a, b in pairs if a and b]
        if pairs and len(logs) == len(pairs):
            found.append(mean(logs))
    return found


def bounds(values: Sequence[float]) -> tuple[float, float, float] | None:
    """Mean and 95 % confidence interval by Student's t; None of fewer than two values."""
    if len(values) < 2:
        return None
    from scipy.stats import t

    center = mean(values)
    half = float(t.ppf(0.975, len(values) - 1)) * stdev(values) / math.sqrt(len(values))
    return center, center - half, center + half


def interval(
    rounds: Sequence[Round], arm: str, base: str, load_index: int | None = None
) -> Interval | None:
    """The ratio of goodputs with its confidence interval."""
    logs = log_ratios(rounds, arm, base, load_index)
    found = bounds(logs)
    if found is None:
        return None
    value, low, high = (round(math.exp(each), 4) for each in found)
    return Interval(value=value, low=low, high=high, rounds=len(logs))


def judge(rounds: Sequence[Round], finalists: Sequence[str]) -> Verdict:
    """Keep the finalist with the best lower bound, if that is above the untuned settings.

    It must not lose to plain decoding outside the noise either. With k finalists looked at, each
    bound is that of its own comparison: they are few, and their order was found on other requests.
    """
    gains = {}
    for arm in finalists:
        found = bounds(log_ratios(rounds, arm, UNTUNED))
        if found is not None:
            gains[arm] = found
    best = max(gains, key=lambda arm: gains[arm][1], default=None)
    if best is None or gains[best][1] <= 0.0:
        return Verdict(UNTUNED, False, gains)
    against_plain = bounds(log_ratios(rounds, best, PLAIN))
    if against_plain is not None and against_plain[2] < 0.0:
        return Verdict(UNTUNED, False, gains)
    return Verdict(best, True, gains)
