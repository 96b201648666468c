"""What a report is made of, told apart by content and read by kind."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from autospec.errors import InputError
from autospec.profile.json_form import FORMAT
from autospec.profile.tuned import Tuning
from autospec.report.readers.bench_run import BenchRun, read_bench
from autospec.report.readers.check_run import CheckRun, read_check
from autospec.report.readers.journal_run import JournalRun, read_journal_runs
from autospec.report.readers.profile_counts import ProfileCounts, read_profile
from autospec.report.readers.replay_run import ReplayRun, read_replay
from autospec.report.readers.tune_run import TuneRun, read_tune

ALLOWED = (
    "a report is made of what 'autospec demo', 'bench', 'replay', 'check' and 'tune' write with "
    "--json, of journals and of profiles"
)
_MOST_BYTES = 256 << 20  # of a file that is read as a whole

Given: TypeAlias = Path | Mapping[str, Any]
"""A file, or the JSON document of a command that has just run."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """Everything read, by kind, in the order given. A journal has its runs, the last one last."""

    benches: tuple[BenchRun, ...] = ()
    replays: tuple[ReplayRun, ...] = ()
    journals: tuple[tuple[JournalRun, ...], ...] = ()
    profiles: tuple[ProfileCounts, ...] = ()
    checks: tuple[CheckRun, ...] = ()
    tunes: tuple[TuneRun, ...] = ()

    @property
    def tunings(self) -> tuple[tuple[str, Tuning], ...]:
        """What tunings measured, by name; a tuning and its own profile say the same once."""
        found: dict[str, Tuning] = {}
        for name, tuned in (
            *((profile.name, profile.tuned) for profile in self.profiles),
            *((run.name, run.tuned) for run in self.tunes),
        ):
            if tuned is not None and tuned not in found.values():
                found[name] = tuned
        return tuple(found.items())

    @property
    def last_runs(self) -> tuple[JournalRun, ...]:
        """The last run of each journal."""
        return tuple(runs[-1] for runs in self.journals)


Read: TypeAlias = BenchRun | ReplayRun | ProfileCounts | CheckRun | TuneRun | tuple[JournalRun, ...]


def read_inputs(given: Sequence[Given]) -> Inputs:
    """Read all. Raises InputError or ProfileError with the file and the place that is wrong."""
    if not given:
        raise InputError(f"nothing to report on: {ALLOWED}")
    benches, replays, journals, profiles, checks, tunes = [], [], [], [], [], []
    paths = [each for each in given if isinstance(each, Path)]
    for number, each in enumerate(given):
        if each in given[:number]:
            continue
        name = _name(each, paths) if isinstance(each, Path) else "this run"
        match _read(name, each):
            case BenchRun() as bench:
                benches.append(bench)
            case ReplayRun() as replay:
                replays.append(replay)
            case ProfileCounts() as profile:
                profiles.append(profile)
            case CheckRun() as check:
                checks.append(check)
            case TuneRun() as tune:
                tunes.append(tune)
            case runs:
                journals.append(runs)
    return Inputs(
        tuple(benches),
        tuple(replays),
        tuple(journals),
        tuple(profiles),
        tuple(checks),
        tuple(tunes),
    )


def _read(name: str, given: Given) -> Read:
    if isinstance(given, Path):
        if _is_journal(given):
            return read_journal_runs(name, given)
        document: Mapping[str, Any] = _document(given)
        if document.get("format") == FORMAT:
            return read_profile(name, given)
    else:
        document = given
    source = str(given) if isinstance(given, Path) else name
    if document.get("kind") == "check":
        return read_check(name, document, source)
    if document.get("kind") == "tune":
        return read_tune(name, document, source)
    if {"phases", "total"} <= document.keys():
        return read_bench(name, document, source)
    if {"results", "best_fixed"} <= document.keys():
        return read_replay(name, document, source)
    keys = ", ".join(list(document)[:6]) or "none"
    raise InputError(f"{source}: is of no known kind (its keys: {keys}); {ALLOWED}")


def _is_journal(path: Path) -> bool:
    """By the first line: a header, or a line that only journals have."""
    try:
        with path.open("rb") as file:
            line = file.readline(1 << 20)
    except IsADirectoryError:
        raise InputError(f"{path}: is a folder; name its files. {ALLOWED}") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    if not line.strip():
        if path.stat().st_size == 0:
            raise InputError(f"{path}: is empty; {ALLOWED}")
        return False
    try:
        first = json.loads(line)
    except ValueError:
        return False
    if isinstance(first, list):
        return bool(first) and first[0] in ("s", "w")
    return isinstance(first, dict) and "journal" in first


def _document(path: Path) -> dict[str, Any]:
    if path.stat().st_size > _MOST_BYTES:
        raise InputError(
            f"{path}: has {path.stat().st_size >> 20} MiB and is no journal; {ALLOWED}"
        )
    try:
        document = json.loads(path.read_bytes().decode("utf-8"))
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: is not UTF-8 text (byte {error.start}); {ALLOWED}") from None
    except json.JSONDecodeError as error:
        raise InputError(
            f"{path}: line {error.lineno}, column {error.colno}: is not JSON: {error.msg}; "
            f"{ALLOWED}"
        ) from None
    except RecursionError:
        raise InputError(f"{path}: is nested too deeply; {ALLOWED}") from None
    if not isinstance(document, dict):
        raise InputError(f"{path}: holds a JSON {type(document).__name__}, no object; {ALLOWED}")
    return document


def _name(path: Path, paths: Sequence[Path]) -> str:
    """The file's name, with its folder's where two files share it."""
    same = {each for each in paths if each.name == path.name}
    return path.name if len(same) == 1 else f"{path.parent.name}/{path.name}"
