"""``autospec tune --engine embedded``: a model folder, prompts, this machine.

The step-cost surface is timed, the prompts are decoded once per model that drafts, the search runs
on these records with the measured step times, and the final on the engine itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from rich.console import Console

from autospec.bench.command import load_model
from autospec.config import Settings
from autospec.cost.step_cost import StepCost
from autospec.engine.request import GenerationRequest
from autospec.profile.learned import Profile, Statistics
from autospec.profile.tuned import ProposerSettings
from autospec.prompts import Prompt, read_prompts
from autospec.proposers.settings import untuned_lookups
from autospec.records import Float32Array, ProposerInfo
from autospec.replay.trace import TraceRequest
from autospec.tune.by_serving import tune_by_serving
from autospec.tune.embedded import Course, Models, model_settings, record_all, requests_of
from autospec.tune.final import PLAIN, UNTUNED, Verdict
from autospec.tune.meter import Meter
from autospec.tune.outcome import make_tuning
from autospec.tune.rates import measure_rates
from autospec.tune.recorded import read_recorded, write_recorded
from autospec.tune.state import State
from autospec.tune.surface import design, fit, time_design
from autospec.tune.traced import Bed
from autospec.tune.tuner import (
    Data,
    Setting,
    TuneOptions,
    begin,
    digest_of,
    split,
)

_CONTEXTS = (96, 384)
_REPLICATES = 5
_RECORD_CONCURRENCY = 8


def tune_on_engine(
    options: TuneOptions, policy: Settings, older: Profile | None, console: Console
) -> int:
    """Measure, search and judge; write the profile; returns the exit code."""
    assert options.target is not None
    assert options.prompts is not None
    prompts = read_prompts(options.prompts)
    digest = digest_of([options.prompts])
    state, budget = begin(options, digest)
    with torch.inference_mode():
        target = load_model(options.target, options.dtype, options.device, console)
        draft = None
        if options.draft is not None:
            draft = load_model(options.draft, options.dtype, options.device, console)
        models = Models(target, draft, options.heads)
        requests = requests_of(prompts, models, options.prompts, options.max_tokens)

        def measure(meter: Meter) -> tuple[Data, Statistics]:
            return _measure(options, policy, models, requests, digest, state, meter)

        def final_of(data: Data, base: Profile, arms: Mapping[str, Setting]) -> Course:
            held_out = {request.id for request in data.held_out}
            return _course(
                options, data, policy, models, base, arms,
                [prompt for prompt in prompts if prompt.id in held_out],
            )  # fmt: skip

        return tune_by_serving(options, state, budget, older, console, measure, final_of)


def _measure(
    options: TuneOptions,
    policy: Settings,
    models: Models,
    requests: Sequence[GenerationRequest],
    digest: str,
    state: State,
    meter: Meter,
) -> tuple[Data, Statistics]:
    """The step-cost surface and the recorded requests, or what an earlier run had of them."""
    meter.show("timing the step-cost surface")
    proposers = models.proposers()
    lookups = untuned_lookups(beside_model=bool(proposers))
    infos = (
        *(ProposerInfo(name, "lookup", each.max_k) for name, each in lookups.items()),
        *(each.info for each in proposers),
    )
    if state.cost is None:
        contexts = (_CONTEXTS[0], min(_CONTEXTS[1], models.target.context_tokens // 2))
        points = design(options.loads, contexts, [each.info for each in proposers])
        timings = time_design(
            models.target, proposers, points, replicates=_REPLICATES, seed=options.seed
        )
        state.surface = [each.as_json() for each in timings]
        fresh = fit(timings, infos, models.info).take_fresh()
        state.cost = {key: array.tolist() for key, array in fresh.items()}
    step: dict[str, np.ndarray] = {key: np.array(value) for key, value in state.cost.items()}
    model = StepCost(infos, models.info)
    model.load(step)
    meter.show("decoding the prompts once")
    traces, confidence = _recorded(options, models, requests, state)
    settings: dict[str, ProposerSettings] = {**lookups, **model_settings(proposers)}
    if not state.lookup_seconds:
        _, state.lookup_seconds = measure_rates(traces, lookups)
    tuning, held_out = split(traces, options.seed)
    bed = Bed(
        models.info,
        policy,
        step_cost=model,
        lookup_seconds=state.lookup_seconds,
        confidence=confidence or None,
    )
    assert options.prompts is not None
    return Data(tuning, held_out, bed, settings, options.prompts.name, digest), step


def _recorded(
    options: TuneOptions, models: Models, requests: Sequence[GenerationRequest], state: State
) -> tuple[tuple[TraceRequest, ...], Mapping[str, Mapping[str, Float32Array]]]:
    """This run's earlier traces where no model drafts; else new ones, with models' confidences."""
    alone = models.draft is None and not models.heads
    earlier = read_recorded(options.out, state) if alone else None
    if earlier is not None:
        return earlier, {}
    traces, confidence = record_all(models, requests, _RECORD_CONCURRENCY)
    if alone:
        write_recorded(options.out, state, traces)
    return traces, confidence


def _course(
    options: TuneOptions,
    data: Data,
    policy: Settings,
    models: Models,
    base: Profile,
    arms: Mapping[str, Setting],
    prompts: Sequence[Prompt],
) -> Course:
    """Plain, the untuned settings and the finalists, the latter three equally warm."""
    profiles: dict[str, Profile | None] = {PLAIN: None}
    for name, setting in arms.items():
        tuning = make_tuning(
            options, data, setting, Verdict(name, name != UNTUNED, {}), {}, data.bed.info.device
        )
        profiles[name] = replace(base, tuned=None if name == UNTUNED else tuning)
    assert options.prompts is not None
    return Course(
        models, prompts, options.prompts, options.loads, options.max_tokens, policy, profiles
    )
