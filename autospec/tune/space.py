"""What is searched: settings of proposers and caps on k, as a mixed space of few dimensions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from autospec.profile.tuned import KCap, ProposerSettings, Tuning

Value: TypeAlias = float | int
Point: TypeAlias = tuple[Value, ...]

_CACHES = (0, 1 << 12, 1 << 14, 1 << 16)
_CAPS = (0, 1, 2, 4, 8, 16, 32)
NO_CAP = len(_CAPS) - 1


@dataclass(frozen=True, slots=True)
class Dimension:
    """A number from ``low`` to ``high``, whole or not, evenly or by ratio; or one of ``choices``
    that have no order."""

    name: str
    kind: Literal["integer", "real", "choice"]
    low: float = 0.0
    high: float = 1.0
    by_ratio: bool = False
    choices: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Space:
    """The dimensions for these proposers and loads. ``defaults`` are the untuned settings."""

    dimensions: tuple[Dimension, ...]
    loads: tuple[int, ...]
    defaults: Mapping[str, ProposerSettings]

    @property
    def default(self) -> Point:
        """The untuned settings as a point."""
        return self.encode(self.defaults, ())

    def encode(self, settings: Mapping[str, ProposerSettings], caps: Sequence[KCap]) -> Point:
        """The point of these settings; what the space does not reach is moved into it."""
        by_load = {cap.load: cap.k for cap in caps}
        values: list[Value] = []
        for dimension in self.dimensions:
            owner, key = dimension.name.split(".")
            if owner == "cap":
                k = by_load.get(int(key), _CAPS[-1])
                values.append(next(i for i, cap in enumerate(_CAPS) if k <= cap or i == NO_CAP))
                continue
            mine = settings.get(owner, self.defaults[owner])
            if key == "wider":
                value: Value = (mine.max_match or 0) - (mine.min_match or 0)
            else:
                value = getattr(mine, key) or 0
            if dimension.kind == "choice":
                values.append(min(dimension.choices, key=lambda each: abs(each - value)))
            else:
                values.append(type(value)(min(max(value, dimension.low), dimension.high)))
        return tuple(values)

    def decode(self, point: Point) -> tuple[dict[str, ProposerSettings], tuple[KCap, ...]]:
        """Settings and caps of a point."""
        values = dict(zip((each.name for each in self.dimensions), point, strict=True))
        settings: dict[str, ProposerSettings] = {}
        for name, untuned in self.defaults.items():
            update: dict[str, Value] = {}
            for full, value in values.items():
                owner, key = full.split(".")
                if owner == name and key != "wider":
                    update[key] = float(value) if key == "min_confidence" else int(value)
            if f"{name}.wider" in values:
                update["max_match"] = int(update["min_match"]) + int(values[f"{name}.wider"])
            settings[name] = untuned.model_copy(update=update)
        longest = max(each.max_k for each in settings.values())
        caps = tuple(
            KCap(load=load, k=k)
            for load in self.loads
            if (k := _CAPS[int(values[f"cap.{load}"])]) < longest  # others say nothing
        )
        return settings, _bands(self.loads, caps)


def _bands(loads: Sequence[int], caps: Sequence[KCap]) -> tuple[KCap, ...]:
    """Caps from load to load: one that is followed by a load without a cap ends there."""
    by_load = {cap.load: cap.k for cap in caps}
    bands: list[KCap] = []
    for load in sorted(loads):
        k = by_load.get(load, _CAPS[-1])
        if (bands[-1].k if bands else _CAPS[-1]) != k:
            bands.append(KCap(load=load, k=k))
    return tuple(bands)


def make_space(
    untuned: Mapping[str, ProposerSettings], loads: Sequence[int], *, with_confidence: bool
) -> Space:
    """The space around the untuned settings of ngram, suffix and whatever models there are."""
    caches = {*_CACHES, untuned["suffix"].cache_tokens or 0}
    dimensions = [
        Dimension("ngram.min_match", "integer", 1, 4),
        Dimension("ngram.wider", "integer", 0, 4),
        Dimension("ngram.max_k", "integer", 2, 32, by_ratio=True),
        Dimension("suffix.min_match", "integer", 1, 6),
        Dimension("suffix.max_match", "integer", 8, 64, by_ratio=True),
        Dimension("suffix.max_walk", "integer", 8, 256, by_ratio=True),
        Dimension("suffix.max_k", "integer", 4, 32, by_ratio=True),
        Dimension("suffix.cache_tokens", "choice", choices=tuple(sorted(caches))),
    ]
    for name, settings in untuned.items():
        if settings.kind == "sequential" and settings.max_k > 1:
            dimensions.append(Dimension(f"{name}.max_k", "integer", 1, settings.max_k))
            if with_confidence:
                dimensions.append(Dimension(f"{name}.min_confidence", "real", 0.0, 0.9))
    dimensions += [Dimension(f"cap.{load}", "integer", 0, NO_CAP) for load in loads]
    return Space(tuple(dimensions), tuple(loads), dict(untuned))


def point_of(space: Space, tuning: Tuning) -> Point:
    """An older tuning's settings, to be tried early."""
    return space.encode(tuning.proposers, tuning.caps)
