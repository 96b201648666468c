"""What was learned, saved: versioned JSON, matched by identity, faded by age, merged by adding."""

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
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from pydantic import ValidationError

from autospec.errors import CorruptProfile, ProfileError, ProfileMismatch
from autospec.records import EngineInfo, Float64Array, ProposerInfo
from autospec.tuned import Tuning

FORMAT = "autospec-profile"
VERSION = 2
READABLE_VERSIONS = (1, 2)
"""Version 1 has no ``tuned``."""

SECONDS_PER_DAY = 86_400.0
_LOCK_SECONDS = 10.0

Statistics: TypeAlias = Mapping[str, Float64Array]
"""Named arrays that add up: counts, weighted sums. What they mean is their section's layout."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Identity:
    """What a profile was learned on. Statistics of another identity say nothing here."""

    target: str
    proposers: tuple[str, ...]
    engine: str
    version: str
    device: str
    dtype: str

    @classmethod
    def of(cls, engine: EngineInfo, proposers: tuple[ProposerInfo, ...]) -> Identity:
        """Identity of a running engine; the order of its proposers does not matter."""
        return cls(
            target=engine.target,
            proposers=tuple(sorted(info.name for info in proposers)),
            engine=engine.engine,
            version=engine.version,
            device=engine.device,
            dtype=engine.dtype,
        )

    def require(self, other: Identity) -> None:
        """Raise ProfileMismatch that names the first field in which ``other`` differs."""
        for each in fields(self):
            mine, theirs = getattr(self, each.name), getattr(other, each.name)
            if mine != theirs:
                raise ProfileMismatch(
                    f"profile does not fit: {each.name} is {_shown(theirs)}, "
                    f"expected {_shown(mine)}"
                )


@dataclass(frozen=True, slots=True)
class WorkloadProfile:
    """One workload's acceptance statistics by proposer, and how many requests they come from."""

    requests: float = 0.0
    proposers: Mapping[str, Statistics] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Profile:
    """Everything learned about one identity; counts are as of ``updated`` (unix seconds).

    ``acceptance_layout`` and ``cost_layout`` name the meaning of the arrays ("acceptance/1"), so
    that a later AutoSpec with other estimators refuses them rather than misreads them.
    ``cost`` is by engine part. ``provenance`` lists where the statistics come from. ``tuned`` is
    what ``autospec tune`` found, None in a profile that was learned while serving alone.
    """

    identity: Identity
    acceptance_layout: str
    cost_layout: str
    workloads: Mapping[str, WorkloadProfile]
    cost: Mapping[str, Statistics]
    provenance: tuple[str, ...]
    updated: float
    tuned: Tuning | None = None

    def require(self, identity: Identity, acceptance_layout: str, cost_layout: str) -> None:
        """Raise ProfileMismatch unless this was learned on ``identity`` with these layouts."""
        identity.require(self.identity)
        for name, mine, wanted in (
            ("acceptance_layout", self.acceptance_layout, acceptance_layout),
            ("cost_layout", self.cost_layout, cost_layout),
        ):
            if mine != wanted:
                raise ProfileMismatch(
                    f"profile does not fit: {name} is {_shown(mine)}, expected {_shown(wanted)}"
                )

    def faded(self, now: float, half_life_days: float | None) -> Profile:
        """The profile as of ``now``: statistics halve every ``half_life_days``; None keeps them.

        A clock that went back changes nothing.
        """
        age_days = max(0.0, now - self.updated) / SECONDS_PER_DAY
        weight = 1.0 if half_life_days is None else 0.5 ** (age_days / half_life_days)
        return replace(
            self,
            workloads={
                label: WorkloadProfile(
                    workload.requests * weight,
                    {name: _scaled(each, weight) for name, each in workload.proposers.items()},
                )
                for label, workload in self.workloads.items()
            },
            cost={part: _scaled(each, weight) for part, each in self.cost.items()},
            updated=max(self.updated, now),
        )


def merge(first: Profile, second: Profile, half_life_days: float | None = None) -> Profile:
    """Both profiles' statistics added up, as of the newer one's time. Order does not matter.

    Raises ProfileMismatch when identity, layout or the shape of an array differs.
    """
    second.require(first.identity, first.acceptance_layout, first.cost_layout)
    now = max(first.updated, second.updated)
    mine, theirs = first.faded(now, half_life_days), second.faded(now, half_life_days)
    workloads = {
        label: _merged_workloads(
            label,
            mine.workloads.get(label, WorkloadProfile()),
            theirs.workloads.get(label, WorkloadProfile()),
        )
        for label in sorted({*mine.workloads, *theirs.workloads})
    }
    return replace(
        mine,
        workloads=workloads,
        cost=_merged_groups("cost", mine.cost, theirs.cost),
        provenance=tuple(sorted({*mine.provenance, *theirs.provenance})),
        updated=now,
        tuned=_newer(first.tuned, second.tuned),
    )


