"""``autospec tune --engine vllm``: lookups inside vLLM, on this machine.

vLLM decodes the prompts once without drafts. The tuning half is then served at every load, plain,
under the policy, and with fixed numbers of drafts: from these steps the adapter learns the step
cost, which the search runs on with the recorded answers. The final is served by vLLM itself.

Plain means the same engine with the policy "off": scheduled synchronously, as lookups need it, and
not as vLLM may schedule where it never speculates.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from rich.console import Console

from autospec.adapters.vllm.arguments import DEFAULT_K
from autospec.adapters.vllm.options import AdapterOptions
from autospec.adapters.vllm.pilot import vllm_lookups
from autospec.bench.arms import encode_with
from autospec.config import Settings
from autospec.cost.step_cost import StepCost
from autospec.errors import EngineError, InputError, ModelError
from autospec.profile.learned import Profile, Statistics, merge
from autospec.prompts import Prompt, read_prompts
from autospec.records import EngineInfo, ProposerInfo
from autospec.replay.trace import TraceRequest
from autospec.tune.by_serving import tune_by_serving
from autospec.tune.final import PLAIN, UNTUNED, Verdict
from autospec.tune.meter import Meter
from autospec.tune.outcome import make_tuning
from autospec.tune.recorded import read_recorded, write_recorded
from autospec.tune.state import State
from autospec.tune.traced import Bed, interleaved
from autospec.tune.tuner import (
    Data,
    Setting,
    TuneOptions,
    begin,
    digest_of,
    split,
)
from autospec.tune.vllm_engine import Answers, Call, VllmEngine

_OFF = "off"
_FIXED_KS = (2, 8)
_TIMED_REQUESTS = 16
_TIMED_SHARE = 0.3  # of the budget


class Serving(Protocol):
    """The part of ``VllmEngine`` that tuning uses."""

    @property
    def info(self) -> EngineInfo: ...
    def steer(self, policy: str | Path, profile: Profile | None) -> None: ...
    def serve(self, calls: Sequence[Call], load: int, within: float = ...) -> Answers: ...
    def learned(self) -> Profile: ...


def tune_on_vllm(
    options: TuneOptions, policy: Settings, older: Profile | None, console: Console
) -> int:
    """Start vLLM and tune; returns the exit code.

    Raises InputError, ModelError or EngineError.
    """
    if options.draft is not None or options.heads:
        raise InputError("--engine vllm tunes the lookups; give no --draft and no --head")
    if options.target is None or options.prompts is None:
        raise InputError("--engine vllm needs --target and --prompts")
    prompts = read_prompts(options.prompts)
    calls = calls_of(prompts, tokenizer_of(options.target), options)
    most = max(len(call.prompt_token_ids) + call.max_tokens for call in calls.values())
    with tempfile.TemporaryDirectory(prefix="autospec-tune-") as folder:
        console.print("starting vLLM")
        engine = VllmEngine(
            options.target,
            Path(folder),
            dtype=options.dtype,
            seed=options.seed,
            most_requests=max(options.loads),
            most_tokens=most + 1,
        )
        try:
            return tune_served(options, policy, older, console, engine, calls, Path(folder))
        finally:
            engine.close()


def tune_served(
    options: TuneOptions,
    policy: Settings,
    older: Profile | None,
    console: Console,
    engine: Serving,
    calls: Mapping[str, Call],
    scratch: Path,
) -> int:
    """Measure, search and judge; write the profile; returns the exit code."""
    assert options.prompts is not None
    digest = digest_of([options.prompts])
    state, budget = begin(options, digest)

    def measure(meter: Meter) -> tuple[Data, Statistics]:
        return _measure(options, policy, engine, calls, digest, state, meter, scratch)

    def final_of(data: Data, base: Profile, arms: Mapping[str, Setting]) -> ServedFinal:
        held_out = [calls[request.id] for request in data.held_out]
        return ServedFinal(engine, held_out, options, _profiles(options, data, base, arms))

    return tune_by_serving(options, state, budget, older, console, measure, final_of)


def tokenizer_of(target: Path) -> Any:
    """The model's tokenizer. Raises ModelError."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(target))
    except (OSError, ValueError) as error:
        raise ModelError(f"{target}: no tokenizer, which prompts need: {error}") from None


def calls_of(prompts: Sequence[Prompt], tokenizer: Any, options: TuneOptions) -> dict[str, Call]:
    """Requests by prompt id that go on to their full length. Raises InputError."""
    assert options.prompts is not None
    return {
        prompt.id: Call(
            prompt.id,
            prompt.workload,
            encode_with(tokenizer, prompt, options.prompts),
            min(options.max_tokens, prompt.max_tokens or options.max_tokens),
            prompt.temperature,
            options.seed,
            ignore_eos=True,
        )
        for prompt in prompts
    }


