"""Append-only JSONL of decisions and outcomes: opt-in, bounded, written off the hot path.

A file holds one or more runs. Lines are JSON arrays or objects, one each:

- ``{"journal":1,...}`` starts a run: settings, identity, proposer names, versions, unix time;
- ``["w",index,label]`` names a workload;
- ``["s",id,at,mode,n,waiting,context,predicted_seconds,predicted_tokens,step_seconds,
  decision_seconds,groups,rest]`` is a step. ``groups`` are rows that went alike,
  ``[proposer,workload,k,verified,accepted,committed,requests]``, the most frequent first. At most
  ``MAX_GROUPS`` are written; ``rest`` sums up the others as ``[requests,drafted,verified,accepted,
  committed]``, or is 0.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import math
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from autospec.errors import AutoSpecError, InputError
from autospec.records import Mode, Plan, StepResult

VERSION = 1
MAX_GROUPS = 64
MAX_STEP_BYTES = 4096
"""No step's line is longer, however many requests run."""

_MAX_BUFFERED_BYTES = 4 << 20
_GROUP_FIELDS = 6

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class JournalHeader:
    """What a run was: enough to read its steps and to repeat it."""

    settings: Mapping[str, Any]
    identity: Mapping[str, Any]
    proposers: tuple[str, ...]
    versions: Mapping[str, str]
    started: float  # unix seconds


@dataclass(frozen=True, slots=True)
class StepGroup:
    """Requests of one step that went alike; ``proposer`` and ``workload`` are indices."""

    proposer: int
    workload: int
    k: int
    verified: int
    accepted: int
    committed: int
    requests: int


@dataclass(frozen=True, slots=True)
class RestOfStep:
    """Sums over the rows that did not fit into a step's groups."""

    requests: int = 0
    drafted: int = 0
    verified: int = 0
    accepted: int = 0
    committed: int = 0


@dataclass(frozen=True, slots=True)
class JournalStep:
    """One step as written; ``at`` is seconds since the run's start."""

    id: int
    at: float
    mode: Mode
    requests: int
    waiting: int
    context_tokens: int
    predicted_seconds: float | None
    predicted_tokens: float | None
    step_seconds: float | None
    decision_seconds: float
    groups: tuple[StepGroup, ...]
    rest: RestOfStep = RestOfStep()


@dataclass(frozen=True, slots=True)
class WorkloadName:
    """The label that an index stands for in the steps that follow."""

    index: int
    label: str


@dataclass(frozen=True, slots=True)
class TornLine:
    """An unfinished last line, as a crash leaves it."""

    bytes: int


@dataclass(frozen=True, slots=True)
class JournalRun:
    """One run of a journal file."""

    header: JournalHeader
    workloads: Mapping[int, str]
    steps: tuple[JournalStep, ...]


@dataclass(frozen=True, slots=True)
class JournalRecords:
    """A journal file as read; ``torn_bytes`` of an unfinished last line were dropped."""

    runs: tuple[JournalRun, ...]
    torn_bytes: int = 0


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
            line = _line(_finite(header))
        except (ValueError, TypeError, RecursionError) as error:
            self._fail(f"the header cannot be written: {error}")
            return
        self._prologue += line
        self._append(line)

    def name_workload(self, index: int, label: str) -> None:
        """Write the label that ``index`` stands for in the steps that follow."""
        line = _line(["w", index, label])
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


def open_journal(path: Path, max_bytes: int, on_failure: Callable[[], None]) -> Journal | None:
    """A server's journal. Serving goes on without one that cannot be opened: it is logged, and
    ``on_failure`` called."""
    try:
        return Journal(path, max_bytes, on_failure=on_failure)
    except InputError as error:
        log.error("%s; serving goes on without it", error)
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


