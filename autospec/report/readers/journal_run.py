"""What a journal says of a run, summed up line by line in bounded memory."""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import get_args

from autospec.bench.phases import OFF
from autospec.errors import InputError
from autospec.journal.lines import JournalHeader, JournalStep, WorkloadName
from autospec.journal.reader import TornLine, iterate_journal
from autospec.octave import octave_of
from autospec.records import NO_PROPOSER, Mode
from autospec.report.readers.counts import MOST_POSITIONS, POSITIONS, Counts
from autospec.report.readers.time_bins import TimeBins
from autospec.report.wording import moment

MODES: tuple[Mode, ...] = get_args(Mode)
STEPS, SECONDS, TOKENS, RUNNING, WAITING = range(5)
FIRST_MODE = 5
FIRST_PROPOSER = FIRST_MODE + len(MODES)
"""Columns of the time bins: sums of steps, their seconds and tokens, of running and of waiting
requests, steps by mode, then for each proposer, off last, request steps and verified tokens."""

_MOST_POINTS = 4000
_MOST_RUNS = 8
_ODD = 2.0


@dataclass(frozen=True, slots=True)
class StepPoint:
    """One step for the cost chart; ``tokens`` went through the target."""

    tokens: int
    requests: int
    seconds: float
    predicted_seconds: float | None


@dataclass(slots=True)
class LoadSums:
    """Sums over the steps with one number of running requests, odd ones apart.

    Plain steps are those that verified no draft.
    """

    steps: int = 0
    seconds: float = 0.0
    tokens: int = 0
    plain_steps: int = 0
    plain_seconds: float = 0.0


@dataclass(slots=True)
class ModeSums:
    """Sums over the steps of a mode; an episode is a row of steps that no other mode broke."""

    steps: int = 0
    seconds: float = 0.0
    tokens: int = 0
    episodes: int = 0
    longest: int = 0


@dataclass(slots=True)
class ChoiceSums:
    """Who drafted for the requests of one octave of load and workload, and what it brought."""

    choices: Counter[tuple[str, int]] = field(default_factory=Counter)  # (proposer, k)
    request_steps: int = 0
    tokens: int = 0


@dataclass(slots=True)
class JournalRun:
    """Sums over one run. Seconds are those of steps, but for ``span``."""

    name: str
    date: str
    facts: tuple[tuple[str, str], ...]
    proposers: tuple[str, ...]
    steps: int = 0
    seconds: float = 0.0
    tokens: int = 0
    request_steps: int = 0
    drafting_steps: int = 0  # request steps in which somebody drafted
    verified: int = 0
    accepted: int = 0
    span: float = 0.0
    decision_seconds: float = 0.0
    tells_prefill: bool = False
    odd_steps: int = 0  # prefilled too; not told: took over twice the time told, as such steps do
    error_sum: float = 0.0  # of |predicted / measured - 1|
    error_steps: int = 0
    modes: dict[Mode, ModeSums] = field(
        default_factory=lambda: {mode: ModeSums() for mode in MODES}
    )
    loads: dict[int, LoadSums] = field(default_factory=lambda: defaultdict(LoadSums))
    choices: dict[tuple[int, str], ChoiceSums] = field(
        default_factory=lambda: defaultdict(ChoiceSums)
    )
    outcomes: dict[tuple[str, str], Counter[tuple[int, bool]]] = field(
        default_factory=lambda: defaultdict(Counter)
    )  # by workload and proposer: (accepted, whether the next one failed)
    points: list[StepPoint] = field(default_factory=list)
    wall: TimeBins = field(init=False)
    busy: TimeBins = field(init=False)

    def __post_init__(self) -> None:
        columns = FIRST_PROPOSER + 2 * (len(self.proposers) + 1)
        self.wall, self.busy = TimeBins(columns), TimeBins(columns)

    def counts(self) -> Mapping[tuple[str, str], Counts]:
        """Acceptance of what was really drafted, by workload and proposer."""
        return {key: _counts(outcomes) for key, outcomes in self.outcomes.items()}


def read_journal_runs(name: str, path: Path) -> tuple[JournalRun, ...]:
    """The last runs of a journal file that have steps, oldest first.

    Raises InputError for a bad line, with its number, and where there is no step.
    """
    runs: list[JournalRun] = []
    reader: _Reader | None = None
    started = 0
    for line in iterate_journal(path):
        if isinstance(line, JournalHeader):
            started += 1
            reader = _Reader(_begin(f"{name}, run {started}", line))
            runs = [*[run for run in runs if run.steps][1 - _MOST_RUNS :], reader.run]
        elif reader is not None and not isinstance(line, TornLine):
            reader.take(line)
    kept = [run for run in runs if run.steps]
    if not kept:
        raise InputError(
            f"journal {path}: holds no step; a journal is written while requests are served"
        )
    if started == 1:
        kept[0].name = name
    return tuple(kept)


def _begin(name: str, header: JournalHeader) -> JournalRun:
    identity = header.identity
    facts = [
        ("model", str(identity.get("target", ""))),
        ("engine", f"{identity.get('engine', '')} {identity.get('version', '')}".strip()),
        ("device", str(identity.get("device", ""))),
        ("number format", str(identity.get("dtype", ""))),
        ("proposers", ", ".join(header.proposers)),
        ("policy", str(header.settings.get("policy", {}).get("name", ""))),
    ]
    started = moment(datetime.fromtimestamp(header.started, timezone.utc))
    return JournalRun(
        name,
        started,
        tuple((key, value) for key, value in facts if value),
        header.proposers,
    )


