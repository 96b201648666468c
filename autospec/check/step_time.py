"""What a step of the service takes: measured on it, from a file, or from a device's data sheet.

All that a speedup needs is how much longer a step gets with more tokens in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from autospec.check.devices import Device
from autospec.check.samples import Sample
from autospec.cost.coefficients import KNOTS, NUM_DRAFT, NUM_VERIFY, SLOPES
from autospec.cost.shapes import paid_tokens
from autospec.cost.step_cost import LAYOUT, StepCost
from autospec.errors import InputError
from autospec.profile.learned import Profile
from autospec.records import EngineInfo, ProposerInfo
from autospec.replay.cost_file import CostFile, LookupSeconds

_TRUST = 1.5
"""How far beyond the measured tokens of a step its time is still said."""

_UNSEEN = 1.1
"""Least speedup worth having where step times hold nothing of what speculating itself costs."""

_SEEN = 1.03
"""The same where they were learned from steps that speculated: more than their error."""

_LEAST_GAPS = 3
_QUARTILE = 25.0


class StepTime(Protocol):
    """Seconds of one target forward over ``running`` requests, each verifying ``drafted`` tokens.

    ``context_tokens`` are those of one request. ``most_running`` and ``most_tokens`` bound the
    requests and the tokens of a step that anything is known about. ``lookup_share`` is what a
    lookup adds to a step, None where it is not known. ``at_best`` is the same where ``seconds`` is
    the dearer of two prices and the other may be right, else None. A speedup below ``least_gain``
    is not worth having: by so much ``seconds`` may leave out what drafting costs.
    """

    @property
    def source(self) -> str: ...
    @property
    def most_running(self) -> float: ...
    @property
    def most_tokens(self) -> float: ...
    @property
    def at_best(self) -> StepTime | None: ...
    @property
    def least_gain(self) -> float: ...
    def seconds(self, running: float, drafted: float, context_tokens: float) -> float: ...
    def lookup_share(self, proposer: str) -> float | None: ...


@dataclass(frozen=True, slots=True)
class ReadingTime:
    """Seconds to the first token of a prompt alone, by its tokens: forwards of so many tokens.

    Their differences alone are of use: each holds the same way there and back.
    """

    tokens: tuple[int, ...]
    seconds: tuple[float, ...]

    def more(self, tokens: float, extra: float) -> float:
        """What ``extra`` tokens prolong a forward of ``tokens`` by; 0 or more."""
        return self._at(tokens + extra) - self._at(tokens)

    def _at(self, tokens: float) -> float:
        """Between the points linear, before and behind them as between the next two."""
        at = int(np.clip(np.searchsorted(self.tokens, tokens), 1, len(self.tokens) - 1))
        (x, y), (a, b) = self.tokens[at - 1 : at + 1], self.seconds[at - 1 : at + 1]
        return a + (b - a) * (tokens - x) / (y - x)


@dataclass(frozen=True, slots=True)
class MeasuredTime:
    """The service's own inter-token times by running requests, between them linear.

    Lower quartiles: what a step takes when nothing disturbs it, which is what more tokens prolong.

    What one more token of a request costs cannot be seen from outside, but lies between two
    things that can: one more running request, which brings a token and its own overhead, and one
    more token of a prompt that is ``reading``, which brings neither that nor logits to choose from.
    The dearer is taken, or the cheaper ``is_best``. Beyond the requests that the service runs at
    once, where a step is said to go on as it did, the prompts have really been so long.
    """

    running: tuple[int, ...]
    step_seconds: tuple[float, ...]
    reading: ReadingTime | None = None
    is_best: bool = False

    @property
    def source(self) -> str:
        """With the points."""
        points = _told(self.running, self.step_seconds)
        told = f"measured on the service, ms per step by running requests ({points})"
        if self.reading is None:
            return f"{told}; a verified token is priced as one more running request"
        read = _told(self.reading.tokens, self.reading.seconds)
        return (
            f"{told}, ms to a first token by prompt tokens ({read}); a verified token is priced as "
            "one more running request or as one more prompt token, whichever is dearer"
        )

    @property
    def most_running(self) -> float:
        """A little beyond the largest batch seen."""
        return _TRUST * self.running[-1]

    @property
    def most_tokens(self) -> float:
        """As far as prompts went, or a little beyond the largest batch."""
        read = 0.0 if self.reading is None else float(self.reading.tokens[-1])
        return max(read, self.most_running)

    @property
    def at_best(self) -> MeasuredTime | None:
        """With the cheaper price."""
        return None if self.reading is None else replace(self, is_best=True)

    @property
    def least_gain(self) -> float:
        """Preparing and sampling longer steps cannot be seen from outside."""
        return _UNSEEN

    def seconds(self, running: float, drafted: float, context_tokens: float) -> float:
        """Never shorter with more tokens; beyond the last point as between the last two."""
        extra = running * drafted
        plain, longer = self._of_requests(running), self._of_requests(running + extra)
        if self.reading is None or extra <= 0.0:
            return longer
        read = plain + self.reading.more(running, extra)
        return min(longer, read) if self.is_best else max(longer, read)

    def _of_requests(self, running: float) -> float:
        if running <= self.running[-1] or len(self.running) < 2:
            return float(np.interp(running, self.running, self.step_seconds))
        slope = (self.step_seconds[-1] - self.step_seconds[-2]) / (
            self.running[-1] - self.running[-2]
        )
        return float(self.step_seconds[-1] + slope * (running - self.running[-1]))

    def lookup_share(self, proposer: str) -> None:
        """Not measurable from outside."""


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
    def most_running(self) -> float:
        """A cost file says what any number takes."""
        return float("inf")

    @property
    def most_tokens(self) -> float:
        """Of tokens too."""
        return float("inf")

    @property
    def at_best(self) -> None:
        """It says one price."""
        return None

    @property
    def least_gain(self) -> float:
        """Cost files price tokens, not what speculating adds to a step."""
        return _UNSEEN

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

    @property
    def most_running(self) -> float:
        """As for tokens."""
        return self.most_tokens

    @property
    def at_best(self) -> None:
        """Both prices were learned."""
        return None

    @property
    def least_gain(self) -> float:
        """Steps with drafts were learned as they were."""
        return _SEEN

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
    def most_running(self) -> float:
        """A formula says what any number takes."""
        return float("inf")

    @property
    def most_tokens(self) -> float:
        """Of tokens too."""
        return float("inf")

    @property
    def at_best(self) -> None:
        """It knows one price."""
        return None

    @property
    def least_gain(self) -> float:
        """A data sheet knows of no overhead."""
        return _UNSEEN

    def seconds(self, running: float, drafted: float, context_tokens: float) -> float:
        """max(bytes / bandwidth, 2 x parameters x tokens / peak)."""
        read = self.weight_bytes + self.cache_bytes_per_token * running * context_tokens
        tokens = running * (1.0 + drafted)
        return max(
            read / self.device.bytes_per_second,
            2.0 * self.parameters * tokens / self.device.flops_per_second,
        )

    def lookup_share(self, proposer: str) -> None:
        """A data sheet does not know."""


def measured_time(
    samples: Sequence[Sample],
    prefill_seconds: float | None,
    reading: ReadingTime | None = None,
) -> MeasuredTime | None:
    """Inter-token times by the number of requests that were decoding; None if there are too few.

    Gaps in which another request's prompt was being read are left out: they are another step's.
    What disturbs only adds: a step is taken to be no longer than a larger one was.
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
    return MeasuredTime(tuple(order), _rising([quartiles[n] for n in order]), reading)


def reading_time(lengths: Sequence[Sequence[Sample]]) -> ReadingTime | None:
    """From prompts of each of some lengths, sent one by one; None for less than two lengths that
    were answered and told their tokens."""
    points: dict[int, float] = {}
    for samples in lengths:
        known = [each for each in samples if each.ttft is not None and each.prompt_tokens > 0]
        if known:
            tokens = round(float(np.median([each.prompt_tokens for each in known])))
            times = [each.ttft for each in known if each.ttft is not None]
            points[tokens] = float(np.percentile(times, _QUARTILE))
    if len(points) < 2:
        return None
    order = sorted(points)
    return ReadingTime(tuple(order), _rising([points[tokens] for tokens in order]))


def _rising(seconds: Sequence[float]) -> tuple[float, ...]:
    return tuple(np.minimum.accumulate(seconds[::-1])[::-1].tolist())


def _told(numbers: Sequence[int], seconds: Sequence[float]) -> str:
    """``1: 29.5, 16: 48`` in milliseconds."""
    return ", ".join(
        f"{number}: {each * 1000:.3g}" for number, each in zip(numbers, seconds, strict=True)
    )


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
