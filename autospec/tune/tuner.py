"""The search and the final of a tuning run, whatever its requests and times come from.

What is known is saved after every trial, so that an interrupted run goes on where it was.
"""

from __future__ import annotations

import hashlib
import json
import math
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from autospec.config import load_settings
from autospec.errors import AutoSpecError, InputError
from autospec.profile.learned import Profile, merge
from autospec.profile.tuned import KCap, ProposerSettings
from autospec.prompts import DEFAULT_WORKLOAD
from autospec.replay.trace import TraceRequest
from autospec.tune.budget import Budget
from autospec.tune.final import LEAST_ROUNDS, PLAIN, UNTUNED, Verdict, judge
from autospec.tune.meter import Meter
from autospec.tune.search import REPLICATES, Trial, next_point, standing
from autospec.tune.space import Point, Space, make_space, point_of
from autospec.tune.state import Round, State, load_state, save_state, state_path
from autospec.tune.traced import Bed, TrialTimeout, in_order, plain_goodput, tuned_goodput

FINALISTS = 2
SEARCH_SHARE = 0.6  # of the budget, after which the final begins
_MOST_ROUNDS = 12
_TRIAL_REQUESTS = 24
_SEEDS = 5  # orders of requests that trials take in turn
_LEAST_TIMEOUT = 60.0
_SLOW = 8.0  # times the usual trial, after which one is given up


@dataclass(frozen=True, slots=True)
class TuneOptions:
    """What ``autospec tune`` was asked for. ``budget`` is in seconds."""

    out: Path
    engine: str = "embedded"
    target: Path | None = None
    prompts: Path | None = None
    draft: Path | None = None
    heads: tuple[Path, ...] = ()
    traces: tuple[Path, ...] = ()
    cost: Path | None = None
    loads: tuple[int, ...] = (1, 4, 16)
    budget: float = 900.0
    trials: int = 60
    warm_start: Path | None = None
    policy: str = "default"
    max_tokens: int = 96
    json_path: Path | None = None
    report_path: Path | None = None
    dtype: str = "auto"
    device: str = "cpu"
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Setting:
    """One arm of the final: settings of proposers, and caps on k by load."""

    proposers: Mapping[str, ProposerSettings]
    caps: tuple[KCap, ...]


@dataclass(frozen=True, slots=True)
class Data:
    """Requests to tune on and to judge on, the bed that trials on them run on, and the settings of
    all proposers unless tuned."""

    tuning: tuple[TraceRequest, ...]
    held_out: tuple[TraceRequest, ...]
    bed: Bed
    untuned: Mapping[str, ProposerSettings]
    prompts_name: str
    digest: str


class Final(Protocol):
    """Runs the arms of the final against each other, a round at a time."""

    def run_round(
        self, seed: int, show: Callable[[str], None] = ...
    ) -> dict[str, list[float | None]]: ...


def command_of(options: TuneOptions) -> str:
    """The command that repeats a run, with names in place of paths."""
    words = ["autospec", "tune", "--engine", options.engine]
    for flag, paths in (
        ("--target", [options.target]),
        ("--prompts", [options.prompts]),
        ("--draft", [options.draft]),
        ("--head", options.heads),
        ("--traces", options.traces),
        ("--cost", [options.cost]),
        ("--warm-start", [options.warm_start]),
    ):
        for path in paths:
            if path is not None:
                words += [flag, path.name]
    words += ["--loads", ",".join(map(str, options.loads)), "--budget", f"{options.budget:g}s"]
    words += ["--trials", str(options.trials), "--max-tokens", str(options.max_tokens)]
    words += ["--policy", options.policy, "--seed", str(options.seed), "--out", options.out.name]
    return shlex.join(words)


def split(
    requests: Sequence[TraceRequest], seed: int
) -> tuple[tuple[TraceRequest, ...], tuple[TraceRequest, ...]]:
    """Halves to tune on and to judge on, every workload in both. Raises InputError."""
    halves: tuple[list[TraceRequest], list[TraceRequest]] = ([], [])
    by_label: dict[str, list[TraceRequest]] = {}
    for request in in_order(requests, 1, seed):
        by_label.setdefault(request.workload or DEFAULT_WORKLOAD, []).append(request)
    for label in sorted(by_label):
        mine = by_label[label]
        if len(mine) < 2:
            raise InputError(
                f"workload {label!r} has {len(mine)} request; one to tune on and one to judge on "
                "are the least"
            )
        for number, request in enumerate(mine):
            halves[number % 2].append(request)
    return tuple(halves[0]), tuple(halves[1])