class _Reader:
    """Adds the lines of one run up."""

    def __init__(self, run: JournalRun) -> None:
        self.run = run
        self._workloads: dict[int, str] = {}
        self._mode: Mode | None = None
        self._episode = 0
        self._random = random.Random(0)
        self._seen_points = 0

    def take(self, line: WorkloadName | JournalStep) -> None:
        if isinstance(line, WorkloadName):
            self._workloads[line.index] = line.label
        else:
            self._take_step(line)

    def _take_step(self, step: JournalStep) -> None:
        run = self.run
        if not math.isfinite(step.at + (step.step_seconds or 0.0)):
            raise InputError(f"{run.name}: step {step.id} has a time that is not finite")
        tokens = step.rest.committed + sum(g.committed * g.requests for g in step.groups)
        verified = step.rest.verified + sum(each.verified * each.requests for each in step.groups)
        seconds = step.step_seconds or 0.0
        run.steps += 1
        run.tokens += tokens
        run.request_steps += step.requests
        run.verified += verified
        run.accepted += step.rest.accepted + sum(g.accepted * g.requests for g in step.groups)
        run.span = max(run.span, step.at)
        run.decision_seconds += step.decision_seconds
        mode = run.modes[step.mode]
        mode.steps += 1
        mode.seconds += seconds
        mode.tokens += tokens
        self._episode = self._episode + 1 if step.mode == self._mode else 1
        mode.episodes += self._episode == 1
        mode.longest = max(mode.longest, self._episode)
        self._mode = step.mode
        drafts = self._take_groups(step)
        if step.step_seconds is None:
            return
        self._take_time(step, step.step_seconds, tokens, verified)
        row = [1.0, seconds, tokens, step.requests, step.waiting]
        row += [float(mode == step.mode) for mode in MODES]
        row += drafts
        run.wall.add(step.at, row)
        run.busy.add(run.seconds, row)
        run.seconds += seconds

    def _take_groups(self, step: JournalStep) -> list[float]:
        """Who drafted; returns request steps and verified tokens of every proposer and of off."""
        run = self.run
        drafts = [0.0] * (2 * (len(run.proposers) + 1))
        octave = octave_of(step.requests)
        for group in step.groups:
            workload = self._workloads.get(group.workload, f"workload {group.workload}")
            named = group.proposer != NO_PROPOSER and group.verified > 0
            if not NO_PROPOSER <= group.proposer < len(run.proposers):
                raise InputError(
                    f"{run.name}: step {step.id} names proposer {group.proposer}, the journal's "
                    f"header names {len(run.proposers)} (counted from 0)"
                )
            proposer = run.proposers[group.proposer] if named else OFF
            column = 2 * (group.proposer if named else len(run.proposers))
            drafts[column] += group.requests
            drafts[column + 1] += group.verified * group.requests
            sums = run.choices[octave, workload]
            sums.choices[proposer, group.verified] += group.requests
            sums.request_steps += group.requests
            sums.tokens += group.committed * group.requests
            if named:
                run.drafting_steps += group.requests
                failed = group.accepted < group.verified
                run.outcomes[workload, proposer][group.accepted, failed] += group.requests
        return drafts

    def _take_time(self, step: JournalStep, seconds: float, tokens: int, verified: int) -> None:
        run = self.run
        told = step.predicted_seconds
        run.tells_prefill |= step.prefill_tokens is not None
        if step.prefill_tokens:
            run.odd_steps += 1  # nothing was told of its prompt tokens, nor is a step so dear
            return
        if step.prefill_tokens == 0 or told is None or seconds <= _ODD * told:
            sums = run.loads[step.requests]
            sums.steps += 1
            sums.seconds += seconds
            sums.tokens += tokens
            if verified == 0:
                sums.plain_steps += 1
                sums.plain_seconds += seconds
        else:
            run.odd_steps += 1
        if step.predicted_seconds is not None and seconds > 0.0:
            run.error_sum += abs(step.predicted_seconds / seconds - 1.0)
            run.error_steps += 1
        point = StepPoint(step.requests + verified, step.requests, seconds, step.predicted_seconds)
        self._seen_points += 1
        if len(run.points) < _MOST_POINTS:
            run.points.append(point)
        else:  # every step is kept with the same probability
            place = self._random.randrange(self._seen_points)
            if place < _MOST_POINTS:
                run.points[place] = point


def _counts(outcomes: Counter[tuple[int, bool]]) -> Counts:
    """Positions 1..accepted succeeded, the next one was tried where it failed."""
    longest = min(MOST_POSITIONS, max(accepted + failed for accepted, failed in outcomes))
    successes, trials = [0.0] * longest, [0.0] * longest
    for (accepted, failed), requests in outcomes.items():
        for position in range(min(longest, accepted + failed)):
            trials[position] += requests
            successes[position] += requests if position < accepted else 0
    return _bucketed(successes, trials)


def _bucketed(successes: list[float], trials: list[float]) -> Counts:
    """The first positions one by one, the others as a profile counts them together."""
    reached = [each for each in POSITIONS if each.start < len(trials)]
    return Counts(
        tuple(each.name for each in reached),
        tuple(sum(successes[each.start : each.end]) for each in reached),
        tuple(sum(trials[each.start : each.end]) for each in reached),
    )
