"""What a second is worth: long-run goodput, relative to plain decoding, by load."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autospec.octave import NUM_OCTAVES, octave_of

_WINDOW_STEPS = 512.0
_LEAST_STEPS = 12.0


class GoingRate:
    """Committed tokens per plain-equivalent of time, an octave of running requests apart."""

    def __init__(self) -> None:
        self._tokens = [0.0] * NUM_OCTAVES
        self._worth = [0.0] * NUM_OCTAVES
        self._steps = [0.0] * NUM_OCTAVES

    def note(self, requests: int, committed: float, plain_steps: float) -> None:
        """A step took as long as ``plain_steps`` plain ones and brought ``committed`` tokens."""
        octave = octave_of(requests)
        keep = 1.0 - 1.0 / _WINDOW_STEPS
        self._tokens[octave] = self._tokens[octave] * keep + committed
        self._worth[octave] = self._worth[octave] * keep + plain_steps * requests
        self._steps[octave] = self._steps[octave] * keep + 1.0

    def tokens_per_second(self, requests: int, plain_seconds: float) -> float:
        """The going rate at this load; 0 while too little was seen of it.

        Never below plain decoding's, which is always to be had: else a loss would make time look
        cheap, and so justify itself.
        """
        octave = octave_of(requests)
        if self._steps[octave] < _LEAST_STEPS or not plain_seconds > 0.0:
            return 0.0
        return max(1.0, self._tokens[octave] / self._worth[octave]) * requests / plain_seconds

    def state(self) -> Mapping[str, Any]:
        """Everything, as JSON."""
        return {
            "tokens": list(self._tokens),
            "worth": list(self._worth),
            "steps": list(self._steps),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved ``state``."""
        self._tokens = list(state["tokens"])
        self._worth = list(state["worth"])
        self._steps = list(state["steps"])
