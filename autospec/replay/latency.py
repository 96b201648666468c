"""How long requests took: first tokens, tokens after them, and the whole; percentiles."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Finished:
    """One request's times in simulated seconds since the run began."""

    id: str
    tokens: int
    arrival: float
    first_token: float
    end: float

    @property
    def tpot(self) -> float | None:
        """Seconds per output token after the first; None for a single token."""
        return (self.end - self.first_token) / (self.tokens - 1) if self.tokens > 1 else None


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of seconds, over requests."""

    p50: float
    p95: float
    p99: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Percentiles:
        """With linear interpolation; zeros without any."""
        if not seconds:
            return cls(0.0, 0.0, 0.0)
        return cls(*(float(value) for value in np.percentile(seconds, (50, 95, 99))))


@dataclass(frozen=True, slots=True)
class LatencySummary:
    """Time to first token, time per output token, and from arrival to end, over requests.

    ``target_share`` is the share of requests within the target for time per output token, None
    without a target.
    """

    ttft: Percentiles
    tpot: Percentiles
    end_to_end: Percentiles
    target_share: float | None = None


def summarize_latency(
    finished: Iterable[Finished], tpot_target_seconds: float | None = None
) -> LatencySummary:
    """Percentiles over requests. Those of a single token have no TPOT and meet any target."""
    requests = list(finished)
    tpot = [request.tpot for request in requests]
    share = None
    if tpot_target_seconds is not None and requests:
        met = sum(each is None or each <= tpot_target_seconds for each in tpot)
        share = met / len(requests)
    return LatencySummary(
        Percentiles.of([request.first_token - request.arrival for request in requests]),
        Percentiles.of([each for each in tpot if each is not None]),
        Percentiles.of([request.end - request.arrival for request in requests]),
        share,
    )
