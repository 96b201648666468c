"""Tuning on the embedded engine: what is recorded and timed on it, and the final itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from autospec.bench.arms import Arm, ArmInputs, ArmSpec, encode, engine_info, generation_request
from autospec.bench.phases import ADAPTIVE, PLAIN, arm_order, tokens_per_second
from autospec.bench.turns import take_turns
from autospec.config import Settings
from autospec.engine.drafting import DraftTask, ModelDrafts, ModelProposer
from autospec.engine.model import CausalModel
from autospec.engine.relay import Relay
from autospec.engine.request import GenerationRequest
from autospec.errors import InputError
from autospec.profile.learned import Profile, merge
from autospec.profile.tuned import ProposerSettings
from autospec.prompts import Prompt
from autospec.proposers.draft_model import DraftModelProposer
from autospec.proposers.heads import load_head
from autospec.records import EngineInfo, Float32Array
from autospec.replay.recording import record
from autospec.replay.trace import TraceRequest
from autospec.tune.traced import interleaved

_DRAFT_K = 8


@dataclass(frozen=True, slots=True)
class Models:
    """The target, and what may draft for it. ``heads`` are folders."""

    target: CausalModel
    draft: CausalModel | None
    heads: tuple[Path, ...]

    @property
    def info(self) -> EngineInfo:
        """The engine, as profiles know it."""
        return engine_info(self.target)

    def proposers(self) -> tuple[ModelProposer, ...]:
        """Every model that can draft, with its own most k."""
        found: list[ModelProposer] = []
        if self.draft is not None:
            found.append(DraftModelProposer(self.draft, max_k=_DRAFT_K))
        found += [load_head(folder, self.target) for folder in self.heads]
        return tuple(found)


class ConfidenceTap(Relay):
    """Passes everything on to a model, and keeps how sure it was of every draft.

    A request is known by its prompt, so prompts must differ.
    """

    def __init__(self, inner: ModelProposer) -> None:
        super().__init__(inner)
        self._prompts: dict[int, bytes] = {}
        self._lengths: dict[int, int] = {}
        self._sure: dict[bytes, dict[int, Float32Array]] = {}

    def reset(self, slot: int) -> None:
        """Passed on; the slot's next draft is a new request's first."""
        super().reset(slot)
        self._prompts.pop(slot, None)

    def draft(self, task: DraftTask) -> ModelDrafts:
        """Passed on, and its confidence kept by request and position."""
        drafts = super().draft(task)
        for row, slot in enumerate(task.slots.tolist()):
            known = int(task.history.lengths[slot])
            if slot not in self._prompts:  # one output token is known when first anybody drafts
                self._lengths[slot] = known - 1
                self._prompts[slot] = task.history.tokens[slot, : known - 1].tobytes()
            kept = self._sure.setdefault(self._prompts[slot], {})
            count = int(drafts.lengths[row])
            kept[known - self._lengths[slot]] = drafts.confidence[row, :count].copy()
        return drafts

    def confidence(self, request: TraceRequest) -> Float32Array:
        """[output, k] of a recorded request; 0 where nothing was drafted."""
        rows: Float32Array = np.zeros(
            (len(request.output_token_ids), self.info.max_k), dtype=np.float32
        )
        known = self._sure.get(request.prompt_token_ids.astype(np.int32).tobytes(), {})
        for position, values in known.items():
            if position < len(rows):
                rows[position, : len(values)] = values
        return rows


def record_all(
    models: Models, requests: Sequence[GenerationRequest], concurrency: int
) -> tuple[tuple[TraceRequest, ...], dict[str, dict[str, Float32Array]]]:
    """Traces with every model's accepted lengths, one pass each, and the models' confidences."""
    proposers = models.proposers()
    if not proposers:
        return record(models.target, requests, None, concurrency=concurrency), {}
    traces: tuple[TraceRequest, ...] = ()
    confidence: dict[str, dict[str, Float32Array]] = {}
    accepted: dict[str, dict[str, NDArray[np.int16]]] = {}
    for proposer in proposers:
        tap = ConfidenceTap(proposer)
        traces = record(models.target, requests, tap, concurrency=concurrency)
        name = proposer.info.name
        confidence[name] = {each.id: tap.confidence(each) for each in traces}
        for each in traces:
            accepted.setdefault(each.id, {})[name] = each.accepted[name]
    return tuple(
        TraceRequest(
            each.id,
            each.workload,
            each.prompt_token_ids,
            each.output_token_ids,
            accepted[each.id],
            each.temperature,
        )
        for each in traces
    ), confidence


def requests_of(
    prompts: Sequence[Prompt], models: Models, place: Path, max_tokens: int
) -> list[GenerationRequest]:
    """Greedy requests that end by themselves. Raises InputError for one that does not fit."""
    found = []
    for prompt in prompts:
        token_ids = encode(prompt, models.target, place)
        request = generation_request(
            prompt, token_ids, prompt.id, max_tokens, stop_at_eos=True, seed=0
        )
        if len(token_ids) + request.max_tokens > models.target.context_tokens:
            raise InputError(
                f"{place}: prompt {prompt.id!r} has {len(token_ids)} tokens and is to be continued "
                f"by {request.max_tokens}; the model's context is {models.target.context_tokens}"
            )
        found.append(request)
    return found


class Course:
    """Arms over the same target, to be run against each other on held-out prompts."""

    def __init__(
        self,
        models: Models,
        prompts: Sequence[Prompt],
        place: Path,
        loads: Sequence[int],
        max_tokens: int,
        policy: Settings,
        profiles: Mapping[str, Profile | None],
    ) -> None:
        order = interleaved([each.workload for each in prompts], 0)
        self._prompts = tuple(prompts[position] for position in order)
        self._tokens = {each.id: encode(each, models.target, place) for each in prompts}
        self._loads = tuple(loads)
        self._max_tokens = max_tokens
        self._capacity = max(len(each) for each in self._tokens.values()) + max_tokens + 1
        self._models = models
        self._policy = policy.without_files()
        self._profiles = dict(profiles)
        self._served = 0
        self.learned: dict[str, Profile] = {}
        """What each arm's serving taught, by its name."""

    def run_round(
        self, seed: int, show: Callable[[str], None] = lambda line: None
    ) -> dict[str, list[float | None]]:
        """Goodput of every arm at every load, on the same requests, arms taking turns.

        Arms are made anew every time: a lookup that remembers answers must not meet them again.
        """
        goodputs: dict[str, list[float | None]] = {name: [] for name in self._profiles}
        for number, load in enumerate(self._loads):
            show(f"final: load {load}")
            arms = {
                name: self._arm(name, load)
                for name in arm_order(tuple(self._profiles), seed + number)
            }
            requests = self._requests(self._block(load), f"{seed}.{load}", seed)
            servings = {name: arm.begin(requests, load) for name, arm in arms.items()}
            take_turns({name: serving.take_turn for name, serving in servings.items()})
            for name, serving in servings.items():
                goodputs[name].append(tokens_per_second(serving.end().result))
                self._learn(name, arms[name])
        return goodputs

    def _requests(self, prompts: Sequence[Prompt], name: str, seed: int) -> list[GenerationRequest]:
        return [
            generation_request(
                prompt,
                self._tokens[prompt.id],
                f"{name}.{index}-{prompt.id}",
                self._max_tokens,
                stop_at_eos=False,
                seed=seed,
            )
            for index, prompt in enumerate(prompts)
        ]

    def _arm(self, name: str, load: int) -> Arm:
        profile = self._profiles[name]
        inputs = ArmInputs(
            self._models.target, self._models.draft, load, self._capacity, 0, self._models.heads
        )
        spec = ArmSpec(PLAIN if profile is None else ADAPTIVE)
        return Arm(spec, inputs, self._policy, profile=profile)

    def _learn(self, name: str, arm: Arm) -> None:
        if arm.controller is None:
            return
        fresh = arm.controller.learned.take_fresh(
            arm.controller.workloads.labels, "tuned: prompts served", time.time()
        )
        known = self.learned.get(name)
        self.learned[name] = fresh if known is None else merge(known, fresh)

    def _block(self, load: int) -> list[Prompt]:
        """The next prompts in turn, as many as keep the load up, two at the least."""
        count = max(2, load)
        chosen = [
            self._prompts[(self._served + index) % len(self._prompts)] for index in range(count)
        ]
        self._served += count
        return chosen


def model_settings(proposers: Sequence[ModelProposer]) -> dict[str, ProposerSettings]:
    """The untuned settings of models by name."""
    return {
        each.info.name: ProposerSettings(
            kind=each.info.kind,
            max_k=each.info.max_k,
            min_confidence=0.0 if each.info.name == "draft_model" else None,
        )
        for each in proposers
    }
