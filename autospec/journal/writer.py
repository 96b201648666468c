"""The journal of decisions and outcomes: opt-in, append-only, bounded, written off the hot path."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autospec.errors import AutoSpecError, InputError
from autospec.journal.lines import VERSION, encode_step, finite, json_line
from autospec.records import Plan, StepResult

_MAX_BUFFERED_BYTES = 4 << 20

log = logging.getLogger(__name__)


class Journal:
    """Writes one run. Steps are encoded at once and written by a thread of its own.

    The file is locked against other writers, and set aside as ``PATH.1`` when it passes
    ``max_bytes``, so that at most twice that is kept. Only opening raises (InputError); when
    writing fails later the journal switches itself off, logs once, sets ``failure`` and calls
    ``on_failure`` (such as ``metrics.add_journal_failure``), maybe from its own thread.
    ``dropped_steps`` counts the steps that a slow disk or a failure cost.
    """

    def __init__(
        self,
        path: Path,
        max_bytes: int = 256 << 20,
        flush_seconds: float = 1.0,
        clock: Callable[[], float] = time.time,
        on_failure: Callable[[], None] | None = None,
    ) -> None:
        self.path = path
        self.failure: str | None = None
        self.dropped_steps = 0
        self._max_bytes = max_bytes
        self._flush_seconds = flush_seconds
        self._clock = clock
        self._on_failure = on_failure
        self._started = clock()
        self._prologue = b""
        self._buffer: list[bytes] = []
        self._buffered = 0
        self._mutex = threading.Lock()  # over the buffer
        self._writing = threading.Lock()  # over the file
        self._wake = threading.Event()
        self._closed = False
        self._descriptor = _open(path)
        found = os.fstat(self._descriptor)
        self._size = found.st_size
        self._can_rotate = stat.S_ISREG(found.st_mode)  # /dev/null stays where it is
        self._thread = threading.Thread(target=self._run, name="autospec-journal", daemon=True)
        self._thread.start()

    def begin(
        self,
        settings: Mapping[str, Any],
        identity: Mapping[str, Any],
        proposers: tuple[str, ...],
        versions: Mapping[str, str],
    ) -> None:
        """Write the run's header; numbers that JSON does not know become null. Never raises."""
        header = {
            "journal": VERSION,
            "started": round(self._started, 3),
            "settings": settings,
            "identity": identity,
            "proposers": proposers,
            "versions": versions,
        }
        try:
            line = json_line(finite(header))
        except (ValueError, TypeError, RecursionError) as error:
            self._fail(f"the header cannot be written: {error}")
            return
        self._prologue += line
        self._append(line)

    def name_workload(self, index: int, label: str) -> None:
        """Write the label that ``index`` stands for in the steps that follow."""
        line = json_line(["w", index, label])
        self._prologue += line
        self._append(line)

    def write_step(
        self,
        plan: Plan,
        result: StepResult,
        workloads: NDArray[np.integer],  # [n]
        waiting: int,
        context_tokens: int,
        decision_seconds: float,
    ) -> None:
        """Queue one step. Costs a few tens of microseconds and no I/O; never raises."""
        if self.failure is not None or self._closed:
            self.dropped_steps += 1
            return
        try:
            line = encode_step(
                plan, result, workloads, waiting, context_tokens, decision_seconds,
                self._clock() - self._started,
            )  # fmt: skip
        except (ValueError, TypeError, IndexError, OverflowError) as error:
            self._fail(f"a step cannot be written: {error}")
            return
        if not self._append(line):
            self.dropped_steps += 1

    def flush(self) -> None:
        """Write what is queued, now."""
        with self._writing:
            with self._mutex:
                pending, self._buffer, self._buffered = self._buffer, [], 0
            if not pending or self.failure is not None:
                return
            try:
                self._write(b"".join(pending))
            except (OSError, ValueError, AutoSpecError) as error:
                self.dropped_steps += sum(line.startswith(b'["s"') for line in pending)
                self._fail(str(error))

    def close(self) -> None:
        """Write what is queued and free the file."""
        if self._closed:
            return
        self._closed = True
        self._wake.set()
        self._thread.join()
        self.flush()
        with contextlib.suppress(OSError):
            os.close(self._descriptor)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _append(self, line: bytes) -> bool:
        with self._mutex:
            if self._buffered + len(line) > _MAX_BUFFERED_BYTES:
                return False
            self._buffer.append(line)
            self._buffered += len(line)
        return True

    def _run(self) -> None:
        while not self._closed:
            self._wake.wait(self._flush_seconds)
            self.flush()

    def _write(self, data: bytes) -> None:
        if self._can_rotate and self._size and self._size + len(data) > self._max_bytes:
            self._rotate()
        view = memoryview(data)
        while view:
            view = view[os.write(self._descriptor, view) :]
        self._size += len(data)

    def _rotate(self) -> None:
        self.path.replace(self.path.with_name(f"{self.path.name}.1"))
        full, self._descriptor = self._descriptor, _open(self.path)
        os.close(full)
        os.write(self._descriptor, self._prologue)
        self._size = len(self._prologue)

    def _fail(self, reason: str) -> None:
        if self.failure is None:
            self.failure = reason
            log.error("journal %s switched off: %s", self.path, reason)
            if self._on_failure is not None:
                self._on_failure()


def open_journal(
    path: Path, max_bytes: int, on_failure: Callable[[], None] | None = None
) -> Journal | None:
    """A server's journal. Serving goes on without one that cannot be opened: it is logged, and
    ``on_failure`` called."""
    try:
        return Journal(path, max_bytes, on_failure=on_failure)
    except InputError as error:
        log.error("%s; serving goes on without it", error)
        if on_failure is not None:
            on_failure()
        return None


def _open(path: Path) -> int:
    """Open for appending, locked, without the unfinished last line of a crashed run."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise InputError(f"journal {path}: cannot be opened: {error.strerror}") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        size = os.fstat(descriptor).st_size
        whole = _whole_bytes(descriptor, size)
        if whole < size:
            log.warning("journal %s: dropped %d bytes of a torn last line", path, size - whole)
            os.ftruncate(descriptor, whole)
    except OSError as error:
        os.close(descriptor)
        busy = isinstance(error, BlockingIOError)
        reason = "another process writes to it; choose another path" if busy else error.strerror
        raise InputError(f"journal {path}: cannot be opened: {reason}") from None
    return descriptor


def _whole_bytes(descriptor: int, size: int) -> int:
    end = size
    while end > 0:
        start = max(0, end - (1 << 16))
        newline = os.pread(descriptor, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0
