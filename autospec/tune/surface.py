"""The step-cost surface: a designed set of steps on the embedded engine, timed as it serves.

Loads are octaves up to the largest asked for, each with every k that stays affordable at a short
context, and with few at a long one. Every point is repeated, in an order of its own, so that a slow
moment of the machine does not meet one point alone; a point's times are clipped to its median and
spread before the cost model learns from them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autospec.cost.step_cost import StepCost, StepLoad
from autospec.engine.decoder import Decoder
from autospec.engine.drafting import ModelProposer
from autospec.engine.model import CausalModel
from autospec.engine.request import GenerationRequest
from autospec.proposers.base import Drafts, History, LookupProposer
from autospec.records import (
    NO_PROPOSER,
    BatchState,
    EngineInfo,
    Float32Array,
    Int16Array,
    Int32Array,
    Plan,
    ProposerInfo,
    Request,
    StepResult,
)

_KS = (0, 1, 2, 4, 8, 16)
_FEW_KS = (0, 4)
_MOST_TOKENS = 320  # of one step of the design
_WARM_STEPS = 2
_CLIP = 3.0  # median absolute deviations


@dataclass(frozen=True, slots=True)
class DesignPoint:
    """``requests`` with ``context_tokens`` each at first; ``proposer`` drafts ``k`` for everybody.

    ``proposer`` None is a lookup's draft, which costs nothing to make.
    """

    requests: int
    context_tokens: int
    proposer: str | None
    k: int


@dataclass(frozen=True, slots=True)
class Timing:
    """One point's replicates: seconds of steps, and of the model's part in them."""

    point: DesignPoint
    seconds: tuple[float, ...]
    draft_seconds: tuple[float, ...]
    context_tokens: tuple[int, ...]  # of the whole batch, step by step

    @property
    def median(self) -> float:
        """Of the steps' seconds."""
        return median(self.seconds)

    @property
    def spread(self) -> float:
        """Median absolute deviation of the steps' seconds."""
        return median([abs(each - self.median) for each in self.seconds])

    def clipped(self) -> list[float]:
        """Seconds, outliers moved to the edge of what is usual for the point."""
        low, high = self.median - _CLIP * self.spread, self.median + _CLIP * self.spread
        return [min(max(each, low), high) for each in self.seconds]

    def as_json(self) -> dict[str, Any]:
        """For the state and the figures."""
        return {
            "requests": self.point.requests,
            "context_tokens": self.point.context_tokens,
            "proposer": self.point.proposer,
            "k": self.point.k,
            "median_seconds": round(self.median, 6),
            "spread_seconds": round(self.spread, 6),
            "replicates": len(self.seconds),
        }


