"""What speculation brings against plain decoding of the same steps."""

from __future__ import annotations

_WINDOW_STEPS = 1024
_KEPT = 1.0 - 1.0 / _WINDOW_STEPS


class Speedup:
    """Committed tokens over the estimate for plain decoding: ``measured`` lately, and ``estimated``
    of the step planned last."""

    __slots__ = ("_committed", "_plain", "estimated")

    def __init__(self) -> None:
        self.estimated: float | None = None
        self._committed = 0.0
        self._plain = 0.0

    def note(self, committed: int, plain: float) -> None:
        """What a step brought, and what plain decoding would have in that time."""
        self._committed = self._committed * _KEPT + committed
        self._plain = self._plain * _KEPT + plain

    @property
    def measured(self) -> float | None:
        """None without data."""
        return self._committed / self._plain if self._plain > 0.0 else None
