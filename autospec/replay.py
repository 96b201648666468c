"""Recorded traces and a cost model -> exact counterfactual runs of the real controller.

The controller, its policies and the lookup proposers are those of serving. Recorded proposers answer
from the trace, and time is the cost file's. Closed loop: a fixed number of requests runs; the run
ends when nothing waits and fewer than half of them are left. Requests begin after their prefill,
which every policy would pay alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import yaml
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from autospec.compiled import compiled
from autospec.config import Settings
from autospec.controller import Controller
from autospec.cost import round_up
from autospec.errors import InputError
from autospec.profile import Profile
from autospec.proposers.base import Drafts, History, LookupProposer
from autospec.proposers.ngram import NgramProposer
from autospec.proposers.suffix import SuffixProposer
from autospec.records import (
    BatchState,
    EngineInfo,
    Int16Array,
    Int32Array,
    ProposerInfo,
    Request,
    Shape,
    StepResult,
)
from autospec.trace import TraceRequest


class _Form(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


_CACHE_TOKENS = 1 << 16

Seconds = Annotated[float, Field(ge=0)]


class StepSeconds(_Form):
    """A target forward: what every step, every paid token and every context token takes."""

    fixed_seconds: Seconds
    overhead_seconds: Seconds = 0.0
    per_token_seconds: Seconds
    per_context_token_seconds: Seconds = 0.0


class SequentialSeconds(_Form):
    """A model that drafts one token per forward."""

    kind: Literal["sequential", "parallel"]
    per_depth_seconds: Seconds
    per_context_token_seconds: Seconds = 0.0
    max_k: Annotated[int, Field(ge=1, le=64)] = 16


class LookupSeconds(_Form):
    """A lookup, as a share of the target forward of every step in which it runs."""

    kind: Literal["lookup"]
    step_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    max_k: Annotated[int, Field(ge=1, le=64)] = 20


class CostFile(_Form):
    """The step time of one engine on one device."""

    shape: Shape
    captured_sizes: tuple[int, ...] = ()
    step: StepSeconds
    proposers: dict[str, Annotated[SequentialSeconds | LookupSeconds, Field(discriminator="kind")]]


def read_cost_file(path: Path) -> CostFile:
    """A cost file in YAML. Raises InputError with the key that is wrong."""
    try:
        value = yaml.safe_load(path.read_text(encoding="utf-8"))
        return CostFile.model_validate(value)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise InputError(f"{path}: is not YAML: {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "the file"
        raise InputError(f"{path}: {key}: {first['msg']}, found {first['input']!r}") from None


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """One policy at one concurrency."""

    policy: str
    concurrency: int
    requests: int
    tokens: int
    seconds: float
    decision_seconds_mean: float
    decision_seconds_p99: float
    steps: int

    @property
    def tokens_per_second(self) -> float:
        """Committed tokens over simulated seconds."""
        return self.tokens / self.seconds


@compiled
def _outcomes(
    slots: Int32Array,
    tokens: Int32Array,
    lengths: Int32Array,
    ends: Int32Array,
    recorded: Int16Array,
    draft_tokens: Int32Array,
    offer_lengths: Int16Array,
    lookup: NDArray[np.bool_],
    proposer: Int16Array,
    verify: Int16Array,
    accepted: Int16Array,
    committed: Int16Array,
    matched: Int16Array,
) -> None:
    """What the target would have said: compare drafts [p, n, k] with the tokens that followed."""
    for i in range(slots.shape[0]):
        s = slots[i]
        at = lengths[s]
        left = ends[s] - at
        p = proposer[i]
        kept = 0
        if p >= 0:
            if lookup[p]:
                while (
                    kept < verify[i]
                    and kept < left
                    and draft_tokens[p, i, kept] == tokens[s, at + kept]
                ):
                    kept += 1
            else:
                kept = min(verify[i], recorded[p, s, at])
        committed[i] = min(kept + 1, left)
        accepted[i] = min(kept, left)
        for q in range(lookup.shape[0]):
            if not lookup[q]:
                continue
            limit = min(offer_lengths[q, i], committed[i])
            same = 0
            while same < limit and draft_tokens[q, i, same] == tokens[s, at + same]:
                same += 1
            matched[q, i] = same


class ReplayEngine:
    """A simulated engine: slots, the lookups that really draft, and the clock of a cost file."""

    def __init__(
        self,
        requests: Sequence[TraceRequest],
        cost: CostFile,
        slots: int,
        lookups: Sequence[LookupProposer],
    ) -> None:
        self.cost = cost
        by_name = {lookup.info.name: lookup for lookup in lookups}
        self.proposers: list[ProposerInfo] = []
        for name, part in cost.proposers.items():
            if isinstance(part, LookupSeconds):
                if name in by_name:
                    self.proposers.append(by_name[name].info)
            elif all(name in request.accepted for request in requests):
                self.proposers.append(ProposerInfo(name, part.kind, part.max_k))
        self.lookups = [by_name.get(info.name) for info in self.proposers]
        self.info = EngineInfo(
            "trace", "replay", "1", "simulated", "none", cost.shape, cost.captured_sizes
        )
        self.lookup = np.array([lookup is not None for lookup in self.lookups], dtype=np.bool_)
        self.k_max = max((info.max_k for info in self.proposers), default=0)
        self.seconds = 0.0
        self.tokens = 0
        self.steps = 0
        self._captured = np.array(cost.captured_sizes, dtype=np.int32)
        capacity = max(
            len(request.prompt_token_ids) + len(request.output_token_ids) for request in requests
        )
        p = len(self.proposers)
        self._history = History(
            np.zeros((slots, capacity), dtype=np.int32), np.zeros(slots, dtype=np.int32)
        )
        self._ends = np.zeros(slots, dtype=np.int32)
        self._recorded = np.zeros((p, slots, capacity), dtype=np.int16)
        self._handles = np.zeros(slots, dtype=np.int64)
        self._draft_tokens = np.zeros((p, slots, self.k_max), dtype=np.int32)
        self._offer_lengths = np.zeros((p, slots), dtype=np.int16)
        self._confidence = np.zeros((p, slots, self.k_max), dtype=np.float32)
        self._running: list[int] = []
        self._free = list(range(slots - 1, -1, -1))

    @property
    def running(self) -> int:
        """Requests in a slot."""
        return len(self._running)

    @property
    def has_room(self) -> bool:
        """Whether one more can start."""
        return bool(self._free)

    def start(self, request: TraceRequest, controller: Controller) -> int:
        """Put a request into a slot, its prompt read; returns the slot."""
        slot = self._free.pop()
        prompt, output = request.prompt_token_ids, request.output_token_ids
        self._history.tokens[slot, : len(prompt)] = prompt
        self._history.tokens[slot, len(prompt) : len(prompt) + len(output)] = output
        self._history.lengths[slot] = len(prompt)
        self._ends[slot] = len(prompt) + len(output)
        for p, info in enumerate(self.proposers):
            lookup = self.lookups[p]
            if lookup is not None:
                lookup.reset(slot)
            else:
                at = slice(len(prompt), len(prompt) + len(output))
                self._recorded[p, slot, at] = request.accepted[info.name]
        self._handles[slot] = controller.start(
            Request(request.id, prompt, workload=request.workload, temperature=request.temperature)
        )
        self._running.append(slot)
        return slot

    def step(
        self, controller: Controller, waiting: int, prefill_tokens: int = 0
    ) -> tuple[list[int], float]:
        """One step of everything that runs; returns the slots that ended and its seconds."""
        slots = np.array(self._running, dtype=np.int32)
        n = len(slots)
        offers = self._offer_lengths[:, :n]
        drafts = self._draft_tokens[:, :n]
        confidence = self._confidence[:, :n]
        offers[:] = 0
        wanted = controller.wants_offers()
        for p, lookup in enumerate(self.lookups):
            if lookup is not None and wanted[p]:
                lookup.propose(self._history, slots, Drafts(drafts[p], offers[p], confidence[p]))
        context = self._history.lengths[slots]
        room = (self._ends[slots] - context - 1).astype(np.int16)
        plan = controller.plan(
            BatchState(
                self._handles[slots],
                context,
                offers,
                confidence,
                last_tokens=self._history.tokens[slots, context - 1],
                room=room,
                waiting_requests=waiting,
                prefill_tokens=prefill_tokens,
            )
        )
        accepted, committed = np.zeros((2, n), dtype=np.int16)
        matched = np.full((len(self.proposers), n), -1, dtype=np.int16)
        _outcomes(
            slots, self._history.tokens, self._history.lengths, self._ends, self._recorded,
            drafts, offers, self.lookup, plan.proposer, plan.verify,
            accepted, committed, matched,
        )  # fmt: skip
        matched[~(wanted & self.lookup)] = -1
        draft_seconds = np.zeros(len(self.proposers))
        verify_seconds = self._verify_seconds(plan.verify, int(context.sum()), prefill_tokens)
        for p, info in enumerate(self.proposers):
            part = self.cost.proposers[info.name]
            if isinstance(part, LookupSeconds):
                draft_seconds[p] = part.step_fraction * verify_seconds if wanted[p] else 0.0
            else:
                rows = plan.proposer == p
                if rows.any():
                    depth = int(plan.k[rows].max()) if part.kind == "sequential" else 1
                    draft_seconds[p] = depth * (
                        part.per_depth_seconds
                        + part.per_context_token_seconds * float(context[rows].sum())
                    )
        seconds = verify_seconds + float(draft_seconds.sum())
        controller.observe(
            plan,
            StepResult(
                plan.verify, accepted, committed, seconds, draft_seconds, matched, prefill_tokens
            ),
        )
        self._history.lengths[slots] += committed
        self.seconds += seconds
        self.tokens += int(committed.sum())
        self.steps += 1
        ended = [int(s) for s in slots[self._history.lengths[slots] >= self._ends[slots]]]
        for slot in ended:
            controller.finish(int(self._handles[slot]))
            for lookup in self.lookups:
                if lookup is not None:
                    lookup.retire(self._history, slot)
            self._running.remove(slot)
            self._free.append(slot)
        return ended, seconds

    def _verify_seconds(self, verify: Int16Array, context: int, prefill_tokens: int) -> float:
        step = self.cost.step
        tokens = len(verify) + int(verify.sum())
        if self.cost.shape == "padded":
            tokens = len(verify) * (1 + int(verify.max(initial=0)))
        tokens += prefill_tokens
        if self.cost.shape == "stepped":
            tokens = int(round_up(tokens, self._captured))
        return (
            step.fixed_seconds
            + step.overhead_seconds
            + step.per_token_seconds * tokens
            + step.per_context_token_seconds * context
        )


def shuffled(
    requests: Sequence[TraceRequest], limit: int | None, seed: int
) -> tuple[TraceRequest, ...]:
    """The first ``limit`` of the requests in an order that depends on the seed alone."""
    order = np.random.default_rng(seed).permutation(len(requests))
    return tuple(requests[i] for i in order[:limit])


def replay_closed(
    requests: Sequence[TraceRequest],
    cost: CostFile,
    settings: Settings,
    concurrency: int,
    *,
    policy: str = "",
    profile: Profile | None = None,
    seed: int = 0,
    lookups: Callable[[int, int], Sequence[LookupProposer]] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[ReplayResult, Controller]:
    """Serve the requests in order, ``concurrency`` at a time."""
    engine, controller = _begin(requests, cost, settings, concurrency, profile, seed, lookups)
    clock = DecisionClock(controller)
    waiting = list(reversed(requests))
    while True:
        while waiting and engine.has_room:
            engine.start(waiting.pop(), controller)
        if not waiting and engine.running < max(1, concurrency / 2):
            break
        engine.step(controller, len(waiting))
        clock.note()
        if progress is not None and engine.steps % 256 == 0:
            progress(len(requests) - len(waiting), len(requests))
    mean, p99 = clock.summary()
    return ReplayResult(
        policy, concurrency, len(requests), engine.tokens, engine.seconds, mean, p99, engine.steps
    ), controller


def _begin(
    requests: Sequence[TraceRequest],
    cost: CostFile,
    settings: Settings,
    slots: int,
    profile: Profile | None,
    seed: int,
    lookups: Callable[[int, int], Sequence[LookupProposer]] | None,
) -> tuple[ReplayEngine, Controller]:
    capacity = max(len(r.prompt_token_ids) + len(r.output_token_ids) for r in requests)
    made = (lookups or default_lookups(cost))(slots, capacity)
    engine = ReplayEngine(requests, cost, slots, made)
    controller = Controller(settings, engine.proposers, engine.info, profile=profile, seed=seed)
    return engine, controller


def default_lookups(cost: CostFile) -> Callable[[int, int], Sequence[LookupProposer]]:
    """The lookups that a cost file names, for any number of slots and capacity."""

    def make(slots: int, capacity: int) -> Sequence[LookupProposer]:
        made: list[LookupProposer] = []
        for name, part in cost.proposers.items():
            if isinstance(part, LookupSeconds):
                if name == "ngram":
                    made.append(NgramProposer(slots, capacity, max_k=part.max_k))
                elif name == "suffix":
                    made.append(
                        SuffixProposer(
                            slots, capacity, max_k=part.max_k, cache_tokens=_CACHE_TOKENS
                        )
                    )
                else:
                    raise InputError(
                        f"cost file: proposers.{name}: a lookup must be ngram or suffix"
                    )
        return made

    return make


class DecisionClock:
    """Reads each step's decision seconds off a controller; keeps a bounded sample for the tail."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._samples: list[float] = []
        self._sum = 0.0
        self._count = 0

    def note(self) -> None:
        """A step went by."""
        seconds = self._controller.last_decision_seconds
        self._sum += seconds
        self._count += 1
        if len(self._samples) < 100_000:
            self._samples.append(seconds)

    def summary(self) -> tuple[float, float]:
        """(mean, p99) seconds; zeros without steps."""
        if self._count == 0:
            return 0.0, 0.0
        return self._sum / self._count, float(np.percentile(self._samples, 99))
