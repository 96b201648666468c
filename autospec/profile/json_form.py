"""The JSON form of a profile, versioned."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from pydantic import ValidationError

from autospec.errors import CorruptProfile, ProfileError
from autospec.profile.learned import Identity, Profile, Statistics, WorkloadProfile, shown
from autospec.profile.tuned import Tuning
from autospec.records import Float64Array

FORMAT = "autospec-profile"
VERSION = 2
READABLE_VERSIONS = (1, 2)
"""Version 1 has no ``tuned``."""


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
            f"{source}: version is {shown(version)}, this AutoSpec reads versions "
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
        return CorruptProfile(f"{self.source}: {place} must be {allowed}, found {shown(found)}")

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
                f"{self.source}: {place}: {first['msg']}, found {shown(first['input'])}"
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
