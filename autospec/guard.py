"""Do no harm: goodput against the estimate for plain decoding of the same steps."""

from __future__ import annotations

_MAX_HOLDS = 5
_EVIDENCE = 2.0  # standard errors that the loss must exceed


class Guard:
    """Turns speculation off for a while when it lost more than ``margin`` against plain decoding.

    One guard watches one octave of load, so that a loss under overload holds nothing back when the
    load has fallen. Sums over the last ``window_steps`` speculative steps or so; each further
    activation that follows soon holds twice as long, up to 32 times ``hold_steps``.
    """

    def __init__(self, margin: float, window_steps: int, hold_steps: int) -> None:
        self._margin = margin
        self._window = window_steps
        self._hold = hold_steps
        self._holds = 0
        self._left = 0
        self._steps = 0.0
        self._committed = 0.0
        self._plain = 0.0
        self._squares = 0.0

    @property
    def is_holding(self) -> bool:
        """Whether this step must be plain."""
        return self._left > 0

    def note_plain(self) -> None:
        """A step without speculation went by."""
        if self._left > 0:
            self._left -= 1

    def note_speculative(self, committed: int, plain: float) -> bool:
        """A speculative step was measured; True when the guard activates.

        ``plain`` is the estimate of what plain decoding would have committed in that time.
        """
        keep = 1.0 - 1.0 / self._window
        self._steps = self._steps * keep + 1.0
        self._committed = self._committed * keep + committed
        self._plain = self._plain * keep + plain
        excess = committed - plain
        self._squares = self._squares * keep + excess * excess
        if self._steps < self._window / 2:
            return False
        loss = (1.0 - self._margin) * self._plain - self._committed
        if loss <= 0.0:
            if self._committed > self._plain * (1.0 + self._margin):
                self._holds = 0
            return False
        if loss < _EVIDENCE * self._squares**0.5:
            return False
        self._left = self._hold << min(self._holds, _MAX_HOLDS)
        self._holds += 1
        self._clear()
        return True

    def _clear(self) -> None:
        self._steps = 0.0
        self._committed = 0.0
        self._plain = 0.0
        self._squares = 0.0
