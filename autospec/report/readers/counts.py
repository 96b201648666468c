"""Accepted and tried draft tokens by position."""

from __future__ import annotations

from dataclasses import dataclass

from autospec.report.interval import Interval, wilson

MOST_POSITIONS = 256


@dataclass(frozen=True, slots=True)
class Position:
    """Draft positions that are counted together; ``start`` is counted from 0, ``end`` excluded."""

    name: str
    start: int
    end: int


POSITIONS = (
    Position("1", 0, 1),
    Position("2", 1, 2),
    Position("3", 2, 3),
    Position("4", 3, 4),
    Position("5–6", 4, 6),
    Position("7–8", 6, 8),
    Position("9–12", 8, 12),
    Position("13+", 12, MOST_POSITIONS),
)
"""The same as in a profile."""


@dataclass(frozen=True, slots=True)
class Counts:
    """A position was tried when all before it were accepted. Rows are the positions' names."""

    positions: tuple[str, ...]
    successes: tuple[float, ...]
    trials: tuple[float, ...]

    def intervals(self, fewest_trials: float) -> tuple[Interval | None, ...]:
        """P(accepted | those before were) with its interval; None where less was tried."""
        return tuple(
            wilson(hits, tried) if tried >= fewest_trials else None
            for hits, tried in zip(self.successes, self.trials, strict=True)
        )
