"""The ``autospec`` command. Exit codes: 0 done, 1 ran and failed, 2 wrong usage or input."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autospec.errors import (
    AutoSpecError,
    EngineError,
    MissingDependency,
    ModelError,
    ProfileMismatch,
)

if TYPE_CHECKING:
    from autospec.profile import Profile, Statistics

TRACEBACK_VARIABLE = "AUTOSPEC_TRACEBACK"

app = typer.Typer(
    name="autospec",
    help="Adaptive speculative decoding: who drafts, how many tokens, how many to verify.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
profile_app = typer.Typer(no_args_is_help=True, help="Show, compare, merge and check profiles.")
policy_app = typer.Typer(no_args_is_help=True, help="List and check policy files.")
app.add_typer(profile_app, name="profile")
app.add_typer(policy_app, name="policy")


def main() -> None:
    """Run the command line; errors are one message on standard error, without a traceback."""
    try:
        app()
    except AutoSpecError as error:
        _leave(str(error), _exit_code(error))
    except Exception as error:
        if os.environ.get(TRACEBACK_VARIABLE):
            raise
        _leave(
            f"{type(error).__name__}: {error} (a fault in AutoSpec; {TRACEBACK_VARIABLE}=1 "
            "shows where)",
            1,
        )


def _exit_code(error: AutoSpecError) -> int:
    ran = isinstance(error, EngineError | MissingDependency) and not isinstance(error, ModelError)
    return 1 if ran else 2


def _leave(message: str, code: int) -> None:
    sys.stderr.write(f"autospec: {message}\n")
    raise SystemExit(code)


@app.callback(invoke_without_command=True)
def _options(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        from autospec import __version__

        typer.echo(f"autospec {__version__}")
        raise typer.Exit


@app.command()
def schema() -> None:
    """Print the JSON Schema of policy files, for editors."""
    from autospec.config import settings_schema

    typer.echo(json.dumps(settings_schema(), indent=2))


PolicyName = Annotated[
    str, typer.Option("--policy", metavar="NAME_OR_FILE", help="Policy of the adaptive arm.")
]
JsonPath = Annotated[
    Path | None, typer.Option("--json", metavar="OUT", help="Write the figures here as JSON.")
]
ProfilePath = Annotated[
    Path | None, typer.Option("--profile", metavar="FILE", help="Start from and add to it.")
]
JournalPath = Annotated[
    Path | None, typer.Option("--journal", metavar="FILE", help="Write every step's decision.")
]
MetricsPort = Annotated[
    int | None, typer.Option(min=1, max=65535, help="Serve /metrics on this port meanwhile.")
]
Seed = Annotated[int, typer.Option(min=0, help="Seed of sampling and of the policy.")]


@app.command()
def demo(
    target: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="A model of yours; else SmolLM2-135M.")
    ] = None,
    policy: PolicyName = "default",
    json_path: JsonPath = None,
    profile: ProfilePath = None,
    journal: JournalPath = None,
    metrics_port: MetricsPort = None,
    cold: Annotated[bool, typer.Option("--cold", help="Ignore what earlier runs learned.")] = False,
    seed: Seed = 0,
) -> None:
    """Adapt a small real model under changing load, live."""
    with _extra("demo"):
        from autospec.demo import DemoOptions, run_demo
    from rich.console import Console

    options = DemoOptions(
        target=target,
        policy=policy,
        json_path=json_path,
        profile=profile,
        journal=journal,
        metrics_port=metrics_port,
        cold=cold,
        seed=seed,
    )
    raise typer.Exit(run_demo(options, Console()))


@app.command()
def bench(
    target: Annotated[Path, typer.Option(metavar="FOLDER", help="Model folder.")],
    prompts: Annotated[
        Path, typer.Option(metavar="FILE.jsonl", help='Lines of {"id", "workload", "prompt"}.')
    ],
    draft: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Draft model with the same vocabulary.")
    ] = None,
    policy: PolicyName = "default",
    loads: Annotated[str, typer.Option(help="Numbers of running requests.")] = "1,4,16",
    arms: Annotated[
        str, typer.Option(help="plain, adaptive, or PROPOSER:K each.")
    ] = "plain,ngram:4,suffix:8,adaptive",
    json_path: JsonPath = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 128,
    requests: Annotated[
        int | None, typer.Option(min=1, help="Requests per block; else as many as the load.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Blocks per load and workload.")] = 3,
    workload: Annotated[
        list[str] | None, typer.Option(help="Only this workload; may be repeated.")
    ] = None,
    mix: Annotated[bool, typer.Option("--mix", help="Serve all workloads at once.")] = False,
    stop_at_eos: Annotated[
        bool, typer.Option("--stop-at-eos", help="Let answers end by themselves.")
    ] = False,
    profile: ProfilePath = None,
    journal: JournalPath = None,
    metrics_port: MetricsPort = None,
    dtype: Annotated[str, typer.Option(help="auto, bfloat16, float16 or float32.")] = "auto",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cpu",
    seed: Seed = 0,
) -> None:
    """Compare plain, fixed and adaptive on your model and prompts."""
    with _extra("engine"):
        from autospec.bench import BenchOptions, parse_loads, run_bench
    from rich.console import Console

    options = BenchOptions(
        target=target,
        prompts=prompts,
        draft=draft,
        policy=policy,
        loads=parse_loads(loads),
        arms=arms,
        json_path=json_path,
        max_tokens=max_tokens,
        requests=requests,
        rounds=rounds,
        workloads=tuple(workload or ()),
        mix=mix,
        stop_at_eos=stop_at_eos,
        profile=profile,
        journal=journal,
        metrics_port=metrics_port,
        dtype=dtype,
        device=device,
        seed=seed,
    )
    raise typer.Exit(run_bench(options, Console()))


@app.command()
def replay(
    traces: Annotated[
        list[Path], typer.Argument(metavar="TRACE.jsonl...", help="Recorded traces.")
    ],
    cost: Annotated[Path, typer.Option(metavar="FILE", help="Step times of an engine, YAML.")],
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME_OR_FILE", help="Policy to run; may be repeated.  [default: default]"
        ),
    ] = None,
    concurrency: Annotated[
        str | None,
        typer.Option(
            help="Running requests of closed loops.  [default: 1,8,32,128 without --rate]"
        ),
    ] = None,
    requests: Annotated[
        int | None, typer.Option(min=1, help="Only so many requests, of the shuffled traces.")
    ] = None,
    arrivals: Annotated[
        Path | None, typer.Option(metavar="FILE.csv", help="Arrivals for an open loop.")
    ] = None,
    rate: Annotated[
        str | None, typer.Option(help="Requests per second that arrive, a comma separated list.")
    ] = None,
    max_running: Annotated[
        int, typer.Option(min=1, help="Most requests at once, open loop.")
    ] = 256,
    prefill_tokens: Annotated[
        int, typer.Option(min=1, help="Most prompt tokens of a step, open loop.")
    ] = 512,
    tpot_target_ms: Annotated[
        float | None, typer.Option(min=0.001, help="Target per output token, open loop.")
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Every run starts from this profile.")
    ] = None,
    save_profile: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Add to it what the runs learned.")
    ] = None,
    hindsight: Annotated[
        bool, typer.Option(help="Also find the best fixed choice and the clairvoyant one.")
    ] = True,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Processes.  [default: one per core]")
    ] = None,
    json_path: JsonPath = None,
    seed: Seed = 0,
) -> None:
    """Replay recorded traces under any policy, without a GPU."""
    from rich.console import Console

    from autospec.replay_report import (
        DEFAULT_CONCURRENCY,
        ReplayOptions,
        parse_concurrency,
        parse_rates,
        run_replay,
    )

    if concurrency is None and rate is None:
        concurrency = DEFAULT_CONCURRENCY
    options = ReplayOptions(
        traces=tuple(traces),
        cost=cost,
        policies=tuple(dict.fromkeys(policy or ["default"])),
        concurrency=() if concurrency is None else parse_concurrency(concurrency),
        requests=requests,
        arrivals=arrivals,
        rates=() if rate is None else parse_rates(rate),
        max_running=max_running,
        prefill_tokens=prefill_tokens,
        tpot_target_ms=tpot_target_ms,
        profile=profile,
        save_profile=save_profile,
        hindsight=hindsight,
        jobs=jobs or os.cpu_count() or 1,
        seed=seed,
        json_path=json_path,
    )
    raise typer.Exit(run_replay(options, Console()))


@app.command()
def record(
    target: Annotated[Path, typer.Option(metavar="FOLDER", help="Model folder.")],
    prompts: Annotated[
        Path, typer.Option(metavar="FILE.jsonl", help='Lines of {"id", "workload", "prompt"}.')
    ],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="TRACE.jsonl", help="The trace.")],
    draft: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Draft model to be recorded.")
    ] = None,
    draft_k: Annotated[int, typer.Option(min=1, max=32, help="Tokens of every draft.")] = 8,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 256,
    concurrency: Annotated[int, typer.Option(min=1, help="Running requests.")] = 4,
    stop_at_eos: Annotated[bool, typer.Option(help="Let answers end by themselves.")] = True,
    dtype: Annotated[str, typer.Option(help="auto, bfloat16, float16 or float32.")] = "auto",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cpu",
) -> None:
    """Record a trace of your model and prompts, to be replayed."""
    with _extra("engine"):
        from autospec.record import RecordOptions, run_record
    from rich.console import Console

    options = RecordOptions(
        target=target,
        prompts=prompts,
        out=out,
        draft=draft,
        draft_k=draft_k,
        max_tokens=max_tokens,
        concurrency=concurrency,
        stop_at_eos=stop_at_eos,
        dtype=dtype,
        device=device,
    )
    raise typer.Exit(run_record(options, Console()))


@contextlib.contextmanager
def _extra(name: str) -> Iterator[None]:
    """Turn a missing optional dependency into what to install; importing one takes seconds."""
    typer.echo("loading torch and transformers …", err=True)
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("autospec"):
            raise
        raise MissingDependency(
            f"{error.name} is not installed: pip install 'autospec-llm[{name}]'"
        ) from None


@app.command("demo-model")
def demo_model() -> None:
    """Fetch and convert the demo's model into the cache, once."""
    with _extra("demo"):
        from autospec.engine.demo_model import ensure_demo_model

    folder = ensure_demo_model(lambda line: typer.echo(line, err=True))
    typer.echo(str(folder))


