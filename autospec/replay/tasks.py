"""The runs that ``autospec replay`` is made of, in this process or several."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from autospec.config import Settings
from autospec.policy.off import OffOptions
from autospec.profile.learned import Profile
from autospec.replay.cost_file import CostFile
from autospec.replay.engine import PREFILL_TOKENS
from autospec.replay.fixed_arms import FixedResult, fixed_arms, replay_fixed
from autospec.replay.hindsight import BarePolicy, replay_clairvoyant, replay_plain
from autospec.replay.run import (
    MAX_RUNNING,
    ReplayResult,
    make_engine,
    replay_closed,
    replay_open,
    run_open,
)
from autospec.replay.trace import TraceRequest

PLAIN = "plain"
CLAIRVOYANT = "clairvoyant"
_CLAIRVOYANT_START = 2.0  # times plain, the first guess at its rate


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """What ``autospec replay`` was asked for. ``concurrency`` asks for closed loops (None: the
    usual ones unless there are rates), ``rates`` in requests per second with ``arrivals`` for open
    ones; ``requests`` None replays all."""

    traces: tuple[Path, ...]
    cost: Path
    policies: tuple[str, ...] = ("default",)
    concurrency: tuple[int, ...] | None = None
    requests: int | None = None
    arrivals: Path | None = None
    rates: tuple[float, ...] = ()
    max_running: int = MAX_RUNNING
    prefill_tokens: int = PREFILL_TOKENS
    tpot_target_ms: float | None = None
    profile: Path | None = None
    save_profile: Path | None = None
    hindsight: bool = True
    jobs: int = 1
    seed: int = 0
    json_path: Path | None = None
    report_path: Path | None = None


@dataclass(frozen=True, slots=True)
class Task:
    """One run: a policy by name, ``plain``, ``clairvoyant``, or every k of a fixed proposer.

    ``rate`` None is a closed loop of ``concurrency`` requests.
    """

    policy: str
    concurrency: int
    rate: float | None = None
    is_fixed: bool = False


Result = ReplayResult | FixedResult
"""Of a fixed proposer it is that of its best k."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """What every run reads."""

    requests: tuple[TraceRequest, ...]
    cost: CostFile
    settings: dict[str, Settings]
    arrivals: dict[float, tuple[float, ...]]  # by rate
    profile: Profile | None
    concurrency: tuple[int, ...]  # of closed loops
    options: ReplayOptions


def tasks_of(inputs: Inputs) -> list[Task]:
    """Plain decoding, policies and hindsight at every load that was asked for."""
    options = inputs.options
    tasks = []
    for concurrency in inputs.concurrency:
        tasks += [Task(name, concurrency) for name in (PLAIN, *options.policies)]
        if options.hindsight:
            tasks.append(Task(CLAIRVOYANT, concurrency))
            names = dict.fromkeys(a.proposer for a in fixed_arms(inputs.requests, inputs.cost))
            tasks += [Task(str(name), concurrency, is_fixed=True) for name in names]
    for rate in options.rates:
        tasks += [Task(name, options.max_running, rate) for name in (PLAIN, *options.policies)]
    return tasks


def run_all(inputs: Inputs, tasks: Sequence[Task]) -> Iterator[tuple[Task, Result]]:
    """Run in this process or several; a bar on standard error says how far it is."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("replaying", total=len(tasks))
        if inputs.options.jobs == 1 or len(tasks) == 1:
            for task in tasks:
                progress.update(bar, description=_label(task))
                yield task, _run(inputs, task)
                progress.advance(bar)
            return
        with ProcessPoolExecutor(
            inputs.options.jobs, multiprocessing.get_context("spawn"), _begin, (inputs,)
        ) as pool:
            pending = {pool.submit(_run_here, task): task for task in tasks}
            while pending:
                done, _ = wait(pending, return_when=FIRST_COMPLETED)
                for future in done:
                    task = pending.pop(future)
                    yield task, future.result()
                    progress.update(bar, advance=1, description=_label(task))


def _label(task: Task) -> str:
    at = f"at {task.concurrency}" if task.rate is None else f"at {task.rate:g}/s"
    return f"{task.policy} {at}"


_inputs: Inputs


def _begin(inputs: Inputs) -> None:
    """What a process needs for all its runs."""
    global _inputs
    _inputs = inputs


def _run_here(task: Task) -> Result:
    return _run(_inputs, task)


def _run(inputs: Inputs, task: Task) -> Result:
    requests, cost, options = inputs.requests, inputs.cost, inputs.options
    if task.rate is not None:
        return _run_open(inputs, task, task.rate)
    if task.is_fixed:
        arms = replay_fixed(requests, cost, task.policy, task.concurrency)
        return max(arms, key=lambda result: result.tokens_per_second)
    if task.policy == PLAIN:
        return replay_plain(requests, cost, task.concurrency)
    if task.policy == CLAIRVOYANT:
        plain = replay_plain(requests, cost, task.concurrency).tokens_per_second
        return replay_clairvoyant(requests, cost, task.concurrency, rate=_CLAIRVOYANT_START * plain)
    result, controller = replay_closed(
        requests,
        cost,
        inputs.settings[task.policy],
        task.concurrency,
        policy=task.policy,
        profile=inputs.profile,
        seed=options.seed,
    )
    if options.save_profile is not None:
        controller.save(options.save_profile)
    return result


def _run_open(inputs: Inputs, task: Task, rate: float) -> ReplayResult:
    options, cost = inputs.options, inputs.cost
    arrivals = inputs.arrivals[rate]
    requests = inputs.requests[: len(arrivals)]
    target = None if options.tpot_target_ms is None else options.tpot_target_ms / 1000.0
    if task.policy == PLAIN:
        engine = make_engine(
            requests, cost, options.max_running, prefill_tokens=options.prefill_tokens
        )
        decider = BarePolicy(OffOptions(), engine)
        return run_open(
            engine,
            decider,
            requests,
            arrivals,
            options.max_running,
            rate=rate,
            policy=PLAIN,
            tpot_target_seconds=target,
        )
    result, controller = replay_open(
        requests,
        arrivals,
        rate,
        cost,
        inputs.settings[task.policy],
        max_running=options.max_running,
        prefill_tokens=options.prefill_tokens,
        tpot_target_seconds=target,
        policy=task.policy,
        profile=inputs.profile,
        seed=options.seed,
    )
    if options.save_profile is not None:
        controller.save(options.save_profile)
    return result
