"""When to try what is not in use: a clock per arm, with exponential back-off."""

from __future__ import annotations

from collections.abc import Sequence

from autospec.octave import NUM_OCTAVES, octave_of

PLAIN = -1
"""The arm that is plain decoding; the others are the numbers of model proposers."""

_FAR_OCTAVES = 2
_MOST_DRAFTS_PRICE = 1.0  # a few tokens can cost more only in a passing trouble
_MOST_SHARE = 0.01  # of the time that probes of one model may take in the long run


class ProbeClocks:
    """Steps since each arm was last in use, and how long to wait before trying it.

    After a probe an arm waits ``backoff`` times longer for the next, up to ``max_steps``; a model
    that the policy uses by itself starts again at ``first_steps``, and so do all models when the
    load has moved by two octaves: what did not pay there may pay here. A dear one waits for as long
    as keeps its probes' share of the time small. Plain decoding has a clock
    for each octave of load, since its cost differs there.
    """

    def __init__(
        self, models: Sequence[int], first_steps: int, backoff: float, max_steps: int
    ) -> None:
        self._first = float(first_steps)
        self._backoff = backoff
        self._max = float(max_steps)
        self._models = tuple(models)
        self._idle: dict[int, int] = dict.fromkeys(self._models, 0)
        self._wait: dict[int, float] = dict.fromkeys(self._models, self._first)
        self._rest: dict[int, float] = dict.fromkeys(self._models, 0.0)
        self._home = 0  # the octave that the models' waits belong to
        self._plain_idle = [0] * NUM_OCTAVES
        self._plain_wait = [self._first] * NUM_OCTAVES

    def due(self, requests: int, available: Sequence[int]) -> int | None:
        """The arm to try in this step, None for no probe. ``available`` models may draft now."""
        octave = octave_of(requests)
        if self._plain_idle[octave] >= self._plain_wait[octave]:
            return PLAIN
        for model in self._models:
            wait = max(self._wait[model], self._rest[model])
            if model in available and self._idle[model] >= wait:
                return model
        return None

    def note(self, requests: int, used: Sequence[int], probe: bool, price: float = 0.0) -> None:
        """A step was planned: ``used`` models draft in it, or PLAIN alone.

        ``price`` is what the drafting of a probe takes, in plain steps.
        """
        octave = octave_of(requests)
        if abs(octave - self._home) >= _FAR_OCTAVES:
            self._home = octave
            self._wait = dict.fromkeys(self._models, self._first)
        if PLAIN in used:
            self._plain_idle[octave] = 0
            if probe:
                self._plain_wait[octave] = min(self._max, self._plain_wait[octave] * self._backoff)
        else:
            self._plain_idle[octave] += 1
        for model in self._models:
            if model in used:
                self._idle[model] = 0
                wait = max(self._wait[model], self._rest[model]) * self._backoff
                self._wait[model] = min(self._max, wait) if probe else self._first
                self._rest[model] = min(self._max, price / _MOST_SHARE) if probe else 0.0
            else:
                self._idle[model] += 1

    def restart(self) -> None:
        """Something changed: look again soon."""
        for model in self._models:
            self._wait[model] = self._first
        self._plain_wait = [self._first] * NUM_OCTAVES
