"""``autospec replay``: policies on recorded traces, beside plain decoding and hindsight."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from autospec import __version__
from autospec.arrivals import at_rate, read_arrivals
from autospec.config import Settings, load_settings
from autospec.cost_file import CostFile, read_cost_file
from autospec.errors import InputError
from autospec.fixed_arms import FixedResult, arm_name, fixed_arms, replay_fixed
from autospec.hindsight import (
    BarePolicy,
    replay_clairvoyant,
    replay_plain,
)
from autospec.policy.off import OffOptions
from autospec.profile import Profile
from autospec.profile_file import load_profile
from autospec.replay import (
    MAX_RUNNING,
    ReplayResult,
    make_engine,
    replay_closed,
    replay_open,
    run_open,
    shuffled,
)
from autospec.replay_engine import PREFILL_TOKENS
from autospec.report import check_report, write_report
from autospec.trace import TraceRequest, read_traces

PLAIN = "plain"
CLAIRVOYANT = "clairvoyant"
DEFAULT_CONCURRENCY = "1,8,32,128"

_MOST_CONCURRENCY = 4096
_CLAIRVOYANT_START = 2.0  # times plain, the first guess at its rate


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """What ``autospec replay`` was asked for. ``concurrency`` asks for closed loops, ``rates`` in
    requests per second with ``arrivals`` for open ones; ``requests`` None replays all."""

    traces: tuple[Path, ...]
    cost: Path
    policies: tuple[str, ...] = ("default",)
    concurrency: tuple[int, ...] = ()
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


def parse_concurrency(text: str) -> tuple[int, ...]:
    """Running requests of a comma separated list; raises InputError."""
    found = []
    for part in (part.strip() for part in text.split(",")):
        if not (part.isascii() and part.isdigit() and 1 <= int(part) <= _MOST_CONCURRENCY):
            raise InputError(
                f"--concurrency: {part!r} is not a number of requests from 1 to {_MOST_CONCURRENCY}"
            )
        found.append(int(part))
    return tuple(dict.fromkeys(found))


def parse_rates(text: str) -> tuple[float, ...]:
    """Requests per second of a comma separated list; raises InputError."""
    found = []
    for part in (part.strip() for part in text.split(",")):
        try:
            rate = float(part)
        except ValueError:
            rate = -1.0
        if not 0.0 < rate < float("inf"):
            raise InputError(f"--rate: {part!r} is not a positive number of requests per second")
        found.append(rate)
    return tuple(dict.fromkeys(found))


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
    options: ReplayOptions


def run_replay(options: ReplayOptions, console: Console) -> int:
    """Replay, show tables, write the JSON; returns the exit code.

    Raises InputError, ConfigError and ProfileError for what cannot be run, before anything is.
    """
    inputs = _read(options)
    tasks = _tasks(inputs)
    results: dict[Task, Result] = {}
    for task, result in _run_all(inputs, tasks):
        results[task] = result
    report = _report(inputs, results)
    _print(console, report)
    if options.json_path is not None:
        _write(options.json_path, report)
        console.print(f"figures saved in {options.json_path}", markup=False, soft_wrap=True)
    if options.report_path is not None:
        write_report([report], options.report_path)
        console.print(f"report saved in {options.report_path}", markup=False, soft_wrap=True)
    if options.save_profile is not None:
        console.print(
            f"what was learned was added to {options.save_profile}", markup=False, soft_wrap=True
        )
    return 0


def _read(options: ReplayOptions) -> Inputs:
    if bool(options.rates) != (options.arrivals is not None):
        raise InputError("--arrivals and --rate belong together: give both or none")
    if not options.concurrency and not options.rates:
        raise InputError("nothing to replay: give --concurrency, or --arrivals with --rate")
    for name, path in (("--json", options.json_path), ("--save-profile", options.save_profile)):
        if path is not None and (path.is_dir() or not os.access(path.parent, os.W_OK)):
            raise InputError(f"{name}: {path} cannot be written; give a file in an open folder")
    if options.report_path is not None:
        check_report(options.report_path)
    requests = shuffled(read_traces(options.traces), options.requests, options.seed)
    cost = read_cost_file(options.cost)
    arrivals: dict[float, tuple[float, ...]] = {}
    if options.arrivals is not None:
        recorded = read_arrivals(options.arrivals)
        requests_open = requests[: len(recorded)]
        arrivals = {rate: at_rate(recorded, len(requests_open), rate) for rate in options.rates}
    return Inputs(
        requests,
        cost,
        {name: load_settings(name) for name in options.policies},
        arrivals,
        None if options.profile is None else load_profile(options.profile),
        options,
    )


def _tasks(inputs: Inputs) -> list[Task]:
    options = inputs.options
    tasks = []
    for concurrency in options.concurrency:
        tasks += [Task(name, concurrency) for name in (PLAIN, *options.policies)]
        if options.hindsight:
            tasks.append(Task(CLAIRVOYANT, concurrency))
            names = dict.fromkeys(a.proposer for a in fixed_arms(inputs.requests, inputs.cost))
            tasks += [Task(str(name), concurrency, is_fixed=True) for name in names]
    for rate in options.rates:
        tasks += [Task(name, options.max_running, rate) for name in (PLAIN, *options.policies)]
    return tasks


def _run_all(inputs: Inputs, tasks: Sequence[Task]) -> Iterator[tuple[Task, Result]]:
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


# The JSON form ----------------------------------------------------------------------------------


def _report(inputs: Inputs, results: dict[Task, Result]) -> dict[str, Any]:
    """Every policy's figures by loop, and what was possible, by concurrency."""
    options = inputs.options
    plain = {
        (task.concurrency, task.rate): result
        for task, result in results.items()
        if task.policy == PLAIN and isinstance(result, ReplayResult)
    }
    rows = []
    best: dict[str, Any] = {}
    clairvoyant: dict[str, Any] = {}
    for task, result in results.items():
        reference = plain[task.concurrency, task.rate].tokens_per_second
        speedup = result.tokens_per_second / reference
        concurrency = str(task.concurrency)
        figures = {
            "speedup_vs_plain": speedup,
            "tokens_per_second": result.tokens_per_second,
        }
        if isinstance(result, FixedResult):
            if concurrency not in best or speedup > best[concurrency]["speedup_vs_plain"]:
                best[concurrency] = {"arm": arm_name(result.arm), **figures}
        elif task.policy in options.policies:
            rows.append(_row(result, speedup))
        elif task.policy == CLAIRVOYANT:
            clairvoyant[concurrency] = figures
    order = {name: index for index, name in enumerate(options.policies)}
    rows.sort(key=lambda row: (row["rate"] or 0.0, row["concurrency"], order[str(row["policy"])]))
    return {
        "results": rows,
        "plain": [_row(result, 1.0) for result in plain.values()],
        "best_fixed": best,
        "clairvoyant": clairvoyant,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "version": __version__,
        "settings": {
            "traces": [path.name for path in options.traces],
            "cost": options.cost.name,
            "shape": inputs.cost.shape,
            "seed": options.seed,
            "arrivals": None if options.arrivals is None else options.arrivals.name,
            "prefill_tokens": options.prefill_tokens,
            "tpot_target_ms": options.tpot_target_ms,
            "profile": None if options.profile is None else options.profile.name,
        },
    }


