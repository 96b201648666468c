"""The controller, the lookups and the histories that one vLLM scheduler steers with.

Knows nothing of vLLM's classes: rows in, choices out.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from prometheus_client import CollectorRegistry

from autospec.acceptance import hazard_table
from autospec.adapters.vllm.labels import RequestLabels
from autospec.adapters.vllm.options import AdapterOptions
from autospec.adapters.vllm.seats import NO_SEAT, Seats, add_tokens, describe, take_drafts
from autospec.adapters.vllm.step_arrays import StepArrays, StepMemory
from autospec.compiled import prepared
from autospec.config import Settings
from autospec.controller import Controller
from autospec.cost import step_cost
from autospec.errors import ProfileError
from autospec.metrics import Metrics
from autospec.profile.file import load_profile
from autospec.profile.learned import Identity
from autospec.profile.tuned import ProposerSettings
from autospec.proposers.base import BindableLookup, LookupProposer
from autospec.proposers.settings import make_lookup, untuned_lookups
from autospec.records import (
    EngineInfo,
    Int16Array,
    Int32Array,
    Plan,
    ProposerInfo,
    Request,
    StepResult,
)

log = logging.getLogger("autospec")


@dataclass(slots=True)
class Tracked:
    """A request as the pilot follows it: ``count`` of its at most ``limit`` tokens are known.

    ``behind`` counts the tokens that the target has seen and the configured drafter has not,
    ``last`` how many of them came with the latest step. A ``cold`` request's drafter has given up
    on it.
    """

    handle: int
    limit: int
    seat: int = NO_SEAT
    count: int = 0
    behind: int = 0
    last: int = 0
    prompt_behind: int = 0
    cold: bool = False


@dataclass(slots=True)
class StepPlan:
    """A plan, the requests [n] that it is for, and the tokens that it drafts for each of them.

    The configured drafter's are zeros until it has drafted; ``num_drafts`` is the sum of all k.
    ``arrays`` is None once the step was learned from.
    """

    plan: Plan
    rows: Sequence[Tracked]
    drafts: list[list[int]]
    num_drafts: int
    arrays: StepArrays | None


class Pilot:
    """Plans steps over vLLM's running requests and learns from them.

    Raises ConfigError when options, settings and proposers do not fit.
    """

    def __init__(
        self,
        options: AdapterOptions,
        engine: EngineInfo,
        model: ProposerInfo | None,
        *,
        with_lookups: bool,
        max_requests: int,
        max_tokens: int,
        max_k: int,
        registry: CollectorRegistry,
    ) -> None:
        settings: Settings = options.settings()
        if any(rule.text_matches is not None for rule in settings.workloads.rules):
            log.warning(
                "workloads.rules: text_matches never matches inside vLLM, which has tokens only; "
                'label them with vllm_xargs {"autospec_workload": ...}'
            )
        capacity = min(max_tokens, options.lookup_tokens)
        names = tuple(dict.fromkeys(options.lookups)) if with_lookups else ()
        own = vllm_lookups(max_k, options.cache_tokens, beside_model=model is not None)
        if names:
            own |= _tuned(settings, engine, (*names, *([] if model is None else [model.name])))
        self.lookups: list[LookupProposer] = []
        for name in names:
            each = own[name].model_copy(update={"max_k": min(own[name].max_k, max_k)})
            self.lookups.append(make_lookup(name, each, max_requests, capacity))
        infos = [lookup.info for lookup in self.lookups]
        self.model = len(infos) if model is not None else -1
        if model is not None:
            infos.append(model)
        self._seats = Seats(max_requests, capacity if names else 0)
        self.requests: dict[str, Tracked] = {}
        self._failed: set[int] = set()
        self.metrics = Metrics(registry)
        self.controller = Controller(
            settings, infos, engine, metrics=self.metrics, seed=options.seed
        )
        self._max_requests = max_requests
        self._idle = [self._new_memory()]
        self._warm_up()

    # Requests -------------------------------------------------------------------------------

    def start(
        self,
        request_id: str,
        prompt: Sequence[int],
        temperature: float,
        labels: RequestLabels,
        limit: int,
    ) -> Tracked:
        """A request was added; it can grow to ``limit`` tokens."""
        handle = self.controller.start(
            Request(
                id=request_id,
                prompt_token_ids=prompt,
                workload=labels.workload,
                tag=labels.tag,
                temperature=temperature,
                max_k=labels.max_k,
                tpot_target_seconds=labels.tpot_target_seconds,
            )
        )
        tracked = Tracked(handle, limit)
        self.requests[request_id] = tracked
        return tracked

    def seat(self, tracked: Tracked, tokens: Sequence[int], count: int) -> bool:
        """Read the first ``count`` tokens of a request that is to be planned; False without room.

        Needed only if they are not those that were known and those that steps have brought since.
        """
        self._unseat(tracked)
        tracked.seat = self._seats.take(tracked.handle, tokens, count, tracked.limit)
        if tracked.seat == NO_SEAT:
            return False
        tracked.count = count
        for lookup in self.lookups:
            lookup.reset(tracked.seat)
        return True

    def rewrite(self, request_id: str, limit: int) -> None:
        """Read the tokens anew when it decodes again: it was preempted, or a session went on."""
        tracked = self.requests.get(request_id)
        if tracked is not None:
            tracked.limit = limit
            self._unseat(tracked)

    def finish(self, request_id: str, tokens: Sequence[int] | None) -> None:
        """The request ended; its tokens, if it ended well, may serve suffix lookups of others."""
        tracked = self.requests.pop(request_id, None)
        if tracked is None:
            return
        if tokens is not None and tracked.seat != NO_SEAT and self.lookups:
            is_known = tracked.count == len(tokens) or self.seat(tracked, tokens, len(tokens))
            if is_known and self._seats.history.lengths[tracked.seat] > 0:
                for index, lookup in enumerate(self.lookups):
                    if index not in self._failed:
                        lookup.retire(self._seats.history, tracked.seat)
        self._unseat(tracked)
        self.controller.finish(tracked.handle)

    def close(self) -> None:
        """Save the profile and close the journal. Never raises."""
        self.controller.close()

    # Steps ----------------------------------------------------------------------------------

    def plan(self, rows: Sequence[Tracked], waiting: int, prefill_tokens: int) -> StepPlan | None:
        """Decide the next step of the seated requests; None if the controller could not."""
        memory = self._idle.pop() if self._idle else self._new_memory()
        arrays = memory.of(len(rows))
        arrays.seat_list[:] = array("i", [tracked.seat for tracked in rows])
        self._describe(self._seats.reference, arrays.reference)
        if self.lookups:
            self._offer(arrays)
        if self.model >= 0:
            arrays.stale_tokens[:] = 0
            arrays.stale_tokens[self.model] = [
                max(0, tracked.behind - tracked.prompt_behind - tracked.last) for tracked in rows
            ]
        plan = self.controller.plan(arrays.batch(waiting, prefill_tokens))
        if plan.mode == "fallback":
            self._idle.append(memory)
            return None
        total = self._take_drafts(arrays.reference, plan.proposer, plan.k)
        return StepPlan(plan, rows, _split(arrays.drafts, plan.k, total), total, arrays)

    def drafted(self, step: StepPlan, drafted: Int16Array) -> None:
        """Not all of the planned tokens, but ``drafted`` [n] of them are really verified."""
        step.plan = self.controller.trim(step.plan, drafted, None)

    def note(
        self,
        step: StepPlan,
        counts: list[int],
        tokens: list[int],
        step_seconds: float,
        prefill_tokens: int,
        draft_seconds: float | None,
    ) -> StepResult | None:
        """Take in the tokens of a step; returns what is to be learned from it, None if nothing.

        ``counts`` [n] of ``tokens`` were added to each request, those of the first one first.
        """
        arrays = step.arrays
        if arrays is None:
            self.metrics.add_dropped("late or repeated")
            return None
        added = array("i", counts + tokens)
        arrays.added_list[: len(added)] = added
        for tracked, count in zip(step.rows, counts, strict=True):
            tracked.count += count
        self._add_tokens(self._seats.reference, arrays.reference)
        seconds = None
        if draft_seconds is not None and self.model >= 0:
            seconds = np.zeros(arrays.matched.shape[0])
            seconds[self.model] = draft_seconds
        return StepResult(
            verified=step.plan.verify,
            accepted=arrays.accepted,
            committed=arrays.committed,
            step_seconds=step_seconds,
            draft_seconds=seconds,
            matched=arrays.matched if self.lookups else None,
            prefill_tokens=prefill_tokens,
        )

    def learn(self, step: StepPlan, result: StepResult) -> None:
        """Learn from what ``note`` returned of a step, once; also what the lookups that were not
        used would have got right. The next steps may have been planned meanwhile."""
        arrays, step.arrays = step.arrays, None
        if arrays is None:
            return
        self.controller.observe(step.plan, result)
        self._idle.append(arrays.memory)

    # ----------------------------------------------------------------------------------------

    def _offer(self, arrays: StepArrays) -> None:
        """What the lookups draft; those that failed or are not asked offer nothing."""
        wanted = self.controller.wants_offers().tolist()
        for index, propose in enumerate(arrays.proposals):
            if not wanted[index] or index in self._failed:
                continue
            try:
                if propose is None:
                    propose = arrays.proposals[index] = self._proposal(arrays, index)
                propose()
            except Exception as error:
                self._failed.add(index)
                arrays.offer_lengths[index] = 0
                self.metrics.add_fallback("lookup")
                name = self.lookups[index].info.name
                log.error("lookup %s failed and is left out", name, exc_info=error)

    def _proposal(self, arrays: StepArrays, index: int) -> Callable[[], None]:
        """What a lookup does to offer to the requests of a step."""
        lookup = self.lookups[index]
        arguments = self._seats.history, arrays.seats, arrays.offers[index]
        if isinstance(lookup, BindableLookup):
            return lookup.bind(*arguments)
        return partial(lookup.propose, *arguments)

    def _unseat(self, tracked: Tracked) -> None:
        if tracked.seat != NO_SEAT:
            self._seats.leave(tracked.seat)
            tracked.seat = NO_SEAT

    def _new_memory(self) -> StepMemory:
        return StepMemory(
            self._max_requests,
            len(self.controller.proposers),
            len(self.lookups),
            self.controller.k_max,
            has_model=self.model >= 0,
        )

    def _warm_up(self) -> None:
        """Compile what steps call: no request shall wait for it."""
        arrays, seats = self._idle[0].of(1), Seats(1, 1)
        both = seats.reference, arrays.reference
        planned = arrays.reference, arrays.committed, arrays.accepted
        describe(*both)
        take_drafts(*planned)
        add_tokens(*both)
        self._describe = prepared(describe, *both)
        self._take_drafts = prepared(take_drafts, *planned)
        self._add_tokens = prepared(add_tokens, *both)


def _split(drafts: Int32Array, k: Int16Array, total: int) -> list[list[int]]:
    """The draft tokens by row."""
    if total == 0:
        return [[] for _ in range(k.shape[0])]
    tokens: list[int] = drafts[:total].tolist()
    rows: list[list[int]] = []
    start = 0
    for count in k.tolist():
        rows.append(tokens[start : start + count])
        start += count
    return rows


def vllm_lookups(
    max_k: int, cache_tokens: int, *, beside_model: bool
) -> dict[str, ProposerSettings]:
    """How the lookups draft in vLLM unless a profile says otherwise."""
    found = {
        name: each.model_copy(update={"max_k": max_k})
        for name, each in untuned_lookups(beside_model=beside_model).items()
    }
    found["suffix"] = found["suffix"].model_copy(update={"cache_tokens": cache_tokens})
    return found


def _tuned(
    settings: Settings, engine: EngineInfo, proposers: Sequence[str]
) -> Mapping[str, ProposerSettings]:
    """What the profile to start from was tuned to; the controller says what is wrong with one."""
    path = settings.profile.path
    if path is None:
        return {}
    infos = tuple(ProposerInfo(name, "lookup", 1) for name in proposers)  # names alone identify
    try:
        profile = load_profile(path)
        profile.require(Identity.of(engine, infos), hazard_table.LAYOUT, step_cost.LAYOUT)
    except ProfileError:
        return {}
    return {} if profile.tuned is None else profile.tuned.proposers
