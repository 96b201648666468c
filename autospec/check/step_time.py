"""What a step of the service takes: measured on it, from a file, or from a device's data sheet.

All that a speedup needs is how much longer a step gets with more tokens in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from autospec.check.devices import Device
from autospec.check.samples import Sample
from autospec.cost import KNOTS, LAYOUT, NUM_DRAFT, NUM_VERIFY, SLOPES, StepCost, paid_tokens
from autospec.cost_file import CostFile, LookupSeconds
from autospec.errors import InputError
from autospec.profile import Profile
from autospec.records import EngineInfo, ProposerInfo

_TRUST = 1.5
"""How far beyond the measured tokens of a step its time is still said."""

_LEAST_GAPS = 3
_QUARTILE = 25.0


class StepTime(Protocol):
    """Seconds of one target forward over ``running`` requests, each verifying ``drafted`` tokens.

    ``context_tokens`` are those of one request. ``most_tokens`` bounds the tokens of a step that
    anything is known about. ``lookup_share`` is what a lookup adds to a step.
    """

    @property
    def source(self) -> str: ...
    @property
    def most_tokens(self) -> float: ...
    def seconds(self, running: float, drafted: float, context_tokens: float) -> float: ...
    def lookup_share(self, proposer: str) -> float: ...


@dataclass(frozen=True, slots=True)
class MeasuredTime:
    """The service's own inter-token times by running requests, between them linear.

    Lower quartiles: what a step takes when nothing disturbs it, which is what more tokens prolong.

    A drafted token is taken to cost what one more running request does: exact where the step's time
    is in its matrix products, somewhat dear where it is in every request's own attention.
    """

    running: tuple[int, ...]
    step_seconds: tuple[float, ...]

    @property
    def source(self) -> str:
        """With the points."""
        points = ", ".join(
            f"{n}: {seconds * 1000:.3g}"
            for n, seconds in zip(self.running, self.step_seconds, strict=True)
        )
        return f"measured on the service, ms per step by running requests ({points})"

    @property
    def most_tokens(self) -> float:
        """A little beyond the largest batch seen."""
        return _TRUST * self.running[-1]

    def seconds(self, running: float, drafted: float, context_tokens: float) -> float:
        """Never shorter with more tokens; beyond the last point as between the last two."""
        tokens = running * (1.0 + drafted)
        times = np.maximum.accumulate(self.step_seconds)
        if tokens <= self.running[-1] or len(self.running) < 2:
            return float(np.interp(tokens, self.running, times))
        slope = (times[-1] - times[-2]) / (self.running[-1] - self.running[-2])
        return float(times[-1] + slope * (tokens - self.running[-1]))

    def lookup_share(self, proposer: str) -> float:
        """Not measurable from outside."""
        return 0.0


@dataclass(frozen=True, slots=True)
class FileTime:
    """A cost file's step."""

    cost: CostFile
    name: str

    @property
    def source(self) -> str:
        """Where it is from."""
        return f"cost file {self.name}"

    @property
    def most_tokens(self) -> float:
        """A cost file says what any number takes."""
        return float("inf")

    def seconds(self, running: float, drafted: float, context_tokens: float) -> float:
        """By the rule of its shape."""
        step = self.cost.step
        captured = np.array(self.cost.captured_sizes, dtype=np.int32)
        requests = max(1, round(running))
        tokens: float = running * (1.0 + drafted)
        if self.cost.shape == "stepped":
            tokens = paid_tokens(
                "stepped", captured, requests, round(running * drafted), int(np.ceil(drafted))
            )
        return (
            step.fixed_seconds
            + step.overhead_seconds
            + step.per_token_seconds * tokens
            + step.per_context_token_seconds * running * context_tokens
        )

    def lookup_share(self, proposer: str) -> float:
        """As the file says, 0 if it does not name it."""
        part = self.cost.proposers.get(proposer)
        return part.step_fraction if isinstance(part, LookupSeconds) else 0.0


@dataclass(frozen=True, slots=True)
class ProfileTime:
    """What a controller has learned about its engine's steps."""

    cost: StepCost
    most_tokens: float
    name: str

    @property
    def source(self) -> str:
        """Where it is from."""
        return f"profile {self.name}, up to {self.most_tokens:g} tokens a step"

    def seconds(self, running: float, drafted: float, context_tokens: float) -> float:
        """As the controller would predict it; lookups are in it."""
        return self.cost.verify_seconds(
            round(running * (1.0 + drafted)),
            round(running),
            round(running * context_tokens),
            drafted > 0.0,
        )

    def lookup_share(self, proposer: str) -> float:
        """Served steps hold their lookups already."""
        return 0.0


