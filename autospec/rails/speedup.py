"""What speculation brings against plain decoding of the same steps."""

from __future__ import annotations

import numpy as np

from autospec.compiled import compiled_brief
from autospec.records import Float64Array

_WINDOW_STEPS = 1024
_COMMITTED, _PLAIN = range(2)


class Speedup:
    """Committed tokens over the estimate for plain decoding, lately. Kernels add to ``sums``."""

    def __init__(self) -> None:
        self.sums: Float64Array = np.zeros(2)

    @property
    def measured(self) -> float | None:
        """None without data."""
        committed, plain = self.sums.tolist()
        return committed / plain if plain > 0.0 else None


@compiled_brief
def note_worth(sums: Float64Array, committed: int, plain: float) -> None:
    """What a step brought, and what plain decoding would have in that time."""
    keep = 1.0 - 1.0 / _WINDOW_STEPS
    sums[_COMMITTED] = sums[_COMMITTED] * keep + committed
    sums[_PLAIN] = sums[_PLAIN] * keep + plain
