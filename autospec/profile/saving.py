"""Saving what a controller has learned, at once or in the background while it serves."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from autospec.config import ProfileSettings
from autospec.estimators import Estimators
from autospec.profile.file import save_delta
from autospec.profile.learned import Profile
from autospec.workload import Workloads


class Saving:
    """Adds what was learned since the last save to a profile; one save is under way at a time.

    What cannot be written is kept for the next time. ``on_fault`` gets what goes wrong in the
    background; ``source`` says in the profile where its numbers are from.
    """

    def __init__(
        self,
        settings: ProfileSettings,
        learned: Estimators,
        workloads: Workloads,
        source: str,
        wall_clock: Callable[[], float],
        on_fault: Callable[[Exception], None],
    ) -> None:
        self._settings = settings
        self._learned = learned
        self._workloads = workloads
        self._source = source
        self._wall_clock = wall_clock
        self._on_fault = on_fault
        self._thread: threading.Thread | None = None
        self._saved_at = wall_clock()

    def save(self, path: Path) -> None:
        """Save now. Raises ProfileError."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._write(path, self._take_fresh())

    def save_when_due(self) -> None:
        """Save in the background if the settings say where and the last time is long ago."""
        path = self._settings.path
        if path is None:
            return
        if self._wall_clock() - self._saved_at < self._settings.save_every_seconds:
            return
        if self._thread is not None and self._thread.is_alive():
            return
        fresh = self._take_fresh()

        def write() -> None:
            try:
                self._write(path, fresh)
            except Exception as error:
                self._on_fault(error)

        self._thread = threading.Thread(target=write, name="autospec-profile")
        self._thread.start()

    def _take_fresh(self) -> Profile:
        self._saved_at = self._wall_clock()
        return self._learned.take_fresh(self._workloads.labels, self._source, self._wall_clock())

    def _write(self, path: Path, fresh: Profile) -> None:
        try:
            save_delta(path, fresh, self._settings.half_life_days)
        except BaseException:
            self._learned.return_fresh(fresh, self._workloads.labels)
            raise
