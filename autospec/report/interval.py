"""Uncertainty of a share that was counted."""

from __future__ import annotations

import math
from dataclasses import dataclass

_NORMAL_95 = 1.959963984540054


@dataclass(frozen=True, slots=True)
class Interval:
    """A share and its 95 % interval."""

    share: float
    low: float
    high: float


def wilson(successes: float, trials: float) -> Interval | None:
    """Wilson's score interval (1927) of ``successes`` in ``trials``; None without trials.

    Counts may be fractions, as faded ones are.
    """
    if trials <= 0.0:
        return None
    share = min(1.0, max(0.0, successes / trials))
    square = _NORMAL_95**2
    middle = (share + square / (2.0 * trials)) / (1.0 + square / trials)
    spread = math.sqrt(share * (1.0 - share) / trials + square / (4.0 * trials**2))
    half = _NORMAL_95 * spread / (1.0 + square / trials)
    return Interval(share, max(0.0, middle - half), min(1.0, middle + half))
