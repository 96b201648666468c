"""``autospec bench``: arms compared on the user's own model and prompts; the demo's engine room."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from prometheus_client import CollectorRegistry
from rich.console import Console
from transformers.utils import logging as transformers_logging

from autospec import __version__
from autospec.arms import (
    APPENDED,
    Arm,
    ArmInputs,
    ArmSpec,
    encode,
    engine_info,
    generation_request,
    parse_arms,
)
from autospec.config import Settings, load_settings
from autospec.engine.model import CausalModel
from autospec.engine.request import GenerationRequest
from autospec.errors import InputError, ProfileError
from autospec.journal import Journal
from autospec.json_file import check_writable, write_json
from autospec.live import open_view, say
from autospec.metrics import Metrics, MetricsServer
from autospec.phases import (
    ADAPTIVE,
    PLAIN,
    Block,
    BlockResult,
    Measurement,
    Phase,
    arm_order,
    plan_blocks,
    report,
    staggered_tokens,
)
from autospec.profile import load_profile
from autospec.progress import heartbeat
from autospec.prompts import Prompt, read_prompts, workload_names
from autospec.proposers.heads import head_bytes, head_kind, head_state_bytes
from autospec.report import check_report, write_report
from autospec.serving import Served
from autospec.summary import print_summary
from autospec.turns import take_turns

_NEVER = 1e12
_WARM_UP_PROMPT_TOKENS = 16
_WARM_UP_TOKENS = 12
_WARM_UP_ARM = ArmSpec("suffix:4", "suffix", 4)


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


@dataclass(frozen=True, slots=True)
class Comparison:
    """A measurement to be made: models, requests, arms, and where what is learned is kept.

    A machine too slow for ``budget_seconds`` skips later rounds of its phases, never the first.
    """

    title: str
    target: CausalModel
    draft: CausalModel | None
    prompts: tuple[Prompt, ...]
    prompts_path: Path
    phases: tuple[Phase, ...]
    specs: tuple[ArmSpec, ...]
    settings: Settings
    policy: str
    heads: tuple[Path, ...] = ()
    stop_at_eos: bool = False
    start_cold: bool = False
    budget_seconds: float | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """A measurement made. ``warm_requests`` is None for a cold start; paths are those written."""

    measurement: Measurement
    warm_requests: float | None
    profile: Path | None
    journal: Path | None
    interrupted: bool


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
        update["profile"] = settings.profile.model_copy(update={"path": profile})
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


def compare(comparison: Comparison, console: Console) -> Outcome:
    """Serve every block under every arm; save what the adaptive arm learned.

    An interrupt ends the measurement with the rounds that are complete.
    """
    blocks = plan_blocks(comparison.phases, comparison.prompts)
    token_ids = _encode_all(comparison, blocks)
    inputs = ArmInputs(
        target=comparison.target,
        draft=comparison.draft,
        slots=max(phase.load for phase in comparison.phases),
        capacity=_capacity(comparison, blocks, token_ids),
        seed=comparison.seed,
        heads=comparison.heads,
        appended=any(spec.proposer == APPENDED for spec in comparison.specs),
    )
    for folder in inputs.heads:
        state = head_state_bytes(folder, inputs.target, inputs.slots, inputs.capacity)
        say(
            console,
            f"head {folder}: keeps {state / 1e6:.2f} MB for {inputs.slots} requests of "
            f"{inputs.capacity} tokens",
        )
    names = tuple(spec.name for spec in comparison.specs)
    measurement = Measurement.empty(comparison.phases, names)
    settings = comparison.settings
    adaptive = ADAPTIVE in names
    registry = CollectorRegistry()
    server, journal, warm_requests = None, None, None
    interrupted = False
    saved: Path | None = None
    try:
        if adaptive and settings.metrics.port is not None:
            server = MetricsServer(settings.metrics.port, registry, settings.metrics.address)
            say(console, f"metrics at http://{settings.metrics.address}:{server.port}/metrics")
        if adaptive and settings.journal.path is not None:
            journal = Journal(settings.journal.path, settings.journal.max_bytes)
        arms = _make_arms(comparison, inputs, journal, Metrics(registry), console)
        if adaptive:
            warm_requests = _warm_requests(comparison, arms[ADAPTIVE], console)
        with heartbeat("warming up", lambda line: say(console, line)):
            _warm_up(comparison, inputs, token_ids)
        try:
            _serve_blocks(comparison, blocks, arms, token_ids, measurement, console)
        except KeyboardInterrupt:
            interrupted = True
        if adaptive:
            saved = _save(arms[ADAPTIVE], settings.profile.path, console)
    finally:
        if journal is not None:
            journal.close()
        if server is not None:
            server.close()
    return Outcome(
        measurement,
        warm_requests,
        saved,
        None if journal is None else journal.path,
        interrupted,
    )


def _make_arms(
    comparison: Comparison,
    inputs: ArmInputs,
    journal: Journal | None,
    metrics: Metrics,
    console: Console,
) -> dict[str, Arm]:
    """Every arm by name; only the adaptive one is journaled and counted in the metrics."""
    arms = {}
    with heartbeat("preparing (compiles once)", lambda line: say(console, line)):
        for spec in comparison.specs:
            if spec.name == ADAPTIVE:
                settings = _adaptive_settings(comparison)
                arms[ADAPTIVE] = Arm(spec, inputs, settings, journal=journal, metrics=metrics)
            else:
                arms[spec.name] = Arm(spec, inputs, comparison.settings)
    return arms


def _serve_blocks(
    comparison: Comparison,
    blocks: Sequence[Block],
    arms: Mapping[str, Arm],
    token_ids: Mapping[str, list[int]],
    measurement: Measurement,
    console: Console,
) -> None:
    """The timed part: every block under all the arms, which take turns while they serve it."""
    budget = comparison.budget_seconds
    began = time.monotonic()
    with open_view(console, comparison.title, measurement, len(blocks)) as view:
        for number, block in enumerate(blocks):
            share = number / len(blocks)
            late = budget is not None and time.monotonic() - began > budget * share
            if block.round > 0 and late:
                continue
            view.begin(block)
            servings = {
                name: arms[name].begin(
                    _requests(comparison, block, number, token_ids),
                    comparison.phases[block.phase].load,
                )
                for name in arm_order(measurement.arms, number)
            }
            take_turns(
                {
                    name: partial(serving.take_turn, partial(view.step, name))
                    for name, serving in servings.items()
                }
            )
            served = {name: serving.end() for name, serving in servings.items()}
            view.end(block, {name: each.result for name, each in served.items()})
            measurement.add_round(block.phase, _compared(served))


def _save(arm: Arm, path: Path | None, console: Console) -> Path | None:
    """Add what the arm learned to the profile; a profile of something else is left alone."""
    if arm.controller is None or path is None:
        return None
    try:
        return arm.controller.save(path)
    except ProfileError as error:
        say(console, f"profile not saved: {error}")
        return None


def _adaptive_settings(comparison: Comparison) -> Settings:
    """The policy's settings; what it learns is saved at the end, never beside a timed step."""
    profile = comparison.settings.profile
    path = None if comparison.start_cold else profile.path
    update = {"path": path, "save_every_seconds": _NEVER}
    return comparison.settings.model_copy(update={"profile": profile.model_copy(update=update)})


