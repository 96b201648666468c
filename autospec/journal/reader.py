"""The reader of journal files: whole runs, or one line after the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from autospec.errors import InputError
from autospec.journal.lines import JournalHeader, JournalStep, WorkloadName, read_line


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
                    read = read_line(line)
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
