"""The file of a profile: replaced whole, added to by several processes, kept aside if damaged."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import stat
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from autospec.errors import CorruptProfile, ProfileError, ProfileMismatch
from autospec.profile.json_form import parse_profile, profile_json
from autospec.profile.learned import Identity, Profile, merge

_LOCK_SECONDS = 10.0

log = logging.getLogger(__name__)


def load_profile(path: Path | str) -> Profile:
    """The profile in a file. Raises ProfileError; CorruptProfile when it is damaged."""
    path = Path(path)
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
        if delta.outdates_cost:
            saved = replace(saved, cost={})
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
