"""The pace of the machine: how much longer all steps take now than usual.

It drifts, and what was measured in slow minutes must not look dearer than what was measured in
others: errors that successive steps share are the pace, which all coefficients are read at and
learned without (errors as a first-order autoregression, Cochrane and Orcutt 1949). An array [2]
holds its logarithm, and the share of speculative steps lately.
"""

from __future__ import annotations

import math

from autospec.compiled import compiled_brief
from autospec.records import Float64Array

_LOG, _SPECULATIVE = range(2)
_PACE_RATE = 0.1  # of a step's error that is put down to the machine's pace
_PACE_KEEP = 0.98  # of that pace from step to step: what lasts is learned
_MIXED_SHARE = 0.1  # of plain steps among speculative ones, or the other way round, that is enough


@compiled_brief
def present_pace(pace: Float64Array) -> float:
    """The time that steps take now over what they usually take."""
    return math.exp(pace[_LOG])


@compiled_brief
def note_pace(pace: Float64Array, error: float, speculating: bool) -> None:
    """Put a part of a step's relative error down to the machine's pace.

    Only as far as plain and speculative steps alternate: of one kind alone nobody knows whether the
    machine became slow, or that kind dear.
    """
    kind = 1.0 if speculating else 0.0
    share = pace[_SPECULATIVE] + (1.0 - _PACE_KEEP) * (kind - pace[_SPECULATIVE])
    mixed = min(1.0, min(share, 1.0 - share) / _MIXED_SHARE)
    pace[_SPECULATIVE] = share
    pace[_LOG] = _PACE_KEEP * (pace[_LOG] + _PACE_RATE * mixed * error)
