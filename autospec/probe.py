"""When to try what is not in use: a clock per arm, with exponential back-off."""

from __future__ import annotations

from collections.abc import Sequence

from autospec.octave import NUM_OCTAVES, octave_of

PLAIN = -1
DRAFTS = -2
"""The arms that are plain decoding and drafts of anybody; the others are the numbers of model
proposers."""

_FAR_OCTAVES = 2
_MOST_DRAFTS_PRICE = 1.0  # a few tokens can cost more only in a passing trouble
_MOST_SHARE = 0.01  # of the time that probes of one arm may take in the long run


class ProbeClocks:
    """Steps since each arm was last in use, and how long to wait before trying it.

    After a probe an arm waits ``backoff`` times longer for the next, up to ``max_steps``; a model
    that the policy uses by itself starts again at ``first_steps``, and so do all models when the
    load has moved by two octaves: what did not pay there may pay here. A dear arm waits for as long
    as keeps its probes' share of the time small. Plain decoding has a clock
    for each octave of load, since its cost differs there. Drafts of whomever have one too: a time
    in which all steps were slow may have made those with drafts look dear.
    """

    def __init__(
        self, models: Sequence[int], first_steps: int, backoff: float, max_steps: int
    ) -> None:
        self._first = float(first_steps)
        self._backoff = backoff
        self._max = float(max_steps)
        self._models = tuple(models)
        self._drafting = (*self._models, DRAFTS)
        self._idle: dict[int, int] = dict.fromkeys(self._drafting, 0)
        self._wait: dict[int, float] = dict.fromkeys(self._drafting, self._first)
        self._rest: dict[int, float] = dict.fromkeys(self._drafting, 0.0)
        self._home = 0  # the octave that the models' waits belong to
        self._plain_idle = [0] * NUM_OCTAVES
        self._plain_wait = [self._first] * NUM_OCTAVES

    def due(self, requests: int, available: Sequence[int]) -> int | None:
        """The arm to try in this step, None for no probe. ``available`` are those of models and
        DRAFTS that may draft now."""
        octave = octave_of(requests)
        if self._plain_idle[octave] >= self._plain_wait[octave]:
            return PLAIN
        for arm in self._drafting:
            if self._wait[arm] <= self._idle[arm] >= self._rest[arm] and arm in available:
                return arm
        return None

    def note(self, requests: int, used: Sequence[int], probe: bool, price: float = 0.0) -> None:
        """A step was planned: ``used`` models and DRAFTS, if anybody's, are in it, or PLAIN alone.

        ``price`` is what a probe takes beyond a plain step, in plain steps.
        """
        octave = octave_of(requests)
        if abs(octave - self._home) >= _FAR_OCTAVES:
            self._home = octave
            self._wait = dict.fromkeys(self._drafting, self._first)
        if PLAIN in used:
            self._plain_idle[octave] = 0
            if probe:
                self._plain_wait[octave] = min(self._max, self._plain_wait[octave] * self._backoff)
        else:
            self._plain_idle[octave] += 1
        for arm in self._drafting:
            if arm not in used:
                self._idle[arm] += 1
                continue
            self._idle[arm] = 0
            if probe:
                wait = max(self._wait[arm], self._rest[arm]) * self._backoff
                counted = min(price, _MOST_DRAFTS_PRICE) if arm == DRAFTS else price
                self._wait[arm] = min(self._max, wait)
                self._rest[arm] = min(self._max, counted / _MOST_SHARE)
            else:
                self._wait[arm], self._rest[arm] = self._first, 0.0

    def repeat(self) -> None:
        """A probe took far less than was expected: try drafts again in the next step."""
        self._idle[DRAFTS] = int(self._max)
        self._wait[DRAFTS], self._rest[DRAFTS] = self._first, 0.0

    def restart(self) -> None:
        """Something changed: look again soon."""
        self._wait = dict.fromkeys(self._drafting, self._first)
        self._plain_wait = [self._first] * NUM_OCTAVES
