"""Sums over time in a bounded number of bins, whatever the span turns out to be."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autospec.records import Float64Array

MOST_BINS = 360
"""When a bin beyond these is wanted, neighbors are added up and every bin is twice as long."""

_FIRST_WIDTH = 0.01


class TimeBins:
    """Rows of sums, a bin of ``width`` seconds each."""

    def __init__(self, columns: int) -> None:
        self.width = _FIRST_WIDTH
        self._columns = columns
        self._rows: list[list[float]] = []

    def add(self, at: float, values: Sequence[float]) -> None:
        """Add ``values`` to the bin that holds ``at`` seconds; times before 0 count as 0."""
        index = int(max(0.0, at) / self.width)
        while index >= MOST_BINS:
            self._double()
            index = int(max(0.0, at) / self.width)
        while index >= len(self._rows):
            self._rows.append([0.0] * self._columns)
        self._rows[index] = [a + b for a, b in zip(self._rows[index], values, strict=True)]

    def coarse(self, fewest: float, most_bins: int) -> tuple[float, Float64Array]:
        """Width and sums [bin, column], doubled until there are few and full enough bins.

        Full enough: half of the bins that are not empty hold ``fewest`` in column 0.
        """
        width, sums = self.width, np.array(self._rows).reshape(-1, self._columns)
        while len(sums) > 8:
            filled = sums[sums[:, 0] > 0, 0]
            if len(sums) <= most_bins and (not filled.size or np.median(filled) >= fewest):
                break
            if len(sums) % 2:
                sums = np.vstack([sums, np.zeros((1, self._columns))])
            sums, width = sums[0::2] + sums[1::2], 2.0 * width
        return width, sums

    def _double(self) -> None:
        self.width *= 2.0
        rows = self._rows
        if len(rows) % 2:
            rows.append([0.0] * self._columns)
        self._rows = [
            [a + b for a, b in zip(rows[i], rows[i + 1], strict=True)]
            for i in range(0, len(rows), 2)
        ]
