"""The controller, the lookups and the histories that one vLLM scheduler steers with.

Knows nothing of vLLM's classes: rows in, choices out.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from prometheus_client import CollectorRegistry

from autospec import acceptance, cost
from autospec.adapters.vllm.labels import RequestLabels
from autospec.adapters.vllm.options import AdapterOptions
from autospec.adapters.vllm.slots import NO_SLOT, TokenSlots
from autospec.config import Settings
from autospec.controller import Controller
from autospec.errors import ProfileError
from autospec.journal import open_journal
from autospec.metrics import Metrics
from autospec.profile import Identity, load_profile
from autospec.proposers.base import Drafts, LookupProposer
from autospec.proposers.settings import LOOKUP_DEFAULTS, make_lookup
from autospec.records import (
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
from autospec.tuned import ProposerSettings

log = logging.getLogger("autospec")

_MOST_ROOM = np.iinfo(np.int16).max


@dataclass(slots=True)
class Tracked:
    """A request as the pilot follows it.

    ``behind`` counts the tokens that the target has seen and the configured drafter has not,
    ``last`` how many of them came with the latest step. A ``cold`` request's drafter has given up
    on it.
    """

    handle: int
    slot: int = NO_SLOT
    is_long: bool = False
    behind: int = 0
    last: int = 0
    prompt_behind: int = 0
    cold: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """One decoding request before a step: its tokens so far, of which the first ``count`` count.

    ``room`` is how many draft tokens fit before its limits; ``model`` whether the configured
    drafter may be used for it.
    """

    tracked: Tracked
    tokens: Sequence[int]
    count: int
    room: int
    model: bool


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A plan with the lookups' offers that it was made from."""

    plan: Plan
    offers: dict[int, Drafts]

    def lookup_tokens(self, row: int) -> list[int] | None:
        """The tokens that a lookup drafts for a row; None if no lookup was chosen."""
        offer = self.offers.get(int(self.plan.proposer[row]))
        if offer is None:
            return None
        k = min(int(self.plan.k[row]), int(offer.lengths[row]))
        tokens: list[int] = offer.tokens[row, :k].tolist()
        return tokens


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
        capacity = min(max_tokens, options.lookup_tokens)
        names = tuple(dict.fromkeys(options.lookups)) if with_lookups else ()
        own = untuned_lookups(max_k, options.cache_tokens)
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
        self._proposers = len(infos)
        self._slots = TokenSlots(max_requests, capacity)
        self._requests: dict[str, Tracked] = {}
        self._failed: set[int] = set()
        self.metrics = Metrics(registry)
        journal = None
        if (path := settings.journal.path) is not None:
            journal = open_journal(
                path, settings.journal.max_bytes, self.metrics.add_journal_failure
            )
        self.controller = Controller(
            settings, infos, engine, metrics=self.metrics, journal=journal, seed=options.seed
        )

    # Requests -------------------------------------------------------------------------------

    def start(
        self, request_id: str, prompt: Sequence[int], temperature: float, labels: RequestLabels
    ) -> Tracked:
        """A request was added."""
        handle = self.controller.start(
            Request(
                id=request_id,
                prompt_token_ids=np.asarray(prompt, dtype=np.int32),
                workload=labels.workload,
                tag=labels.tag,
                temperature=temperature,
                max_k=labels.max_k,
                tpot_target_seconds=labels.tpot_target_seconds,
            )
        )
        tracked = Tracked(handle)
        self._requests[request_id] = tracked
        return tracked

    def get(self, request_id: str) -> Tracked | None:
        """The request, if it is followed."""
        return self._requests.get(request_id)

    def finish(self, request_id: str, tokens: Sequence[int] | None) -> None:
        """The request ended; its tokens, if it ended well, may serve suffix lookups of others."""
        tracked = self._requests.pop(request_id, None)
        if tracked is None:
            return
        if tracked.slot != NO_SLOT:
            if tokens is not None and self._slots.sync(tracked.slot, tokens, len(tokens)):
                for index, lookup in enumerate(self.lookups):
                    if index not in self._failed:
                        lookup.retire(self._slots.history, tracked.slot)
            self._release(tracked)
        self.controller.finish(tracked.handle)

    def rewrite(self, request_id: str) -> None:
        """Read the tokens anew when it decodes again: it was preempted, or a session went on."""
        tracked = self._requests.get(request_id)
        if tracked is not None and tracked.slot != NO_SLOT:
            self._release(tracked)

    def close(self) -> None:
        """Save the profile and close the journal. Never raises."""
        self.controller.close()

    # Steps ----------------------------------------------------------------------------------

    def plan(self, rows: Sequence[Row], waiting: int, prefill_tokens: int) -> StepPlan:
        """Decide the next step of the decoding requests."""
        n = len(rows)
        offers = self._offer(rows)
        lengths: Int16Array | None = None
        confidence: Float32Array | None = None
        if offers:
            k_max = self.controller.k_max
            lengths = np.zeros((self._proposers, n), dtype=np.int16)
            confidence = np.zeros((self._proposers, n, k_max), dtype=np.float32)
            for index, offer in offers.items():
                lengths[index] = offer.lengths
                confidence[index, :, : offer.confidence.shape[1]] = offer.confidence
        stale: Int32Array | None = None
        if self.model >= 0:
            stale = np.zeros((self._proposers, n), dtype=np.int32)
            stale[self.model] = [
                max(0, row.tracked.behind - row.tracked.prompt_behind - row.tracked.last)
                for row in rows
            ]
        plan = self.controller.plan(
            BatchState(
                handles=np.array([row.tracked.handle for row in rows], dtype=np.int64),
                context_tokens=np.array([row.count for row in rows], dtype=np.int32),
                offer_lengths=lengths,
                offer_confidence=confidence,
                last_tokens=np.array([row.tokens[row.count - 1] for row in rows], dtype=np.int32),
                stale_tokens=stale,
                room=np.array([min(row.room, _MOST_ROOM) for row in rows], dtype=np.int16),
                waiting_requests=waiting,
                prefill_tokens=prefill_tokens,
            )
        )
        return StepPlan(plan, offers)

    def drafted(self, step: StepPlan, drafted: Int16Array) -> StepPlan:
        """The plan after it is known how many tokens [n] are really verified."""
        return StepPlan(self.controller.trim(step.plan, drafted, None), step.offers)

    def observe(
        self,
        step: StepPlan,
        accepted: Int16Array,  # [n]
        committed: Sequence[Sequence[int]],  # [n] tokens that were added
        step_seconds: float,
        prefill_tokens: int,
        draft_seconds: float | None,
    ) -> None:
        """Learn from a step, also what the lookups that were not used would have got right."""
        n = len(committed)
        counts = np.array([len(tokens) for tokens in committed], dtype=np.int16)
        matched: Int16Array | None = None
        if step.offers:
            width = max(1, int(counts.max(initial=0)))
            tokens = np.full((n, width), -1, dtype=np.int32)
            for row, added in enumerate(committed):
                tokens[row, : len(added)] = added
            matched = np.full((self._proposers, n), -1, dtype=np.int16)
            for index, offer in step.offers.items():
                depth = min(width, offer.tokens.shape[1])
                known = np.minimum(offer.lengths, counts)
                equal = (offer.tokens[:, :depth] == tokens[:, :depth]) & (
                    np.arange(depth) < known[:, None]
                )
                leading = np.logical_and.accumulate(equal, axis=1).sum(axis=1)
                matched[index] = np.where(offer.lengths > 0, leading, -1)
        seconds = None
        if draft_seconds is not None and self.model >= 0:
            seconds = np.zeros(self._proposers)
            seconds[self.model] = draft_seconds
        self.controller.observe(
            step.plan,
            StepResult(
                verified=step.plan.verify,
                accepted=accepted,
                committed=counts,
                step_seconds=step_seconds,
                draft_seconds=seconds,
                matched=matched,
                prefill_tokens=prefill_tokens,
            ),
        )

    # ----------------------------------------------------------------------------------------

    def _offer(self, rows: Sequence[Row]) -> dict[int, Drafts]:
        """What the lookups draft, by proposer; rows without a slot get nothing."""
        if len(self._failed) == len(self.lookups):
            return {}
        n = len(rows)
        has_slot = [index for index, row in enumerate(rows) if self._sync(row)]
        slots = np.array([rows[index].tracked.slot for index in has_slot], dtype=np.int32)
        wanted = self.controller.wants_offers()
        offers: dict[int, Drafts] = {}
        for index, lookup in enumerate(self.lookups):
            if index in self._failed or not wanted[index]:
                continue
            k = lookup.info.max_k
            part = _empty_drafts(len(slots), k)
            try:
                lookup.propose(self._slots.history, slots, part)
            except Exception as error:
                self._failed.add(index)
                self.metrics.add_fallback("lookup")
                log.error("lookup %s failed and is left out", lookup.info.name, exc_info=error)
                continue
            if len(has_slot) == n:
                offers[index] = part
                continue
            whole = _empty_drafts(n, k)
            whole.tokens[has_slot] = part.tokens
            whole.lengths[has_slot] = part.lengths
            whole.confidence[has_slot] = part.confidence
            offers[index] = whole
        return offers

    def _sync(self, row: Row) -> bool:
        """Bring a row's history up to date; whether it has one."""
        tracked = row.tracked
        if tracked.is_long:
            return False
        if tracked.slot == NO_SLOT:
            tracked.slot = self._slots.take()
            if tracked.slot == NO_SLOT:
                return False
            for lookup in self.lookups:
                lookup.reset(tracked.slot)
        if self._slots.sync(tracked.slot, row.tokens, row.count):
            return True
        self._release(tracked)
        tracked.is_long = True
        return False

    def _release(self, tracked: Tracked) -> None:
        self._slots.give_back(tracked.slot)
        tracked.slot = NO_SLOT


def untuned_lookups(max_k: int, cache_tokens: int) -> dict[str, ProposerSettings]:
    """How the lookups draft in vLLM unless a profile says otherwise."""
    found = {
        name: each.model_copy(update={"max_k": max_k}) for name, each in LOOKUP_DEFAULTS.items()
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
        profile.require(Identity.of(engine, infos), acceptance.LAYOUT, cost.LAYOUT)
    except ProfileError:
        return {}
    return {} if profile.tuned is None else profile.tuned.proposers


def _empty_drafts(rows: int, k: int) -> Drafts:
    return Drafts(
        np.zeros((rows, k), dtype=np.int32),
        np.zeros(rows, dtype=np.int16),
        np.zeros((rows, k), dtype=np.float32),
    )