def encode_step(
    plan: Plan,
    result: StepResult,
    workloads: NDArray[np.integer],  # [n]
    waiting: int,
    context_tokens: int,
    decision_seconds: float,
    at: float,
) -> bytes:
    """A step's line, at most MAX_STEP_BYTES long."""
    n = plan.handles.shape[0]
    rows = np.empty((n, _GROUP_FIELDS), dtype=np.int32)
    for column, values in enumerate(
        (plan.proposer, workloads, plan.k, result.verified, result.accepted, result.committed)
    ):
        rows[:, column] = values
    counts: dict[tuple[int, ...], int] = {}
    for row in map(tuple, rows.tolist()):
        counts[row] = counts.get(row, 0) + 1
    groups = sorted(((*row, count) for row, count in counts.items()), key=lambda g: (-g[-1], g))
    line = _step_line(plan, result, n, waiting, context_tokens, decision_seconds, at, groups)
    while len(line) > MAX_STEP_BYTES and groups:  # numbers wider than any engine's
        groups = groups[: len(groups) // 2]
        line = _step_line(plan, result, n, waiting, context_tokens, decision_seconds, at, groups)
    return line


def _step_line(
    plan: Plan,
    result: StepResult,
    n: int,
    waiting: int,
    context_tokens: int,
    decision_seconds: float,
    at: float,
    groups: list[tuple[int, ...]],
) -> bytes:
    kept = groups[:MAX_GROUPS]
    rest: list[int] | int = 0
    missing = n - sum(group[-1] for group in kept)
    if missing:
        sums = [int(values.sum(dtype=np.int64)) for values in (
            plan.k, result.verified, result.accepted, result.committed
        )]  # fmt: skip
        written = [sum(group[column] * group[-1] for group in kept) for column in (2, 3, 4, 5)]
        rest = [missing, *(whole - part for whole, part in zip(sums, written, strict=True))]
    return _line(
        [
            "s",
            plan.id,
            round(at, 4),
            plan.mode,
            n,
            waiting,
            context_tokens,
            _rounded(plan.predicted_seconds),
            _rounded(plan.predicted_tokens),
            _rounded(result.step_seconds),
            _rounded(decision_seconds),
            kept,
            rest,
        ]
    )


def _rounded(value: float | None) -> float | None:
    return float(f"{value:.5g}") if value is not None and math.isfinite(value) else None


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return value


def _line(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode() + b"\n"


# ---- reading ------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Run:
    header: JournalHeader
    workloads: dict[int, str] = field(default_factory=dict)
    steps: list[JournalStep] = field(default_factory=list)


def read_journal(path: Path) -> JournalRecords:
    """The runs in a journal file. An unfinished last line is dropped and reported.

    Raises InputError with the line's number for a bad line anywhere else.
    """
    runs: list[_Run] = []
    torn_bytes = 0
    for line in iterate_journal(path):
        if isinstance(line, JournalHeader):
            runs.append(_Run(line))
        elif isinstance(line, WorkloadName):
            runs[-1].workloads[line.index] = line.label
        elif isinstance(line, JournalStep):
            runs[-1].steps.append(line)
        else:
            torn_bytes = line.bytes
    return JournalRecords(
        runs=tuple(JournalRun(run.header, run.workloads, tuple(run.steps)) for run in runs),
        torn_bytes=torn_bytes,
    )


def iterate_journal(path: Path) -> Iterator[JournalHeader | WorkloadName | JournalStep | TornLine]:
    """The lines of a journal file one after the other, however long it is.

    Raises InputError with the line's number for a bad line.
    """
    begun = False
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    yield TornLine(len(line))
                    return
                try:
                    read = _read_line(line)
                    begun = begun or isinstance(read, JournalHeader)
                    if not begun:
                        raise ValueError("comes before any header")
                except (ValueError, TypeError, KeyError, RecursionError) as error:
                    raise InputError(
                        f"journal {path}: line {number} cannot be read: {error}"
                    ) from None
                yield read
    except OSError as error:
        raise InputError(f"journal {path}: cannot be read: {error.strerror}") from None


def _read_line(line: bytes) -> JournalHeader | WorkloadName | JournalStep:
    value = json.loads(line)
    if isinstance(value, dict):
        return _read_header(value)
    if not isinstance(value, list) or not value or value[0] not in ("w", "s"):
        raise ValueError("is neither a header, nor a workload, nor a step")
    if value[0] == "w":
        _, index, label = value
        return WorkloadName(int(index), str(label))
    return _read_step(value)


def _float(value: float | None) -> float | None:
    return None if value is None else float(value)


def _read_header(value: Mapping[str, Any]) -> JournalHeader:
    if value.get("journal") != VERSION:
        raise ValueError(
            f"'journal' is {value.get('journal')!r}, this AutoSpec reads version {VERSION}"
        )
    return JournalHeader(
        settings=value["settings"],
        identity=value["identity"],
        proposers=tuple(value["proposers"]),
        versions=value["versions"],
        started=float(value["started"]),
    )


def _read_step(value: list[Any]) -> JournalStep:
    (
        _, plan_id, at, mode, requests, waiting, context_tokens, predicted_seconds,
        predicted_tokens, step_seconds, decision_seconds, groups, rest,
    ) = value  # fmt: skip
    if mode not in get_args(Mode):
        raise ValueError(f"mode must be one of {', '.join(get_args(Mode))}, found {mode!r}")
    return JournalStep(
        id=int(plan_id),
        at=float(at),
        mode=mode,
        requests=int(requests),
        waiting=int(waiting),
        context_tokens=int(context_tokens),
        predicted_seconds=_float(predicted_seconds),
        predicted_tokens=_float(predicted_tokens),
        step_seconds=_float(step_seconds),
        decision_seconds=float(decision_seconds),
        groups=tuple(StepGroup(*(int(number) for number in group)) for group in groups),
        rest=RestOfStep(*rest) if rest else RestOfStep(),
    )
