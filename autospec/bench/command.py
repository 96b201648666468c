"""``autospec bench``: arms compared on the user's own model and prompts; the demo's engine room."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from transformers.utils import logging as transformers_logging

from autospec.bench.arms import parse_arms
from autospec.bench.comparison import Comparison, compare, result_json
from autospec.bench.live import say
from autospec.bench.phases import Phase
from autospec.bench.summary import print_summary
from autospec.config import Settings, load_settings
from autospec.engine.model import CausalModel
from autospec.errors import InputError
from autospec.json_file import check_writable, write_json
from autospec.progress import heartbeat
from autospec.prompts import Prompt, read_prompts, workload_names
from autospec.proposers.heads import head_bytes, head_kind
from autospec.report import check_report, write_report


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What ``autospec bench`` was asked for. ``requests`` are per block, None for the load itself;
    ``workloads`` empty means all; ``mix`` serves them together instead of one after the other."""

    target: Path
    prompts: Path
    draft: Path | None = None
    heads: tuple[Path, ...] = ()
    policy: str = "default"
    loads: tuple[int, ...] = (1, 4, 16)
    arms: str = "plain,ngram:4,suffix:8,adaptive"
    json_path: Path | None = None
    report_path: Path | None = None
    max_tokens: int = 128
    requests: int | None = None
    rounds: int = 3
    workloads: tuple[str, ...] = ()
    mix: bool = False
    stop_at_eos: bool = False
    profile: Path | None = None
    journal: Path | None = None
    metrics_port: int | None = None
    dtype: str = "auto"
    device: str = "cpu"
    seed: int = 0


def parse_loads(text: str) -> tuple[int, ...]:
    """Running requests of a comma separated list; raises InputError."""
    loads = []
    for part in (part.strip() for part in text.split(",")):
        if not (part.isascii() and part.isdigit() and 1 <= int(part) <= 1024):
            raise InputError(f"--loads: {part!r} is not a number of requests from 1 to 1024")
        loads.append(int(part))
    return tuple(loads)


def bench_phases(options: BenchOptions, prompts: Sequence[Prompt]) -> tuple[Phase, ...]:
    """Every load by every workload, or by all of them at once."""
    names = workload_names(prompts)
    for name in options.workloads:
        if name not in names:
            raise InputError(
                f"{options.prompts}: no prompts of workload {name!r}; there are {', '.join(names)}"
            )
    chosen = options.workloads or names
    groups = [chosen] if options.mix else [(name,) for name in chosen]
    return tuple(
        Phase(load, group, options.requests or load, options.max_tokens, options.rounds)
        for load in options.loads
        for group in groups
    )


def run_bench(options: BenchOptions, console: Console) -> int:
    """Measure, show, and write the JSON; returns the exit code.

    Raises InputError, ConfigError and ModelError for what cannot be run, before anything is timed.
    """
    specs = parse_arms(
        options.arms, has_draft=options.draft is not None, head_kinds=checked_heads(options.heads)
    )
    prompts = read_prompts(options.prompts)
    phases = bench_phases(options, prompts)
    settings = kept_settings(
        load_settings(options.policy), options.profile, options.journal, options.metrics_port
    )
    check_writable(options.json_path)
    if options.report_path is not None:
        check_report(options.report_path)
    target = load_model(options.target, options.dtype, options.device, console)
    draft = None
    if options.draft is not None:
        draft = load_model(options.draft, options.dtype, options.device, console)
    tell_heads(options.heads, console)
    comparison = Comparison(
        title=f"AutoSpec bench: {target.name}",
        target=target,
        draft=draft,
        prompts=prompts,
        prompts_path=options.prompts,
        phases=phases,
        specs=specs,
        settings=settings,
        policy=options.policy,
        heads=options.heads,
        stop_at_eos=options.stop_at_eos,
        seed=options.seed,
    )
    return run_comparison(comparison, console, options.json_path, options.report_path)


def run_comparison(
    comparison: Comparison,
    console: Console,
    json_path: Path | None,
    report_path: Path | None = None,
) -> int:
    """Measure, show tables and paths, write JSON and report; returns the exit code."""
    outcome = compare(comparison, console)
    if not outcome.measurement.results[comparison.specs[0].name][0]:
        say(console, "interrupted before the first round was complete; nothing to show")
        return 1
    print_summary(console, outcome.measurement)
    if outcome.profile is not None:
        say(console, f"profile saved in {outcome.profile} (the next run starts from it)")
    if outcome.journal is not None:
        say(console, f"journal saved in {outcome.journal}")
    figures = result_json(comparison, outcome)
    if json_path is not None:
        write_json(json_path, figures)
        say(console, f"figures saved in {json_path}")
    if report_path is not None:
        kept = [path for path in (outcome.journal, outcome.profile) if path is not None]
        write_report([figures, *kept], report_path)
        say(console, f"report saved in {report_path}")
    if outcome.interrupted:
        say(console, "interrupted: the figures above are those of the finished rounds")
    return 1 if outcome.interrupted else 0


def kept_settings(
    settings: Settings, profile: Path | None, journal: Path | None, metrics_port: int | None
) -> Settings:
    """The policy's settings with the command line's paths and port in place of its own."""
    update: dict[str, object] = {}
    if profile is not None:
        settings = settings.with_profile(profile)
    if journal is not None:
        update["journal"] = settings.journal.model_copy(update={"path": journal})
    if metrics_port is not None:
        update["metrics"] = settings.metrics.model_copy(update={"port": metrics_port})
    return settings.model_copy(update=update)


def checked_heads(folders: Sequence[Path]) -> tuple[str, ...]:
    """Kinds of the heads in ``folders``. Raises ModelError, and InputError where two are alike."""
    kinds = tuple(head_kind(folder) for folder in folders)
    for number, kind in enumerate(kinds):
        if kind in kinds[:number]:
            raise InputError(
                f"--head: {folders[kinds.index(kind)]} and {folders[number]} are both {kind}; "
                "give one of a kind"
            )
    return kinds


def tell_heads(folders: Sequence[Path], console: Console) -> None:
    """Say how much memory the heads' weights take."""
    for folder in folders:
        say(console, f"head {folder}: {head_kind(folder)}, {head_bytes(folder) / 1e6:.1f} MB")


def load_model(folder: Path, dtype: str, device: str, console: Console) -> CausalModel:
    """Load a model folder, saying so. Raises ModelError."""
    transformers_logging.disable_progress_bar()
    with heartbeat(f"loading {folder}", lambda line: say(console, line)):
        return CausalModel.load(folder, dtype=dtype, device=device)
