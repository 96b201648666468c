"""Runs that take turns, so that whatever slows the machine down slows all of them alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping

TURN_SECONDS = 0.25
"""The least that a run goes on for in its turn: a few steps, so that most find their own data in
the caches."""


def take_turns(runs: Mapping[str, Callable[[], float]]) -> None:
    """Have every run advance to its end, the one that is least far always next.

    A call of a run lets it go on for its turn and returns how far it is, 1 at its end. All of them
    are about equally far at any time, so they do each part of their work within the same moments,
    and end together. Of several equally far the first goes next.
    """
    shares = dict.fromkeys(runs, 0.0)
    while shares:
        name = min(shares, key=shares.__getitem__)
        shares[name] = runs[name]()
        if shares[name] >= 1.0:
            del shares[name]