def _warm_requests(comparison: Comparison, arm: Arm, console: Console) -> float | None:
    """Say what the adaptive arm starts from; the requests it was learned on, None for cold."""
    path = comparison.settings.profile.path
    if path is None:
        say(console, "cold start: no profile was named")
        return None
    if comparison.start_cold:
        say(console, f"cold start as asked; what is learned is added to {path}")
        return None
    if arm.controller is None or not arm.controller.is_warm:
        say(console, f"cold start: no profile that fits in {path}")
        return None
    profile = load_profile(path)
    requests = sum(each.requests for each in profile.workloads.values())
    say(
        console,
        f"warm start from {path}: learned on {requests:.0f} requests of "
        f"{', '.join(sorted(profile.workloads))}",
    )
    return requests


def _encode_all(
    comparison: Comparison, blocks: Sequence[Block]
) -> dict[str, list[int]]:  # by prompt id
    """Token ids of every prompt in use."""
    prompts = {prompt.id: prompt for block in blocks for prompt in block.prompts}
    return {
        prompt.id: encode(prompt, comparison.target, comparison.prompts_path)
        for prompt in prompts.values()
    }


def _capacity(
    comparison: Comparison, blocks: Sequence[Block], token_ids: Mapping[str, list[int]]
) -> int:
    """Tokens of the longest request, prompt included; raises InputError where it does not fit."""
    context = comparison.target.context_tokens
    if comparison.draft is not None:
        context = min(context, comparison.draft.context_tokens)
    longest = 0
    for block in blocks:
        most = comparison.phases[block.phase].max_tokens
        for prompt in block.prompts:
            length = len(token_ids[prompt.id])
            wanted = length + min(most, prompt.max_tokens or most)
            if wanted > context:
                raise InputError(
                    f"{comparison.prompts_path}: prompt {prompt.id!r} has {length} tokens and is "
                    f"to be continued by {wanted - length}; the model's context is {context}"
                )
            longest = max(longest, wanted)
    return max(longest, _WARM_UP_PROMPT_TOKENS + _WARM_UP_TOKENS) + 1