def _newer(first: Tuning | None, second: Tuning | None) -> Tuning | None:
    """The later of two tunings: settings do not add up."""
    found = [each for each in (first, second) if each is not None]
    return max(found, key=lambda each: (each.provenance.date, str(each)), default=None)


def _merged_workloads(
    label: str, first: WorkloadProfile, second: WorkloadProfile
) -> WorkloadProfile:
    return WorkloadProfile(
        requests=first.requests + second.requests,
        proposers=_merged_groups(f"workloads.{label}", first.proposers, second.proposers),
    )


def _merged_groups(
    place: str, first: Mapping[str, Statistics], second: Mapping[str, Statistics]
) -> dict[str, Statistics]:
    return {
        name: _added(f"{place}.{name}", first.get(name, {}), second.get(name, {}))
        for name in sorted({*first, *second})
    }


def _added(place: str, first: Statistics, second: Statistics) -> Statistics:
    if not first or not second:
        return dict(first or second)
    if set(first) != set(second):
        raise ProfileMismatch(
            f"profile does not fit: {place} has {_shown(tuple(sorted(second)))}, "
            f"expected {_shown(tuple(sorted(first)))}"
        )
    for name in first:
        if first[name].shape != second[name].shape:
            raise ProfileMismatch(
                f"profile does not fit: {place}.{name} has shape {second[name].shape}, "
                f"expected {first[name].shape}"
            )
    return {name: first[name] + second[name] for name in sorted(first)}


def _scaled(statistics: Statistics, weight: float) -> Statistics:
    return {name: array * weight for name, array in statistics.items()}


# ---- JSON ---------------------------------------------------------------------------------------


def profile_json(profile: Profile) -> str:
    """The profile as text. Acceptance counts keep 3 decimals or 6 digits, cost sums 12 digits.

    Raises ProfileError for a statistic that is not finite, or an acceptance count below zero.
    """
    _check_statistics(profile)
    document: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "identity": {each.name: getattr(profile.identity, each.name) for each in fields(Identity)},
        "acceptance_layout": profile.acceptance_layout,
        "cost_layout": profile.cost_layout,
        "updated": round(profile.updated, 3),
        "provenance": list(profile.provenance),
        "workloads": {
            label: {
                "requests": _count(workload.requests),
                "proposers": _written(workload.proposers, _count),
            }
            for label, workload in sorted(profile.workloads.items())
        },
        "cost": _written(profile.cost, _sum),
    }
    if profile.tuned is not None:
        document["tuned"] = profile.tuned.model_dump(mode="json", exclude_none=True)
    return _indented(document, 0) + "\n"


def _written(
    groups: Mapping[str, Statistics], number: Callable[[float], float]
) -> dict[str, dict[str, Any]]:
    return {
        name: {key: _nested(array.tolist(), number) for key, array in sorted(group.items())}
        for name, group in sorted(groups.items())
    }


def _nested(value: Any, number: Callable[[float], float]) -> Any:
    return [_nested(each, number) for each in value] if isinstance(value, list) else number(value)


def _count(value: float) -> float:
    """Digits enough that a count which fades a little at every save is not rounded up again."""
    return _short(round(value, 3) if value >= 100.0 else float(f"{value:.6g}"))


def _sum(value: float) -> float:
    return _short(float(f"{value:.12g}"))


def _short(value: float) -> float:
    return int(value) if value == int(value) and abs(value) < 1e15 else value


def _indented(value: Any, depth: int) -> str:
    """JSON with one line per mapping entry and arrays kept on theirs: small, and it diffs well."""
    if not isinstance(value, dict) or not value:
        return json.dumps(value, separators=(",", ":"), allow_nan=False)
    margin = " " * (depth + 1)
    entries = ",\n".join(
        f"{margin}{json.dumps(key)}: {_indented(each, depth + 1)}" for key, each in value.items()
    )
    return f"{{\n{entries}\n{' ' * depth}}}"