@policy_app.command("list")
def policy_list() -> None:
    """Name the policy files that come with AutoSpec."""
    from autospec.config import installed_policies, policies_folder

    for name in installed_policies():
        with (policies_folder() / f"{name}.yaml").open(encoding="utf-8") as file:
            purpose = file.readline().removeprefix("#").strip()
        typer.echo(f"{name:<12} {purpose}")


@policy_app.command("check")
def policy_check(
    policy: Annotated[str, typer.Argument(metavar="NAME_OR_FILE", help="Name or YAML file.")],
    show: Annotated[bool, typer.Option("--show", help="Print every setting as JSON.")] = False,
) -> None:
    """Check a policy file; list every mistake in it."""
    from autospec.config import load_settings

    settings = load_settings(policy)
    if show:
        typer.echo(settings.model_dump_json(indent=2))
    else:
        typer.echo(f"{policy}: good")


ProfileFile = Annotated[Path, typer.Argument(metavar="FILE", help="Profile, JSON.")]


@profile_app.command("check")
def profile_check(file: ProfileFile) -> None:
    """Check that a file is a whole profile."""
    from autospec.profile import load_profile

    profile = load_profile(file)
    typer.echo(f"{file}: good, {len(profile.workloads)} workloads")


@profile_app.command("show")
def profile_show(file: ProfileFile) -> None:
    """Show what a profile was learned on and what it holds."""
    from rich.console import Console
    from rich.table import Table

    from autospec.profile import load_profile

    profile = load_profile(file)
    console = Console(soft_wrap=True, highlight=False)
    for name, value in _facts(profile):
        console.print(f"{name:<18} {value}", markup=False)
    table = Table("workload", "requests", "proposer", "observed", "accepted", "by position")
    for label, workload in profile.workloads.items():
        for row, (proposer, statistics) in enumerate(workload.proposers.items() or [("-", {})]):
            first = (label, f"{workload.requests:g}") if row == 0 else ("", "")
            table.add_row(*first, proposer, *_acceptance(statistics))
    console.print(table)
    table = Table("cost of", "sums")
    for part, statistics in profile.cost.items():
        table.add_row(part, _totals(statistics))
    console.print(table)