def fingerprint(options: TuneOptions, digest: str) -> str:
    """Tells runs apart: a state of another run is not gone on from."""
    parts = {
        "engine": options.engine,
        "target": None if options.target is None else options.target.name,
        "draft": None if options.draft is None else options.draft.name,
        "heads": [head.name for head in options.heads],
        "requests": digest,
        "cost": None if options.cost is None else digest_of([options.cost]),
        "loads": options.loads,
        "policy": load_settings(options.policy).model_dump_json(),
        "max_tokens": options.max_tokens,
        "dtype": options.dtype,
        "device": options.device,
        "seed": options.seed,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def digest_of(paths: Sequence[Path]) -> str:
    """SHA-256 over the files' bytes. Raises InputError."""
    total = hashlib.sha256()
    for path in paths:
        try:
            total.update(path.read_bytes())
        except OSError as error:
            raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    return total.hexdigest()


class Tuner:
    """The search and the final, over data that is there."""

    def __init__(
        self, options: TuneOptions, data: Data, state: State, budget: Budget, meter: Meter
    ) -> None:
        self.options = options
        self.data = data
        self.state = state
        self.budget = budget
        self.meter = meter
        with_confidence = data.bed.confidence is not None
        self.space: Space = make_space(data.untuned, options.loads, with_confidence=with_confidence)
        self.warm: Profile | None = None
        self._plain: dict[tuple[int, int], float] = {}
        self._path = state_path(options.out)

    def save(self) -> None:
        """Write what is known."""
        self.state.spent = self.budget.spent
        save_state(self._path, self.state)

    def learn_first(self) -> Profile:
        """What serving the tuning requests teaches with the untuned settings: trials start warm."""
        settings, caps = self.space.decode(self.space.default)
        load = sorted(self.options.loads)[len(self.options.loads) // 2]
        self.warm = self.serve_all(settings, caps, (load,))
        return self.warm

    def serve_all(
        self,
        settings: Mapping[str, ProposerSettings],
        caps: Sequence[KCap],
        loads: Sequence[int],
    ) -> Profile:
        """Serve every tuning request at each load; the profile of what that taught."""
        learned: Profile | None = None
        for load in loads:
            requests = in_order(self.data.tuning, load, self.options.seed)
            _, controller = tuned_goodput(
                requests, self.data.bed, settings, caps, load,
                profile=None, seed=self.options.seed, deadline=None,
            )  # fmt: skip
            fresh = controller.learned.take_fresh(
                controller.workloads.labels, "tuned: recorded requests served", time.time()
            )
            learned = fresh if learned is None else merge(learned, fresh)
        assert learned is not None
        return learned

    # The search -----------------------------------------------------------------------------

    def search(self, first: Sequence[Point]) -> None:
        """Trials until their number or the budget's share is used up."""
        options, state = self.options, self.state
        while len(state.trials) < options.trials:
            usual = _usual_seconds(state.trials)
            if len(state.trials) >= REPLICATES:
                if self.budget.left_until(SEARCH_SHARE) < usual:
                    break
            elif len(state.trials) == 1:
                self._check_budget(usual)
            point = next_point(self.space, state.trials, first, options.seed)
            seed = len(state.trials) % _SEEDS
            state.trials.append(self._try(point, seed, max(_LEAST_TIMEOUT, _SLOW * usual)))
            self.save()
            best = standing(state.trials)
            said = f"trial {len(state.trials)}"
            if best:
                said += f", best {math.exp(best[0][1]):.2f}x of plain"
            self.meter.show(said)

    def _check_budget(self, trial_seconds: float) -> None:
        needed = self.budget.spent + trial_seconds * (REPLICATES - 1 + 2 * LEAST_ROUNDS)
        if needed > self.budget.seconds:
            raise InputError(
                f"--budget: {self.budget.seconds:.0f} s is too little: one trial takes "
                f"{trial_seconds:.1f} s here, and {self.budget.spent:.0f} s were needed before "
                f"the second; give at least {math.ceil(1.1 * needed)}s"
            )

    def _try(self, point: Point, seed: int, timeout: float) -> Trial:
        """One trial; whatever goes wrong in it is noted."""
        settings, caps = self.space.decode(point)
        began = time.monotonic()
        requests = self.data.tuning
        scores = []
        try:
            for load in self.options.loads:
                chosen = _sample(requests, load, seed)
                plain = self._plain_goodput(chosen, load, seed)
                goodput, _ = tuned_goodput(
                    chosen, self.data.bed, settings, caps, load,
                    profile=self.warm, seed=seed, deadline=began + timeout,
                )  # fmt: skip
                scores.append(math.log(goodput / plain))
        except TrialTimeout as error:
            return Trial(point, seed, "timeout", (), time.monotonic() - began, str(error))
        except (AutoSpecError, ArithmeticError, ValueError) as error:
            text = f"{type(error).__name__}: {error}"
            return Trial(point, seed, "failed", (), time.monotonic() - began, text)
        seconds = time.monotonic() - began
        if not all(math.isfinite(score) for score in scores):
            return Trial(point, seed, "nan", (), seconds, f"scores {scores}")
        return Trial(point, seed, "ok", tuple(scores), seconds)

    def _plain_goodput(self, requests: Sequence[TraceRequest], load: int, seed: int) -> float:
        key = (load, seed)
        if key not in self._plain:
            self._plain[key] = plain_goodput(requests, self.data.bed, self.space.defaults, load)
        return self._plain[key]

    # The final ------------------------------------------------------------------------------

    def finalists(self) -> dict[str, Setting]:
        """The untuned settings and the best of the search that differ from them, by arm name."""
        state = self.state
        if not state.finalists:
            better = [
                point for point, _, _ in standing(state.trials) if point != self.space.default
            ]
            state.finalists = [tuple(point) for point in better[:FINALISTS]]
            self.save()
        arms = {UNTUNED: Setting(*self.space.decode(self.space.default))}
        for number, point in enumerate(state.finalists, start=1):
            arms[f"finalist {number}"] = Setting(*self.space.decode(tuple(point)))
        return arms

    def run_final(self, final: Final) -> Verdict:
        """Rounds until the budget is used up; at least as many as an interval needs."""
        rounds = self.state.rounds
        began, done = self.budget.spent, 0
        while len(rounds) < _MOST_ROUNDS:
            usual = (self.budget.spent - began) / done if done else 0.0
            if len(rounds) >= LEAST_ROUNDS and self.budget.left < usual:
                break
            seed = 1000 + len(rounds)
            rounds.append(Round(seed, final.run_round(seed, self.meter.show)))
            done += 1
            self.save()
            self.meter.show(f"final: round {len(rounds)}")
        return judge(rounds, self.finalist_names())

    def finalist_names(self) -> list[str]:
        """Arms that were found by the search."""
        return [f"finalist {number}" for number in range(1, len(self.state.finalists) + 1)]


@dataclass(frozen=True, slots=True)
class TracedFinal:
    """The final on held-out recorded requests, in an order of its own every round."""

    data: Data
    arms: Mapping[str, Setting]
    loads: tuple[int, ...]
    warm: Profile | None
    defaults: Mapping[str, ProposerSettings]

    def run_round(
        self, seed: int, show: Callable[[str], None] = lambda line: None
    ) -> dict[str, list[float | None]]:
        """Goodput of plain and of every arm at every load."""
        goodputs: dict[str, list[float | None]] = {PLAIN: [], **{name: [] for name in self.arms}}
        for load in self.loads:
            chosen = _sample(self.data.held_out, load, seed)
            show(f"final: load {load}")
            goodputs[PLAIN].append(plain_goodput(chosen, self.data.bed, self.defaults, load))
            for name, arm in self.arms.items():
                goodput, _ = tuned_goodput(
                    chosen, self.data.bed, arm.proposers, arm.caps, load,
                    profile=self.warm, seed=seed, deadline=None,
                )  # fmt: skip
                goodputs[name].append(goodput)
        return goodputs


def _sample(requests: Sequence[TraceRequest], load: int, seed: int) -> list[TraceRequest]:
    """Some of the requests, enough to keep the load up for a while."""
    count = max(_TRIAL_REQUESTS, 2 * load)
    return in_order(in_order(requests, 1, seed)[:count], load, seed)


def _usual_seconds(trials: Sequence[Trial]) -> float:
    done = sorted(trial.seconds for trial in trials if trial.status == "ok")
    return done[len(done) // 2] if done else 0.0


def begin(options: TuneOptions, data_digest: str) -> tuple[State, Budget]:
    """The state to go on from, and the time that is left."""
    state = load_state(state_path(options.out), fingerprint(options, data_digest))
    return state, Budget(options.budget, state.spent)


def first_points(space: Space, older: Profile | None) -> list[Point]:
    """Settings to try early: those of an older profile."""
    if older is None or older.tuned is None:
        return []
    return [point_of(space, older.tuned)]


def chosen_setting(verdict: Verdict, arms: Mapping[str, Setting]) -> Setting:
    """The settings that the profile keeps."""
    return arms[verdict.arm]
