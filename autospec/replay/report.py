"""``autospec replay``: policies on recorded traces, beside plain decoding and hindsight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rich.console import Console

from autospec import __version__
from autospec.acceptance import hazard_table
from autospec.config import load_settings
from autospec.cost import step_cost
from autospec.errors import InputError, ProfileMismatch
from autospec.json_file import check_writable, write_json
from autospec.profile.file import load_profile
from autospec.profile.learned import Identity, Profile
from autospec.replay.arrivals import at_rate, read_arrivals
from autospec.replay.cost_file import CostFile, read_cost_file
from autospec.replay.fixed_arms import FixedResult, arm_name
from autospec.replay.recorded import check_recorded
from autospec.replay.run import ReplayResult, make_engine, shuffled
from autospec.replay.tables import print_tables
from autospec.replay.tasks import (
    CLAIRVOYANT,
    PLAIN,
    Inputs,
    ReplayOptions,
    Result,
    Task,
    run_all,
    tasks_of,
)
from autospec.replay.trace import TraceRequest, read_traces
from autospec.report import check_report, write_report

_DEFAULT_CONCURRENCY = (1, 8, 32, 128)

_MOST_CONCURRENCY = 4096


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


def run_replay(options: ReplayOptions, console: Console) -> int:
    """Replay, show tables, write the JSON; returns the exit code.

    Raises InputError, ConfigError and ProfileError for what cannot be run, before anything is.
    """
    inputs = _read(options)
    tasks = tasks_of(inputs)
    results: dict[Task, Result] = {}
    for task, result in run_all(inputs, tasks):
        results[task] = result
    report = _report(inputs, results)
    print_tables(console, report)
    if options.json_path is not None:
        write_json(options.json_path, report)
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
    check_writable(options.json_path)
    check_writable(options.save_profile, "--save-profile")
    if options.report_path is not None:
        check_report(options.report_path)
    requests = shuffled(read_traces(options.traces), options.requests, options.seed)
    cost = read_cost_file(options.cost)
    check_recorded(options.cost, cost, requests)
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
        None if options.profile is None else _profile(options.profile, requests, cost),
        _concurrency(options, len(requests)),
        options,
    )


def _concurrency(options: ReplayOptions, requests: int) -> tuple[int, ...]:
    """Running requests of the closed loops. Raises InputError where there are fewer requests.

    They would never run at once, and how many tokens a loop is about would be the policy's doing.
    """
    if options.concurrency is None:
        loops = () if options.rates else _DEFAULT_CONCURRENCY
        return tuple(number for number in loops if number <= requests)
    for number in options.concurrency:
        if number > requests:
            raise InputError(
                f"--concurrency: {number} requests cannot run at once, {requests} are to be "
                f"replayed; give at most {requests}, or more requests (traces, --requests)"
            )
    return options.concurrency


def _profile(path: Path, requests: Sequence[TraceRequest], cost: CostFile) -> Profile:
    """A profile of replays with these proposers; raises ProfileError for any other."""
    profile = load_profile(path)
    engine = make_engine(requests, cost, 1)
    identity = Identity.of(engine.info, tuple(engine.proposers))
    try:
        profile.require(identity, hazard_table.LAYOUT, step_cost.LAYOUT)
    except ProfileMismatch as error:
        raise ProfileMismatch(
            f"--profile: {path}: {error}. Only a profile of replays with the same proposers fits, "
            f"not one of a server: write it with autospec replay --save-profile or autospec tune "
            f"--engine replay"
        ) from None
    return profile


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