@profile_app.command("diff")
def profile_diff(first: ProfileFile, second: ProfileFile) -> None:
    """Show where two profiles differ."""
    from rich.console import Console
    from rich.table import Table

    from autospec.profile import load_profile

    profiles = load_profile(first), load_profile(second)
    table = Table("", str(first), str(second))
    facts = zip(_facts(profiles[0]), _facts(profiles[1]), strict=True)
    rows = [(name, mine, theirs) for (name, mine), (_, theirs) in facts if mine != theirs]
    contents = [_contents(profile) for profile in profiles]
    for name in sorted({*contents[0], *contents[1]}):
        mine, theirs = contents[0].get(name, "-"), contents[1].get(name, "-")
        if mine != theirs:
            rows.append((name, mine, theirs))
    if not rows:
        typer.echo("no difference")
        return
    for row in rows:
        table.add_row(*row)
    Console(highlight=False).print(table)


@profile_app.command("merge")
def profile_merge(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="Profiles of the same identity.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Where the sum goes.")],
    half_life_days: Annotated[
        float | None, typer.Option(min=0.001, help="Fade older profiles to the newest one's time.")
    ] = None,
) -> None:
    """Add up profiles of the same identity."""
    from autospec.profile import load_profile, merge, save_profile

    merged = load_profile(files[0])
    for file in files[1:]:
        try:
            merged = merge(merged, load_profile(file), half_life_days)
        except ProfileMismatch as error:
            raise ProfileMismatch(f"{file}: {error} as in {files[0]}") from None
    save_profile(out, merged)
    typer.echo(f"{out}: {len(files)} profiles, {len(merged.workloads)} workloads")