def _measure(
    options: TuneOptions,
    policy: Settings,
    engine: Serving,
    calls: Mapping[str, Call],
    digest: str,
    state: State,
    meter: Meter,
    scratch: Path,
) -> tuple[Data, Statistics]:
    """The recorded requests and the step cost, or what an earlier run had of them."""
    traces = read_recorded(options.out, state)
    if traces is None:
        meter.show("decoding the prompts once")
        traces = record(engine, calls.values(), max(options.loads))
        write_recorded(options.out, state, traces)
    tuning, held_out = split(traces, options.seed)
    if state.cost is None:
        fresh = step_statistics(
            options, engine, [calls[each.id] for each in tuning], meter, scratch
        )
        state.cost = {key: array.tolist() for key, array in fresh.items()}
    step: dict[str, np.ndarray] = {key: np.array(value) for key, value in state.cost.items()}
    if step["reference"][3] <= 0:
        raise EngineError("vLLM served too few steps to learn their cost; give more prompts")
    untuned = vllm_lookups(DEFAULT_K, AdapterOptions().cache_tokens, beside_model=False)
    infos = tuple(ProposerInfo(name, "lookup", each.max_k) for name, each in untuned.items())
    model = StepCost(infos, engine.info)
    model.load(step)
    # A lookup's own time is part of the steps that the adapter timed: it is not counted again.
    bed = Bed(engine.info, policy, step_cost=model)
    assert options.prompts is not None
    return Data(tuning, held_out, bed, untuned, options.prompts.name, digest), step


def record(engine: Serving, calls: Iterable[Call], load: int) -> tuple[TraceRequest, ...]:
    """Every prompt's greedy answer, decoded plainly, to its own end."""
    greedy = [replace(call, temperature=0.0, ignore_eos=False) for call in calls]
    engine.steer(_OFF, None)
    answers = engine.serve(greedy, load).token_ids
    return tuple(
        TraceRequest(
            call.id,
            call.workload,
            np.array(call.prompt_token_ids, dtype=np.int32),
            answers[call.id],
            {},
        )
        for call in greedy
    )


def step_statistics(
    options: TuneOptions,
    engine: Serving,
    calls: Sequence[Call],
    meter: Meter,
    scratch: Path,
) -> Statistics:
    """What serving these requests at every load teaches of the step cost.

    Under the policy alone k might never vary: plain steps and fixed k are served as well.
    """
    policies: list[str | Path] = [_OFF]
    for k in _FIXED_KS:
        path = scratch / f"suffix-{k}.yaml"
        path.write_text(
            f"version: 1\npolicy:\n  name: static\n  proposer: suffix\n  k: {k}\n",
            encoding="utf-8",
        )
        policies.append(path)
    policies.append(options.policy)
    seconds = _TIMED_SHARE * options.budget / (len(options.loads) * len(policies))
    learned: Profile | None = None
    for load in options.loads:
        for policy in policies:
            meter.show(f"timing steps: load {load}")
            engine.steer(policy, None)
            count = max(load, min(len(calls), _TIMED_REQUESTS))
            engine.serve(_in_turn(calls, 0, count, f"{load}"), load, seconds)
            fresh = engine.learned()
            learned = fresh if learned is None else merge(learned, fresh)
    assert learned is not None
    return learned.cost["step"]


def _profiles(
    options: TuneOptions, data: Data, base: Profile, arms: Mapping[str, Setting]
) -> dict[str, Profile | None]:
    """Plain, the untuned settings and the finalists, the latter three equally warm."""
    profiles: dict[str, Profile | None] = {PLAIN: None}
    for name, setting in arms.items():
        verdict = Verdict(name, name != UNTUNED, {})
        tuning = make_tuning(options, data, setting, verdict, {}, data.bed.info.device)
        profiles[name] = replace(base, tuned=tuning)
    return profiles


@dataclass(slots=True)
class ServedFinal:
    """The final on held-out prompts, arms taking turns, each begun anew from its profile.

    ``learned`` is what each arm's serving taught, by its name.
    """

    engine: Serving
    held_out: Sequence[Call]
    options: TuneOptions
    profiles: Mapping[str, Profile | None]
    learned: dict[str, Profile] = field(default_factory=dict)
    _served: int = 0

    def run_round(
        self, seed: int, show: Callable[[str], None] = lambda line: None
    ) -> dict[str, list[float | None]]:
        """Goodput of every arm at every load, on the same requests."""
        goodputs: dict[str, list[float | None]] = {name: [] for name in self.profiles}
        for number, load in enumerate(self.options.loads):
            chosen = self._block(load, seed)
            names = list(self.profiles)
            first = (seed + number) % len(names)
            for name in (*names[first:], *names[:first]):
                show(f"final: load {load}, {name}")
                profile = self.profiles[name]
                self.engine.steer(_OFF if profile is None else self.options.policy, profile)
                goodputs[name].append(self.engine.serve(chosen, load).goodput)
                if profile is not None:
                    fresh = self.engine.learned()
                    known = self.learned.get(name)
                    self.learned[name] = fresh if known is None else merge(known, fresh)
        return goodputs

    def _block(self, load: int, seed: int) -> list[Call]:
        """The next prompts in turn, as many as keep the load up, two at the least."""
        count = max(2, load)
        chosen = _in_turn(self.held_out, self._served, count, f"{seed}.{load}")
        self._served += count
        return [replace(call, seed=seed) for call in chosen]


def _in_turn(calls: Sequence[Call], first: int, count: int, tag: str) -> list[Call]:
    """``count`` requests from the ``first`` on, workloads spread evenly, again from the start."""
    order = interleaved([call.workload for call in calls], 0)
    found = []
    for index in range(first, first + count):
        call = calls[order[index % len(order)]]
        found.append(replace(call, id=f"{tag}.{index}-{call.id}"))
    return found
