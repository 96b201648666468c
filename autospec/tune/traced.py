"""Trials on recorded requests: the real controller and lookups, on a clock of known step times."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autospec.config import Settings
from autospec.controller import Controller
from autospec.cost.shapes import paid_tokens
from autospec.cost.step_cost import StepCost, StepLoad
from autospec.errors import EngineError
from autospec.policy.off import OffOptions
from autospec.profile.learned import Profile
from autospec.profile.tuned import KCap, ProposerSettings
from autospec.prompts import DEFAULT_WORKLOAD
from autospec.records import (
    EngineInfo,
    Float32Array,
    Float64Array,
    Int16Array,
    Int32Array,
    Plan,
    Shape,
)
from autospec.replay.cost_file import CostFile, LookupSeconds, ModelSeconds, StepSeconds
from autospec.replay.engine import Decider, ReplayEngine, untuned
from autospec.replay.hindsight import BarePolicy
from autospec.replay.recorded import recorded_part
from autospec.replay.run import ClosedLoop
from autospec.replay.trace import TraceRequest

_CHECK_STEPS = 64


class TrialTimeout(EngineError):
    """A trial took longer than it may."""


@dataclass(frozen=True, slots=True)
class Bed:
    """What trials run on: requests' engine, step times, and how sure models were of their drafts.

    Times are those of ``cost`` (a file) or, where it was measured, of ``step_cost`` and
    ``lookup_seconds`` (per request and step). ``confidence`` is by model and request, [output, k].
    """

    info: EngineInfo
    policy: Settings
    cost: CostFile | None = None
    step_cost: StepCost | None = None
    lookup_seconds: Mapping[str, float] | None = None
    confidence: Mapping[str, Mapping[str, Float32Array]] | None = None


class TracedEngine(ReplayEngine):
    """A replay engine with lookups of given settings, and measured step times where there are."""

    def __init__(
        self,
        requests: Sequence[TraceRequest],
        slots: int,
        bed: Bed,
        settings: Mapping[str, ProposerSettings],
    ) -> None:
        super().__init__(requests, _cost_of(bed, settings), slots, tuned=settings)
        self.info = bed.info
        self._bed = bed
        self._stops = [settings[info.name].min_confidence or 0.0 for info in self.proposers]
        capacity = self._history.tokens.shape[1]
        width = int(self.max_k.max(initial=0))
        self._sure: dict[int, Float32Array] = {
            p: np.zeros((slots, capacity, width), dtype=np.float32)
            for p, info in enumerate(self.proposers)
            if bed.confidence is not None and info.name in bed.confidence
        }
        self._now: Int32Array = np.zeros(0, dtype=np.int32)

    def start(
        self,
        request: TraceRequest,
        decider: Decider,
        *,
        arrival: float | None = None,
        tpot_target_seconds: float | None = None,
    ) -> None:
        """Put a request into a slot, with what models said of it."""
        slot = self._free[-1]
        super().start(request, decider, arrival=arrival, tpot_target_seconds=tpot_target_seconds)
        prompt = len(request.prompt_token_ids)
        for p, sure in self._sure.items():
            assert self._bed.confidence is not None
            known = self._bed.confidence[self.proposers[p].name][_original(request.id)]
            width = min(known.shape[1], sure.shape[2])
            sure[slot] = 0.0
            sure[slot, prompt : prompt + len(known), :width] = known[:, :width]

    def _decode(
        self, slots: Int32Array, decider: Decider, waiting: int, prefill: int, cached: int
    ) -> list[int]:
        self._now = slots
        return super()._decode(slots, decider, waiting, prefill, cached)

    def _trim(self, decider: Decider, plan: Plan) -> Plan:
        """Models stop where they are too unsure; then the controller takes its second look."""
        plan = super()._trim(decider, plan)
        used = [p for p in self._sure if (plan.proposer == p).any()]
        if not used:
            return plan
        drafted = plan.k.copy()
        confidence = np.full((len(drafted), self._confidence.shape[2]), np.nan, dtype=np.float32)
        for p in used:
            rows = np.flatnonzero(plan.proposer == p)
            slots = self._now[rows]
            sure = self._sure[p][slots, self._history.lengths[slots]]
            unsure = sure < self._stops[p]
            stop = np.where(unsure.any(axis=1), unsure.argmax(axis=1), sure.shape[1])
            drafted[rows] = np.minimum(plan.k[rows], stop)
            confidence[rows, : sure.shape[1]] = sure
        self._drafted = drafted
        return decider.trim(plan, drafted, confidence)

    def _verify_seconds(self, verify: Int16Array, cached: int, prefill: int) -> float:
        model = self._bed.step_cost
        if model is None:
            return super()._verify_seconds(verify, cached, prefill)
        verified, longest = int(verify.sum()), int(verify.max(initial=0))
        tokens = paid_tokens(model.engine.shape, model.captured, len(verify), verified, longest)
        return model.verify_seconds(tokens + prefill, len(verify), cached, verified > 0)

    def _draft_seconds(
        self, plan: Plan, context: Int32Array, charged: np.ndarray, verify_seconds: float
    ) -> Float64Array:
        model = self._bed.step_cost
        if model is None:
            return super()._draft_seconds(plan, context, charged, verify_seconds)
        seconds = np.zeros(len(self.proposers))
        known = self._bed.lookup_seconds or {}
        for p, info in enumerate(self.proposers):
            if self.lookups[p] is not None:
                seconds[p] = known.get(info.name, 0.0) * len(plan.k) if charged[p] else 0.0
                continue
            rows = plan.proposer == p
            if rows.any():
                depth, draft_tokens, none = np.zeros((3, len(self.proposers)))
                depth[p], draft_tokens[p] = float(plan.k[rows].max()), float(plan.k[rows].sum())
                load = StepLoad(0, 0, 0, False, depth, draft_tokens, none)
                idle = StepLoad(0, 0, 0, False, none, none, none)
                seconds[p] = model.predict(load) - model.predict(idle)
        return seconds


def _cost_of(bed: Bed, settings: Mapping[str, ProposerSettings]) -> CostFile:
    """The bed's cost file with the drafts' lengths of ``settings``; of measured times the form."""
    if bed.cost is not None:
        parts = {
            name: part.model_copy(update={"max_k": settings[name].max_k})
            for name, part in bed.cost.proposers.items()
            if name in settings
        }
        return bed.cost.model_copy(update={"proposers": parts})
    shape: Shape = bed.info.shape
    proposers: dict[str, ModelSeconds | LookupSeconds] = {}
    for name, each in settings.items():
        if each.kind == "lookup":
            proposers[name] = LookupSeconds(kind="lookup", max_k=each.max_k)
        else:
            proposers[name] = ModelSeconds(kind=each.kind, per_depth_seconds=0.0, max_k=each.max_k)
    return CostFile(
        shape=shape,
        captured_sizes=bed.info.captured_sizes,
        step=StepSeconds(fixed_seconds=1.0, per_token_seconds=0.0),
        proposers={**proposers},
    )


def proposers_of(requests: Sequence[TraceRequest], cost: CostFile) -> dict[str, ProposerSettings]:
    """The proposers that can be tried on these requests, untuned, within the cost file's k."""
    found: dict[str, ProposerSettings] = {}
    usable = recorded_part(cost, requests)
    for name, part in usable.proposers.items():
        if isinstance(part, LookupSeconds):
            found[name] = untuned(name, usable)
        elif isinstance(part, ModelSeconds):
            found[name] = ProposerSettings(kind=part.kind, max_k=part.max_k)
    return found