def _facts(profile: Profile) -> list[tuple[str, str]]:
    identity = profile.identity
    updated = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(profile.updated))
    return [
        ("target", identity.target),
        ("proposers", ", ".join(identity.proposers)),
        ("engine", identity.engine),
        ("version", identity.version),
        ("device", identity.device),
        ("dtype", identity.dtype),
        ("acceptance_layout", profile.acceptance_layout),
        ("cost_layout", profile.cost_layout),
        ("updated", updated),
        ("provenance", "; ".join(profile.provenance) or "-"),
    ]


def _contents(profile: Profile) -> dict[str, str]:
    rows = {}
    for label, workload in profile.workloads.items():
        rows[f"{label}: requests"] = f"{workload.requests:g}"
        for proposer, statistics in workload.proposers.items():
            observed, accepted, _ = _acceptance(statistics)
            rows[f"{label}: {proposer}"] = f"{accepted} accepted of {observed}"
    for part, statistics in profile.cost.items():
        rows[f"cost: {part}"] = _totals(statistics)
    return rows


def _acceptance(statistics: Statistics) -> tuple[str, str, str]:
    """Draft tokens observed, the share of them that was accepted, and that share by position."""
    if "trials" not in statistics or "successes" not in statistics:
        return "-", "-", _totals(statistics)
    trials, successes = statistics["trials"], statistics["successes"]
    if not trials.any() or trials.shape != successes.shape:
        return "0", "-", "-"
    rows = zip(
        successes.reshape(len(trials), -1).sum(axis=1),
        trials.reshape(len(trials), -1).sum(axis=1),
        strict=True,
    )
    positions = " ".join(f"{hits / seen:.2f}" if seen else "-" for hits, seen in rows)
    accepted = f"{successes.sum() / trials.sum():.3f}"
    return f"{trials.sum():.0f}", accepted, positions.rstrip(" -")


def _totals(statistics: Statistics) -> str:
    totals = {name: float(array.sum()) for name, array in statistics.items()}
    return ", ".join(f"{name} {total:.6g}" for name, total in totals.items() if total) or "-"