def parse_profile(text: str, source: str = "profile") -> Profile:
    """A profile from its JSON text. ``source`` names it in errors; raises ProfileError."""
    try:
        document = json.loads(text)
    except ValueError as error:
        raise CorruptProfile(f"{source}: not valid JSON: {error}") from None
    except RecursionError:
        raise CorruptProfile(f"{source}: not valid JSON: nested too deeply") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise CorruptProfile(f"{source}: is not a profile: 'format' must be {FORMAT!r}")
    version = document.get("version")
    if version not in READABLE_VERSIONS:
        raise ProfileError(
            f"{source}: version is {_shown(version)}, this AutoSpec reads versions "
            f"{' and '.join(map(str, READABLE_VERSIONS))}"
        )
    reader = _Reader(source)
    known = reader.mapping(document.get("identity"), "identity")
    profile = Profile(
        identity=Identity(
            target=reader.text(known.get("target"), "identity.target"),
            proposers=reader.texts(known.get("proposers"), "identity.proposers"),
            engine=reader.text(known.get("engine"), "identity.engine"),
            version=reader.text(known.get("version"), "identity.version"),
            device=reader.text(known.get("device"), "identity.device"),
            dtype=reader.text(known.get("dtype"), "identity.dtype"),
        ),
        acceptance_layout=reader.text(document.get("acceptance_layout"), "acceptance_layout"),
        cost_layout=reader.text(document.get("cost_layout"), "cost_layout"),
        workloads=reader.workloads(document.get("workloads")),
        cost=reader.groups(document.get("cost"), "cost"),
        provenance=reader.texts(document.get("provenance"), "provenance"),
        updated=reader.number(document.get("updated"), "updated"),
        tuned=reader.tuned(document.get("tuned")),
    )
    try:
        _check_statistics(profile)
    except ProfileError as error:
        raise CorruptProfile(f"{source}: {error}") from None
    return profile