def _requests(
    comparison: Comparison, block: Block, number: int, token_ids: Mapping[str, list[int]]
) -> list[GenerationRequest]:
    phase = comparison.phases[block.phase]
    return [
        generation_request(
            prompt,
            token_ids[prompt.id],
            f"{number}.{index}-{prompt.id}",
            staggered_tokens(phase.max_tokens, index, phase),
            stop_at_eos=comparison.stop_at_eos,
            seed=comparison.seed + 1000 * number + index,
        )
        for index, prompt in enumerate(block.prompts)
    ]


def _warm_up(comparison: Comparison, inputs: ArmInputs, token_ids: Mapping[str, list[int]]) -> None:
    """Let the runtime allocate and choose its kernels; no arm learns anything from it."""
    arm = Arm(_WARM_UP_ARM, inputs, comparison.settings)
    starts = [ids[:_WARM_UP_PROMPT_TOKENS] for ids in token_ids.values()]
    for load in sorted({phase.load for phase in comparison.phases}):
        requests = [
            GenerationRequest(
                prompt_token_ids=starts[index % len(starts)],
                max_tokens=_WARM_UP_TOKENS,
                id=f"warm-up-{load}-{index}",
                ignore_eos=True,
            )
            for index in range(load)
        ]
        arm.serve(requests, load)


def _compared(served: Mapping[str, Served]) -> dict[str, BlockResult]:
    """Results with the number of requests whose tokens are those of plain decoding."""
    plain = served.get(PLAIN)
    if plain is None:
        return {name: each.result for name, each in served.items()}
    return {
        name: replace(
            each.result,
            equal_outputs=sum(
                mine == theirs for mine, theirs in zip(each.outputs, plain.outputs, strict=True)
            ),
        )
        for name, each in served.items()
    }


# The JSON form ----------------------------------------------------------------------------------


def result_json(comparison: Comparison, outcome: Outcome) -> dict[str, Any]:
    """Everything measured, with what it was measured on."""
    info = engine_info(comparison.target)
    return {
        **report(outcome.measurement),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(),
        "settings": {
            "target": info.target,
            "draft": None if comparison.draft is None else comparison.draft.name,
            "heads": [folder.name for folder in comparison.heads],
            "dtype": info.dtype,
            "device": info.device,
            "prompts": comparison.prompts_path.name,
            "policy": comparison.policy,
            "arms": [spec.name for spec in comparison.specs],
            "loads": list(dict.fromkeys(phase.load for phase in comparison.phases)),
            "stop_at_eos": comparison.stop_at_eos,
            "seed": comparison.seed,
            "warm_start_requests": outcome.warm_requests,
            "interrupted": outcome.interrupted,
        },
        "files": {
            "profile": None if outcome.profile is None else str(outcome.profile),
            "journal": None if outcome.journal is None else str(outcome.journal),
        },
    }


def machine() -> dict[str, Any]:
    """What a figure depends on: processor, cores in use, threads, memory, accelerator."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "torch_threads": torch.get_num_threads(),
        "memory_gib": round(
            os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30), 1
        ),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "system": platform.platform(terse=True),
    }


def versions() -> dict[str, str]:
    """Versions of what the figures depend on."""
    found = {"autospec": __version__, "python": platform.python_version()}
    for name in ("torch", "transformers", "numpy", "numba"):
        found[name] = metadata.version(name)
    return found


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
