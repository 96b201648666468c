"""A comparison of arms on a model and prompts: what is measured, and the measurement."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry
from rich.console import Console

from autospec.bench.arms import (
    APPENDED,
    Arm,
    ArmInputs,
    ArmSpec,
    encode,
    engine_info,
    generation_request,
)
from autospec.bench.live import open_view, say
from autospec.bench.machine import machine, versions
from autospec.bench.phases import (
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
from autospec.bench.serving import Served
from autospec.bench.turns import take_turns
from autospec.config import Settings
from autospec.engine.model import CausalModel
from autospec.engine.request import GenerationRequest
from autospec.errors import InputError, ProfileError
from autospec.journal.writer import Journal
from autospec.metrics import Metrics, MetricsServer
from autospec.profile.file import load_profile
from autospec.progress import heartbeat
from autospec.prompts import Prompt
from autospec.proposers.heads import head_state_bytes

_NEVER = 1e12
_WARM_UP_PROMPT_TOKENS = 16
_WARM_UP_TOKENS = 12
_WARM_UP_ARM = ArmSpec("suffix:4", "suffix", 4)


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
        return arm.controller.save(arm.controller.settings.profile.path or path)
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
    path = arm.controller.settings.profile.path or path
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
