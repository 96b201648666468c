"""What went wrong while a controller served: counted, logged once, raised where it is strict."""

from __future__ import annotations

import logging
from collections import Counter

import numpy as np

from autospec.metrics import Metrics
from autospec.records import StepResult
from autospec.step.flaws import SOUND, told
from autospec.step.record import StepRecord
from autospec.step.rows import UNKNOWN_SLOT, RequestRows

log = logging.getLogger("autospec")


class Troubles:
    """``faults`` are those of AutoSpec or of who calls it, by place; ``dropped`` is what was not
    learned from, by reason. The first fault of a place is logged with its traceback."""

    def __init__(self, *, is_strict: bool) -> None:
        self.faults: Counter[str] = Counter()
        self.dropped: Counter[str] = Counter()
        self.metrics: Metrics | None = None
        self.is_strict = is_strict

    def fault(self, place: str, error: Exception) -> None:
        """Count a fault. Raises it if strict, unless it is one of saving."""
        if self.is_strict and place != "save":
            raise error
        self.faults[place] += 1
        if self.metrics is not None:
            self.metrics.add_fallback(place)
        if self.faults[place] == 1:
            log.error(
                "AutoSpec failed in %s; serving goes on without it (logged once)",
                place,
                exc_info=error,
            )

    def drop(self, reason: str, found: str, count: int = 1) -> None:
        """Count what is not learned from, with what was ``found``. Raises ValueError if strict."""
        if self.is_strict:
            raise ValueError(f"{reason}: {found}")
        self.dropped[reason] += count
        if self.metrics is not None:
            self.metrics.add_dropped(reason, count)

    def drop_handle(self, record: StepRecord, rows: RequestRows) -> None:
        """The first row of a planned step whose handle is not running, or given twice."""
        row = int(np.flatnonzero(record.arrays.slots == UNKNOWN_SLOT)[0])
        handle = int(record.arrays.handles[row])
        if rows.slot_of(handle) == UNKNOWN_SLOT:
            self.drop("unknown request", f"handles[{row}] is {handle}, which is not running")
        else:
            self.drop("repeated request", f"handles[{row}] is {handle}, as an earlier row's")

    def drop_flawed(self, record: StepRecord, result: StepResult) -> None:
        """The rows of a result that cannot be; those of ended requests do not matter."""
        arrays = record.arrays
        flaws = np.where(arrays.known, arrays.flaws, SOUND)
        for flaw, found, count in told(flaws, arrays.drafted, result):
            if self.dropped[flaw.name] == 0 and not self.is_strict:
                log.warning("%s: %s; such rows teach nothing (logged once)", flaw.name, found)
            self.drop(flaw.name, found, count)
