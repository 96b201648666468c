"""What speculation brings against plain decoding of the same steps."""

from __future__ import annotations

import numpy as np

from autospec.compiled import compiled_brief
from autospec.records import Float64Array

_WINDOW_STEPS = 1024
_FIRST_STEPS = 64.0  # that were on time, before anything was seen
_MOST_LATE = 8.0  # times what was predicted; a longer step was held up by something else
_COMMITTED, _PLAIN, _SECONDS, _PREDICTED = range(4)


class Speedup:
    """Committed tokens over the estimate for plain decoding, lately. Kernels add to ``sums``.

    Predictions are of the usual step; the mean is longer, since some steps are held up. Steps that
    nobody speculated in would have been held up alike: the estimate is as late as all steps are.
    """

    def __init__(self) -> None:
        self.sums: Float64Array = np.zeros(4)

    def measured(self) -> float | None:
        """None without data."""
        committed, plain = self.sums[_COMMITTED], self.sums[_PLAIN]
        return float(committed / plain) if plain > 0.0 else None


@compiled_brief
def note_worth(
    sums: Float64Array, committed: int, plain_rate: float, seconds: float, predicted_seconds: float
) -> float:
    """What a step brought; returns what plain decoding would have in that time, at ``plain_rate``
    tokens per second of a usual step."""
    keep = 1.0 - 1.0 / _WINDOW_STEPS
    seconds = min(seconds, _MOST_LATE * predicted_seconds)
    sums[_SECONDS] = sums[_SECONDS] * keep + seconds
    sums[_PREDICTED] = sums[_PREDICTED] * keep + predicted_seconds
    on_time = _FIRST_STEPS * predicted_seconds
    late = (sums[_SECONDS] + on_time) / (sums[_PREDICTED] + on_time)
    plain: float = plain_rate * seconds / late
    sums[_COMMITTED] = sums[_COMMITTED] * keep + committed
    sums[_PLAIN] = sums[_PLAIN] * keep + plain
    return plain