@dataclass(frozen=True, slots=True)
class _Reader:
    """Typed access to parsed JSON; every complaint names the place in the file."""

    source: str

    def _complain(self, place: str, found: object, allowed: str) -> CorruptProfile:
        return CorruptProfile(f"{self.source}: {place} must be {allowed}, found {_shown(found)}")

    def mapping(self, value: object, place: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self._complain(place, value, "a mapping")
        return value

    def text(self, value: object, place: str) -> str:
        if not isinstance(value, str):
            raise self._complain(place, value, "text")
        return value

    def texts(self, value: object, place: str) -> tuple[str, ...]:
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise self._complain(place, value, "a list of texts")
        return tuple(value)

    def number(self, value: object, place: str) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._complain(place, value, "a number")
        if not math.isfinite(value) or value < 0:
            raise self._complain(place, value, "finite and not negative")
        return float(value)

    def workloads(self, value: object) -> dict[str, WorkloadProfile]:
        found = {}
        for label, content in self.mapping(value, "workloads").items():
            place = f"workloads.{label}"
            workload = self.mapping(content, place)
            found[label] = WorkloadProfile(
                requests=self.number(workload.get("requests"), f"{place}.requests"),
                proposers=self.groups(workload.get("proposers"), place),
            )
        return found

    def tuned(self, value: object) -> Tuning | None:
        if value is None:
            return None
        try:
            return Tuning.model_validate(value)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(map(str, ("tuned", *first["loc"])))
            raise CorruptProfile(
                f"{self.source}: {place}: {first['msg']}, found {_shown(first['input'])}"
            ) from None

    def groups(self, value: object, place: str) -> dict[str, Statistics]:
        return {
            name: {
                key: self.array(numbers, f"{place}.{name}.{key}")
                for key, numbers in self.mapping(group, f"{place}.{name}").items()
            }
            for name, group in self.mapping(value, place).items()
        }

    def array(self, value: object, place: str) -> Float64Array:
        if not isinstance(value, list) or not _all_numbers(value):
            raise self._complain(place, value, "nested lists of numbers")
        try:
            return np.array(value, dtype=np.float64)
        except (ValueError, OverflowError):
            raise self._complain(place, value, "nested lists of equal length") from None


def _all_numbers(value: object) -> bool:
    if isinstance(value, list):
        return all(_all_numbers(each) for each in value)
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_statistics(profile: Profile) -> None:
    for label, workload in profile.workloads.items():
        if not (math.isfinite(workload.requests) and workload.requests >= 0):
            raise ProfileError(
                f"workloads.{label}.requests must be finite and not negative, "
                f"found {workload.requests}"
            )
        for name, statistics in workload.proposers.items():
            for key, array in statistics.items():
                if not (np.isfinite(array).all() and (array >= 0).all()):
                    raise ProfileError(
                        f"workloads.{label}.{name}.{key} must be finite and not negative, "
                        f"found {_worst(array)}"
                    )
    for part, statistics in profile.cost.items():
        for key, array in statistics.items():
            if not np.isfinite(array).all():
                raise ProfileError(f"cost.{part}.{key} must be finite, found {_worst(array)}")


def _worst(array: Float64Array) -> float:
    wrong = array[~np.isfinite(array)]
    return float(wrong[0] if wrong.size else array.min())


def _shown(value: object) -> str:
    text = ", ".join(value) if isinstance(value, tuple) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


# ---- files --------------------------------------------------------------------------------------


def load_profile(path: Path) -> Profile:
    """The profile in a file. Raises ProfileError; CorruptProfile when it is damaged."""
    _refuse_devices(path)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ProfileError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CorruptProfile(f"{path}: is not UTF-8 text (byte {error.start})") from None
    return parse_profile(text, source=str(path))


def warm_start(
    path: Path, identity: Identity, acceptance_layout: str, cost_layout: str
) -> Profile | None:
    """The profile to start from, or None to start cold; never raises.

    A file that was not written yet is silent. A damaged one is kept aside as ``.bad``, one that
    was learned on something else stays; either is logged with the reason.
    """
    profile: Profile | None
    try:
        try:
            profile = load_profile(path)
        except CorruptProfile:
            with _locked(path, _LOCK_SECONDS):  # another process may be putting it right
                profile = _load_or_set_aside(path)
        if profile is not None:
            profile.require(identity, acceptance_layout, cost_layout)
    except ProfileError as error:
        if not isinstance(error.__context__, FileNotFoundError):
            log.warning("starting cold: %s (%s)", error, path)
        return None
    return profile


def save_profile(path: Path, profile: Profile) -> None:
    """Replace the file at ``path`` in one step: readers see the old or the new one, whole."""
    text = profile_json(profile)
    _refuse_devices(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
        try:
            with temporary.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        _sync_folder(path.parent)
    except OSError as error:
        raise ProfileError(f"{path}: cannot be written: {error.strerror}") from None


def _refuse_devices(path: Path) -> None:
    """``/dev/null`` must not be read to its end, kept aside or replaced. Raises ProfileError."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return  # reading or writing will say it
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise ProfileError(f"{path}: is a device or a pipe; a profile needs a file")


def save_delta(
    path: Path,
    delta: Profile,
    half_life_days: float | None = None,
    lock_seconds: float = _LOCK_SECONDS,
) -> Profile:
    """Add what was learned since the last save to the file at ``path``; returns what it now holds.

    ``delta`` must hold new observations only: a process that started from the file would otherwise
    add what it had loaded a second time. Several processes may save to one file. A damaged file is
    kept aside as ``.bad``. Raises ProfileError, ProfileMismatch when the file is of something else;
    nothing is written then.
    """
    profile_json(delta)  # refuse a bad statistic before it can spoil the sum
    with _locked(path, lock_seconds):
        merged = delta
        if path.exists():
            saved = _load_or_set_aside(path)
            if saved is not None:
                merged = _merged_into(path, saved, delta, half_life_days)
        save_profile(path, merged)
    return merged


def _merged_into(
    path: Path, saved: Profile, delta: Profile, half_life_days: float | None
) -> Profile:
    try:
        saved.require(delta.identity, delta.acceptance_layout, delta.cost_layout)
        return merge(saved, delta, half_life_days)
    except ProfileMismatch as error:
        raise ProfileMismatch(f"{path}: {error}; save to another path") from None


def _load_or_set_aside(path: Path) -> Profile | None:
    """The profile in a file that nobody else writes now; None if it had to be kept aside."""
    try:
        return load_profile(path)
    except CorruptProfile as error:
        log.warning("%s; kept aside as %s, starting cold without it", error, _kept_aside(path))
        return None


def _kept_aside(path: Path) -> Path | None:
    for number in range(1000):
        aside = path.with_name(f"{path.name}.bad{f'.{number}' if number else ''}")
        if not aside.exists():
            try:
                path.replace(aside)
            except OSError:
                return None  # another process was faster, or the folder is read-only
            return aside
    return None


@contextlib.contextmanager
def _locked(path: Path, lock_seconds: float) -> Iterator[None]:
    """Exclusive among processes, through a lock file beside ``path`` that is never removed."""
    lock = path.with_name(f".{path.name}.lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise ProfileError(f"{lock}: cannot be opened: {error.strerror}") from None
    try:
        deadline = time.monotonic() + lock_seconds
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise ProfileError(
                        f"{lock}: held by another process for {lock_seconds:g} s"
                    ) from None
                time.sleep(0.02)
        yield
    finally:
        os.close(descriptor)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