def _row(result: ReplayResult, speedup: float) -> dict[str, Any]:
    row: dict[str, Any] = {
        "policy": result.policy,
        "concurrency": result.concurrency,
        "rate": result.rate,
        "requests": result.requests,
        "tokens": result.tokens,
        "seconds": result.seconds,
        "tokens_per_second": result.tokens_per_second,
        "speedup_vs_plain": speedup,
        "steps": result.steps,
        "decision_seconds_mean": result.decision_seconds_mean,
        "decision_seconds_p99": result.decision_seconds_p99,
    }
    if result.latency is not None:
        row |= {
            "ttft_seconds": asdict(result.latency.ttft),
            "tpot_seconds": asdict(result.latency.tpot),
            "end_to_end_seconds": asdict(result.latency.end_to_end),
            "tpot_target_share": result.latency.target_share,
        }
    return row


def _write(path: Path, value: dict[str, Any]) -> None:
    try:
        path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise InputError(f"--json: {path} cannot be written: {error.strerror}") from None


# Tables -----------------------------------------------------------------------------------------


def _print(console: Console, report: dict[str, Any]) -> None:
    rows = [*report["plain"], *report["results"]]
    concurrency = list(dict.fromkeys(row["concurrency"] for row in rows if row["rate"] is None))
    if concurrency:
        table = Table(title="closed loop: speedup against plain decoding")
        table.add_column("running requests")
        for number in concurrency:
            table.add_column(str(number), justify="right")
        for name in dict.fromkeys(row["policy"] for row in rows if row["rate"] is None):
            found = {row["concurrency"]: row for row in rows if row["policy"] == name}
            table.add_row(name, *(f"{found[n]['speedup_vs_plain']:.3f}" for n in concurrency))
        for title, values in (
            ("best fixed", report["best_fixed"]),
            (CLAIRVOYANT, report["clairvoyant"]),
        ):
            if values:
                cells = (values[str(n)] for n in concurrency)
                table.add_row(
                    title,
                    *(f"{c['speedup_vs_plain']:.3f} {c.get('arm', '')}".strip() for c in cells),
                    style="dim",
                )
        console.print(table)
    rates = list(dict.fromkeys(row["rate"] for row in rows if row["rate"] is not None))
    for rate in rates:
        table = Table(
            "policy", "tokens/s", "first token p50 / p95 / p99", "per token, ms", "whole request",
            title=f"open loop: {rate:g} requests/s (seconds; per token in ms)",
        )  # fmt: skip
        shares = any(row.get("tpot_target_share") is not None for row in rows)
        if shares:
            table.add_column("on target")
        for row in rows:
            if row["rate"] != rate:
                continue
            table.add_row(
                row["policy"],
                f"{row['tokens_per_second']:.0f}",
                _three(row["ttft_seconds"], 1.0),
                _three(row["tpot_seconds"], 1000.0),
                _three(row["end_to_end_seconds"], 1.0),
                *([f"{row['tpot_target_share']:.1%}"] if shares else []),
            )
        console.print(table)
    for row in report["results"]:
        at = row["concurrency"] if row["rate"] is None else f"{row['rate']:g}/s"
        console.print(
            f"{row['policy']} at {at}: {row['requests']} requests, {row['tokens']} tokens in "
            f"{row['seconds']:.1f} simulated seconds; deciding took "
            f"{row['decision_seconds_mean'] * 1e6:.0f} us a step, "
            f"p99 {row['decision_seconds_p99'] * 1e6:.0f} us",
            markup=False,
            soft_wrap=True,
        )


def _three(seconds: dict[str, float], factor: float) -> str:
    return " / ".join(f"{seconds[name] * factor:.2f}" for name in ("p50", "p95", "p99"))