def interleaved(labels: Sequence[str], seed: int) -> list[int]:
    """Positions in an order of its own in which every label is spread evenly."""
    rng = random.Random(seed)
    places: list[tuple[float, int]] = []
    for label in dict.fromkeys(labels):
        mine = [position for position, each in enumerate(labels) if each == label]
        rng.shuffle(mine)
        places += [((rank + rng.random()) / len(mine), each) for rank, each in enumerate(mine)]
    return [position for _, position in sorted(places)]


def in_order(requests: Sequence[TraceRequest], load: int, seed: int) -> list[TraceRequest]:
    """The requests in an order of their own, workloads spread evenly.

    At a load above their number some come twice, all of them at once, so that no copy finds the
    other's output in a cache.
    """
    labels = [each.workload or DEFAULT_WORKLOAD for each in requests]
    order = [requests[position] for position in interleaved(labels, seed)]
    missing = max(0, load - len(order))
    copies = [
        replace(order[index % len(order)], id=f"{order[index % len(order)].id}#{index}")
        for index in range(missing)
    ]
    return order + copies


def _original(request_id: str) -> str:
    return request_id.partition("#")[0]


def plain_goodput(
    requests: Sequence[TraceRequest], bed: Bed, settings: Mapping[str, ProposerSettings], load: int
) -> float:
    """Tokens per second of plain decoding over these requests in this order."""
    engine = TracedEngine(requests, load, bed, settings)
    return _run(engine, BarePolicy(OffOptions(), engine), requests, load, None)


def tuned_goodput(
    requests: Sequence[TraceRequest],
    bed: Bed,
    settings: Mapping[str, ProposerSettings],
    caps: Sequence[KCap],
    load: int,
    *,
    profile: Profile | None,
    seed: int,
    deadline: float | None,
) -> tuple[float, Controller]:
    """Tokens per second under the controller with these settings; the controller as it ended.

    Raises TrialTimeout past ``deadline`` (of ``time.monotonic``).
    """
    engine = TracedEngine(requests, load, bed, settings)
    controller = Controller(
        bed.policy.without_files(),
        engine.proposers,
        engine.info,
        profile=profile,
        caps=caps,
        seed=seed,
    )
    return _run(engine, controller, requests, load, deadline), controller


def _run(
    engine: TracedEngine,
    decider: Decider,
    requests: Sequence[TraceRequest],
    load: int,
    deadline: float | None,
) -> float:
    loop = ClosedLoop(engine, decider, requests, load)
    while loop.step():
        late = deadline is not None and engine.steps % _CHECK_STEPS == 0
        if late and time.monotonic() > (deadline or 0.0):
            raise TrialTimeout(f"after {engine.steps} steps at load {load}")
    return engine.tokens / engine.seconds if engine.seconds > 0.0 else float("nan")