def profile_time(profile: Profile, name: str) -> ProfileTime:
    """Raises InputError for a profile without step times."""
    statistics = profile.cost.get("step")
    if profile.cost_layout != LAYOUT or statistics is None or not statistics["reference"][3] > 0:
        raise InputError(f"{name}: the profile holds no step times that this AutoSpec can read")
    models = (statistics["moment"].shape[1] - NUM_VERIFY) // NUM_DRAFT
    identity = profile.identity
    cost = StepCost(
        [ProposerInfo(f"model-{number}", "sequential", 1) for number in range(models)],
        EngineInfo(
            identity.target, identity.engine, identity.version, identity.device, identity.dtype
        ),
    )
    cost.load(statistics)
    seen = statistics["gram"].sum(axis=0).diagonal()[SLOPES : SLOPES + len(KNOTS)]
    last = int(np.flatnonzero(seen > 0.0).max(initial=0))
    return ProfileTime(cost, float(KNOTS[min(last + 1, len(KNOTS) - 1)]), name)


@dataclass(frozen=True, slots=True)
class RooflineTime:
    """The longer of reading weights and caches, and computing, at the peaks of a data sheet.

    An estimate: no engine reaches the peaks, and only their ratio enters a speedup.
    """

    device: Device
    weight_bytes: float
    parameters: float
    cache_bytes_per_token: float

    @property
    def source(self) -> str:
        """With what it is not."""
        return f"estimated from the data sheet of {self.device.name}, not measured"

    @property
    def most_tokens(self) -> float:
        """A formula says what any number takes."""
        return float("inf")

    def seconds(self, running: float, drafted: float, context_tokens: float) -> float:
        """max(bytes / bandwidth, 2 x parameters x tokens / peak)."""
        read = self.weight_bytes + self.cache_bytes_per_token * running * context_tokens
        tokens = running * (1.0 + drafted)
        return max(
            read / self.device.bytes_per_second,
            2.0 * self.parameters * tokens / self.device.flops_per_second,
        )

    def lookup_share(self, proposer: str) -> float:
        """A data sheet does not know."""
        return 0.0


def measured_time(samples: Sequence[Sample], prefill_seconds: float | None) -> MeasuredTime | None:
    """Inter-token times by the number of requests that were decoding; None if there are too few.

    Gaps in which another request's prompt was being read are left out: they are another step's.
    """
    gaps = _gaps_by_running(samples, prefill_seconds)
    usable = {n: times for n, times in gaps.items() if len(times) >= _LEAST_GAPS}
    if not usable:
        return None
    grid = _bins(sorted(usable))
    quartiles: dict[int, float] = {}
    for members in grid:
        times = np.concatenate([usable[n] for n in members])
        counts = [len(usable[n]) for n in members]
        quartiles[round(float(np.average(members, weights=counts)))] = float(
            np.percentile(times, _QUARTILE)
        )
    order = sorted(quartiles)
    return MeasuredTime(tuple(order), tuple(quartiles[n] for n in order))


def _bins(numbers: Sequence[int]) -> list[list[int]]:
    """1, 2, 3-4, 5-8, 9-16, ...: neighbors that tell the same thing."""
    bins: dict[int, list[int]] = {}
    for number in numbers:
        bins.setdefault((number - 1).bit_length(), []).append(number)
    return [bins[key] for key in sorted(bins)]


def _gaps_by_running(
    samples: Sequence[Sample], prefill_seconds: float | None
) -> Mapping[int, list[float]]:
    done = [each for each in samples if each.error is None and each.first is not None]
    begins = np.sort([each.first for each in done if each.first is not None])
    ends = np.sort([each.end for each in done])
    reading = [
        (max(each.sent, each.first - (prefill_seconds or 0.0) * each.prompt_tokens), each.first)
        for each in done
        if each.first is not None
    ]
    starts = np.array([begin for begin, _ in reading])
    stops = np.array([stop for _, stop in reading])
    found: dict[int, list[float]] = {}
    for each in done:
        for before, after in zip(each.chunks, each.chunks[1:], strict=False):
            if bool(((starts < after) & (stops > before)).any()):
                continue
            middle = (before + after) / 2.0
            n = int(np.searchsorted(begins, middle) - np.searchsorted(ends, middle))
            found.setdefault(max(1, n), []).append(after - before)
    return found