def design(
    loads: Sequence[int], contexts: tuple[int, int], models: Sequence[ProposerInfo]
) -> tuple[DesignPoint, ...]:
    """The points, by load and context."""
    octaves = {1 << power for power in range(max(loads).bit_length()) if 1 << power <= max(loads)}
    points = []
    for requests in sorted({*loads, *octaves}):
        for context, ks in zip(contexts, (_KS, _FEW_KS), strict=True):
            for k in ks:
                if requests * (1 + k) <= max(_MOST_TOKENS, 2 * requests):
                    points.append(DesignPoint(requests, context, None, k))
            for info in models:
                for k in sorted({1, max(1, info.max_k // 2), info.max_k}):
                    if requests * (1 + k) <= _MOST_TOKENS and context == contexts[0]:
                        points.append(DesignPoint(requests, context, info.name, k))
    return tuple(points)


class _Repeat:
    """A lookup that always has a draft: the last token, over and over."""

    def __init__(self, max_k: int) -> None:
        self.info = ProposerInfo("repeat", "lookup", max_k)

    def reset(self, slot: int) -> None:
        """Nothing is kept."""

    def propose(self, history: History, slots: Int32Array, out: Drafts) -> None:
        """Fill every draft."""
        out.tokens[:] = history.tokens[slots, history.lengths[slots] - 1][:, None]
        out.lengths[:] = out.tokens.shape[1]
        out.confidence[:] = 0.5

    def retire(self, history: History, slot: int) -> None:
        """Nothing is kept."""

    def memory_bytes(self) -> int:
        """None."""
        return 0


class _Metronome:
    """Plans the points in their order, and notes what each step took."""

    def __init__(self, infos: Sequence[ProposerInfo], order: Sequence[DesignPoint]) -> None:
        self._infos = tuple(infos)
        self._order = list(reversed(order))
        self._now: DesignPoint | None = None
        self._context = 0
        self._handles = 0
        self.notes: list[tuple[DesignPoint, float, float, int]] = []

    @property
    def is_done(self) -> bool:
        """Whether every point had its step."""
        return not self._order

    @property
    def k_max(self) -> int:
        """Of all proposers."""
        return max(info.max_k for info in self._infos)

    def start(self, request: Request) -> int:
        """Handles count up."""
        self._handles += 1
        return self._handles

    def wants_offers(self) -> NDArray[np.bool_]:
        """The repeater always."""
        return np.array([info.kind == "lookup" for info in self._infos])

    def plan(self, state: BatchState) -> Plan:
        """The next point; plain while prompts are still read."""
        n = len(state.handles)
        self._now = None
        self._context = int(state.context_tokens.sum())
        k, proposer = np.zeros((2, n), dtype=np.int16)
        proposer[:] = NO_PROPOSER
        if state.prefill_tokens == 0 and self._order and n == self._order[-1].requests:
            self._now = point = self._order.pop()
            names = [info.name for info in self._infos]
            if point.k > 0:
                k[:] = point.k
                proposer[:] = names.index(point.proposer or "repeat")
        return Plan(0, state.handles, proposer, k, k, "probe")

    def trim(self, plan: Plan, drafted: Int16Array, confidence: Float32Array) -> Plan:
        """All that was drafted is verified."""
        return plan._replace(verify=np.minimum(plan.k, drafted))

    def observe(self, plan: Plan, result: StepResult) -> None:
        """Note the step's time if it was a point's."""
        if self._now is None:
            return
        parts = result.draft_seconds
        model = 0.0
        if parts is not None and self._now.proposer is not None:
            model = float(parts[[info.name for info in self._infos].index(self._now.proposer)])
        lookups = 0.0 if parts is None else float(parts.sum()) - model
        self.notes.append((self._now, result.step_seconds - lookups, model, self._context))

    def finish(self, handle: int) -> None:
        """Nothing is kept of a request."""


def time_design(
    target: CausalModel,
    models: Sequence[ModelProposer],
    points: Sequence[DesignPoint],
    *,
    replicates: int,
    seed: int,
) -> list[Timing]:
    """Serve made-up prompts and time every point; one batch after the other."""
    rng = random.Random(seed)
    found: list[Timing] = []
    batches = dict.fromkeys((point.requests, point.context_tokens) for point in points)
    for requests, context in batches:
        mine = [
            each for each in points if (each.requests, each.context_tokens) == (requests, context)
        ]
        order: list[DesignPoint] = [DesignPoint(requests, context, None, 0)] * _WARM_STEPS
        for _ in range(replicates):
            rng.shuffle(mine)
            order += mine
        longest = max(point.k for point in mine)
        repeat: LookupProposer = _Repeat(max(1, longest))
        proposers: list[LookupProposer | ModelProposer] = [repeat, *models]
        metronome = _Metronome([each.info for each in proposers], order)
        capacity = context + len(order) * (longest + 1) + 2
        decoder = Decoder(
            target, proposers, metronome, slots=requests, capacity=capacity, seed=seed
        )
        room = decoder.capacity - context - 1
        for index in range(requests):
            prompt = [rng.randrange(target.vocab_size) for _ in range(context)]
            decoder.submit(
                GenerationRequest(
                    prompt_token_ids=prompt,
                    max_tokens=room,
                    id=f"surface-{requests}-{context}-{index}",
                    ignore_eos=True,
                )
            )
        while not metronome.is_done and decoder.has_work:
            decoder.step()
        found += _grouped(metronome.notes[_WARM_STEPS:])
    return found


def _grouped(notes: Sequence[tuple[DesignPoint, float, float, int]]) -> list[Timing]:
    timings = []
    for point in dict.fromkeys(note[0] for note in notes):
        mine = [note for note in notes if note[0] == point]
        timings.append(
            Timing(
                point,
                tuple(note[1] for note in mine),
                tuple(note[2] for note in mine),
                tuple(note[3] for note in mine),
            )
        )
    return timings


def fit(
    timings: Sequence[Timing], proposers: Sequence[ProposerInfo], engine: EngineInfo
) -> StepCost:
    """The cost model that has seen every replicate, clipped, plain steps first."""
    model = StepCost(proposers, engine, follows_jumps=False)
    index = {info.name: p for p, info in enumerate(proposers)}
    for timing in sorted(timings, key=lambda each: each.point.k):
        point = timing.point
        rows = zip(timing.clipped(), timing.draft_seconds, timing.context_tokens, strict=True)
        for seconds, model_seconds, context in rows:
            depth, draft_tokens, none = np.zeros((3, len(proposers)))
            parts = np.zeros(len(proposers))
            if point.proposer is not None:
                p = index[point.proposer]
                depth[p], draft_tokens[p] = point.k, point.k * point.requests
                parts[p] = min(model_seconds, 0.99 * seconds)
            tokens = point.requests * (1 + point.k)
            load = StepLoad(tokens, point.requests, context, point.k > 0, depth, draft_tokens, none)
            model.observe(load, seconds, parts)
    return model
