"""Do no harm: goodput against the estimate for plain decoding of the same steps."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from autospec.compiled import by_reference, compiled_brief
from autospec.octave import NUM_OCTAVES
from autospec.records import Float64Array, Int64Array

_MAX_HOLDS = 5
_EVIDENCE = 2.0  # standard errors that the loss must exceed
_STEPS, _COMMITTED, _PLAIN, _SQUARES = range(4)


class GuardArrays(NamedTuple):
    """By octave: sums over speculative steps, how often speculation was turned off lately, and for
    how many steps more it is."""

    margin: float
    window: int
    hold: int
    sums: Float64Array  # [octave, 4]
    holds: Int64Array  # [octave]
    left: Int64Array  # [octave]


class Guard:
    """Turns speculation off for a while when it lost more than ``margin`` against plain decoding.

    It watches each octave of load by itself, so that a loss under overload holds nothing back when
    the load has fallen. Sums over the last ``window_steps`` speculative steps or so; each further
    activation that follows soon holds twice as long, up to 32 times ``hold_steps``. Kernels note
    the steps.
    """

    def __init__(self, margin: float, window_steps: int, hold_steps: int) -> None:
        self.arrays = GuardArrays(
            margin,
            window_steps,
            hold_steps,
            np.zeros((NUM_OCTAVES, 4)),
            np.zeros(NUM_OCTAVES, dtype=np.int64),
            np.zeros(NUM_OCTAVES, dtype=np.int64),
        )
        self.reference = by_reference(self.arrays)

    def is_holding(self, octave: int) -> bool:
        """Whether steps must be plain."""
        return bool(self.arrays.left[octave] > 0)


@compiled_brief
def note_held(guard: GuardArrays, octave: int) -> None:
    """A step went by in which nobody might speculate, if the guard holds."""
    if guard.left[octave] > 0:
        guard.left[octave] -= 1


@compiled_brief
def note_speculative(guard: GuardArrays, octave: int, committed: int, plain: float) -> bool:
    """A speculative step was measured; True when the guard activates.

    ``plain`` is the estimate of what plain decoding would have committed in that time.
    """
    sums = guard.sums[octave]
    margin, window = guard.margin, guard.window
    keep = 1.0 - 1.0 / window
    excess = committed - plain
    sums[_STEPS] = sums[_STEPS] * keep + 1.0
    sums[_COMMITTED] = sums[_COMMITTED] * keep + committed
    sums[_PLAIN] = sums[_PLAIN] * keep + plain
    sums[_SQUARES] = sums[_SQUARES] * keep + excess * excess
    if sums[_STEPS] < window / 2:
        return False
    loss = (1.0 - margin) * sums[_PLAIN] - sums[_COMMITTED]
    if loss <= 0.0:
        if sums[_COMMITTED] > sums[_PLAIN] * (1.0 + margin):
            guard.holds[octave] = 0
        return False
    if loss < _EVIDENCE * sums[_SQUARES] ** 0.5:
        return False
    guard.left[octave] = guard.hold << min(guard.holds[octave], _MAX_HOLDS)
    guard.holds[octave] += 1
    sums[:] = 0.0
    return True
