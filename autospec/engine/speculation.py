"""The speculative half of a step: offer, plan, draft, trim, and what is reported back.

Losslessness under sampling asks one thing of this file: whether a sampled draft token is verified
must not depend on that token, else the draft distribution that verification divides by would be
wrong. Draft confidences of sampled rows carry such knowledge (the second token's confidence tells
which first token was drawn), so ``trim`` sees for these rows only what was known before drawing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray

from autospec.engine.cache import SlotCache
from autospec.engine.drafting import DraftTask, Kept, ModelDrafts, ModelProposer
from autospec.engine.model import CausalModel
from autospec.engine.request import GenerationRequest
from autospec.engine.scheduler import Batch, Scheduler
from autospec.proposers.base import Drafts, History, LookupProposer
from autospec.records import (
    BatchState,
    Float32Array,
    Float64Array,
    Int16Array,
    Int32Array,
    Int64Array,
    Plan,
    Request,
    StepResult,
)

log = logging.getLogger("autospec")


class StepController(Protocol):
    """The part of ``autospec.controller.Controller`` that the decoder drives."""

    @property
    def k_max(self) -> int: ...
    def start(self, request: Request) -> int: ...
    def wants_offers(self) -> NDArray[np.bool_]: ...
    def plan(self, state: BatchState) -> Plan: ...
    def trim(self, plan: Plan, drafted: Int16Array, confidence: Float32Array) -> Plan: ...
    def observe(self, plan: Plan, result: StepResult) -> None: ...
    def finish(self, handle: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Speculation:
    """One step's drafts over its decoding requests, as far as they are to be verified."""

    plan: Plan
    tokens: Int64Array  # [n, k]
    verify: Int64Array  # [n]
    probs: torch.Tensor | None  # [d, k, vocab]
    probs_row: Int64Array  # [n, k], -1 for point masses
    offers: dict[int, Drafts]  # by lookup proposer
    draft_seconds: Float64Array  # [p]


class Speculator:
    """Drives the proposers and the controller for the decoder."""

    def __init__(
        self,
        target: CausalModel,
        cache: SlotCache,
        proposers: Sequence[LookupProposer | ModelProposer],
        controller: StepController,
        clock: Callable[[], float],
    ) -> None:
        self._controller = controller
        self._clock = clock
        self._num_proposers = len(proposers)
        self._lookups: dict[int, LookupProposer] = {}
        self._models: dict[int, ModelProposer] = {}
        self._buffers: dict[int, Drafts] = {}
        self._failed: set[int] = set()
        for index, proposer in enumerate(proposers):
            if proposer.info.kind == "lookup":
                self._lookups[index] = cast(LookupProposer, proposer)
                self._buffers[index] = Drafts(
                    tokens=np.zeros((cache.slots, proposer.info.max_k), dtype=np.int32),
                    lengths=np.zeros(cache.slots, dtype=np.int16),
                    confidence=np.zeros((cache.slots, proposer.info.max_k), dtype=np.float32),
                )
            else:
                model = cast(ModelProposer, proposer)
                model.attach(target, cache)
                self._models[index] = model
        self._max_k = np.array([proposer.info.max_k for proposer in proposers], dtype=np.int64)
        self._handles: Int64Array = np.zeros(cache.slots, dtype=np.int64)
        self.hidden_layers = tuple(
            dict.fromkeys(layer for model in self._models.values() for layer in model.hidden_layers)
        )

    def begin(self, slot: int, request: GenerationRequest, prompt: Int32Array) -> None:
        """A request has got ``slot``."""
        for lookup in self._lookups.values():
            lookup.reset(slot)
        for model in self._models.values():
            model.reset(slot)
        self._handles[slot] = self._controller.start(
            Request(
                id=request.id,
                prompt_token_ids=prompt,
                workload=request.workload,
                tag=request.tag,
                text=request.text,
                temperature=request.sampling.temperature,
                max_k=request.max_k,
                tpot_target_seconds=request.tpot_target_seconds,
            )
        )

    def end(self, slot: int, history: History, *, retire: bool) -> None:
        """The request in ``slot`` has ended; its tokens are still there."""
        if retire:
            for proposer in self._lookups.values():
                proposer.retire(history, slot)
        self._controller.finish(int(self._handles[slot]))

    def speculate(self, batch: Batch, scheduler: Scheduler) -> Speculation:
        """Decide on and draft for the decoding requests of a batch."""
        history = scheduler.history
        slots = np.ascontiguousarray(batch.slots[batch.decoding])
        sampling = scheduler.sampling.take(slots.astype(np.int64))
        room = np.maximum(scheduler.token_limits[slots] - history.lengths[slots] - 1, 0).astype(
            np.int64
        )
        seconds: Float64Array = np.zeros(self._num_proposers, dtype=np.float64)
        offers = self._offer(history, slots, room, seconds)
        plan = self._controller.plan(self._state(batch, slots, scheduler, room, offers))

        num_rows = len(slots)
        proposer = plan.proposer.astype(np.int64)
        drafting = (proposer >= 0) & (proposer < self._num_proposers)
        limit = np.where(drafting, self._max_k[np.where(drafting, proposer, 0)], 0)
        k = np.clip(plan.k.astype(np.int64), 0, np.minimum(limit, room))
        width = int(k.max(initial=0))
        tokens: Int64Array = np.zeros((num_rows, width), dtype=np.int64)
        lengths: Int64Array = np.zeros(num_rows, dtype=np.int64)
        confidence: Float32Array = np.zeros((num_rows, self._controller.k_max), dtype=np.float32)
        probs_row: Int64Array = np.full((num_rows, width), -1, dtype=np.int64)
        if not width:
            return Speculation(plan, tokens, lengths, None, probs_row, offers, seconds)

        for index, offer in offers.items():
            rows = np.flatnonzero((proposer == index) & (k > 0))
            if len(rows):
                depth = min(width, offer.tokens.shape[1])
                lengths[rows] = np.minimum(k[rows], offer.lengths[rows])
                tokens[rows, :depth] = offer.tokens[rows, :depth]
                confidence[rows, :depth] = offer.confidence[rows, :depth]
        known = lengths.copy()  # lengths as trim may see them
        distributions: list[torch.Tensor] = []
        for index, model in self._models.items():
            wanted = np.where(proposer == index, k, 0)
            if not wanted.any() or index in self._failed:
                continue
            began = self._clock()
            task = DraftTask(history, slots, wanted.astype(np.int16), sampling)
            try:
                drafts = model.draft(task)
            except Exception as error:
                self._retire_proposer(index, error)
                continue
            rows = np.flatnonzero(wanted)
            depth = min(width, drafts.tokens.shape[1])
            lengths[rows] = np.minimum(wanted[rows], drafts.lengths[rows])
            tokens[rows, :depth] = drafts.tokens[rows, :depth]
            confidence[rows, :depth] = drafts.confidence[rows, :depth]
            known[rows] = lengths[rows]
            sampled = rows[(drafts.probs_row[rows] >= 0).any(axis=1)]
            if len(sampled):
                first = _expected_probability(drafts, sampled)
                confidence[sampled] = first[:, None]
                known[sampled] = wanted[sampled]
                of_rows = drafts.probs_row[sampled, :depth]
                before = sum(map(len, distributions))
                probs_row[sampled, :depth] = np.where(of_rows >= 0, of_rows + before, -1)
                assert drafts.probs is not None
                distributions.append(drafts.probs)
            seconds[index] += self._clock() - began
        verify = lengths
        if lengths.any():
            plan = self._controller.trim(plan, known.astype(np.int16), confidence)
            verify = np.clip(plan.verify.astype(np.int64), 0, lengths)
        probs = _joined(distributions)
        return Speculation(plan, tokens, verify, probs, probs_row, offers, seconds)

    def commit(self, kept: Kept, history: History) -> None:
        """Tell every model proposer what the step kept."""
        for index, model in self._models.items():
            if index in self._failed:
                continue
            hidden = kept.hidden
            if hidden is not None:
                if model.hidden_layers:
                    columns = [self.hidden_layers.index(layer) for layer in model.hidden_layers]
                    hidden = hidden[:, columns]
                else:
                    hidden = None
            try:
                model.commit(Kept(kept.slots, kept.starts, kept.counts, hidden), history)
            except Exception as error:
                self._retire_proposer(index, error)

    def observe(
        self,
        speculation: Speculation,
        *,
        accepted: Int64Array,  # [n]
        committed: Int64Array,  # [n]
        tokens: Int64Array,  # [n, k + 1] kept drafts, then the target's own token
        step_seconds: float,
        prefill_tokens: int,
    ) -> None:
        """Report the step to the controller, unused offers of lookup proposers included."""
        matched: Int16Array = np.full((self._num_proposers, len(accepted)), -1, dtype=np.int16)
        for index, offer in speculation.offers.items():
            depth = min(offer.tokens.shape[1], tokens.shape[1])
            columns = np.arange(depth)
            known = np.minimum(offer.lengths, committed)
            equal = (offer.tokens[:, :depth] == tokens[:, :depth]) & (columns < known[:, None])
            leading = np.logical_and.accumulate(equal, axis=1).sum(axis=1)
            matched[index] = np.where(offer.lengths > 0, leading, -1)
        self._controller.observe(
            speculation.plan,
            StepResult(
                verified=speculation.verify.astype(np.int16),
                accepted=accepted.astype(np.int16),
                committed=committed.astype(np.int16),
                step_seconds=step_seconds,
                draft_seconds=speculation.draft_seconds,
                matched=matched,
                prefill_tokens=prefill_tokens,
            ),
        )

    def _retire_proposer(self, index: int, error: Exception) -> None:
        """A proposer failed: its state can no longer be trusted, so it drafts no more."""
        self._failed.add(index)
        name = (self._lookups.get(index) or self._models[index]).info.name
        log.error("proposer %s failed and is left out from now on", name, exc_info=error)

    def _offer(
        self, history: History, slots: Int32Array, room: Int64Array, seconds: Float64Array
    ) -> dict[int, Drafts]:
        offers: dict[int, Drafts] = {}
        wanted = self._controller.wants_offers()
        for index, lookup in self._lookups.items():
            if not wanted[index] or index in self._failed:
                continue
            began = self._clock()
            buffer = self._buffers[index]
            num_rows = len(slots)
            offer = Drafts(
                buffer.tokens[:num_rows], buffer.lengths[:num_rows], buffer.confidence[:num_rows]
            )
            try:
                lookup.propose(history, slots, offer)
            except Exception as error:
                self._retire_proposer(index, error)
                continue
            np.minimum(offer.lengths, room, out=offer.lengths, casting="unsafe")
            offers[index] = offer
            seconds[index] = self._clock() - began
        return offers

    def _state(
        self,
        batch: Batch,
        slots: Int32Array,
        scheduler: Scheduler,
        room: Int64Array,
        offers: dict[int, Drafts],
    ) -> BatchState:
        num_rows, k_max = len(slots), self._controller.k_max
        offer_lengths: Int16Array = np.zeros((self._num_proposers, num_rows), dtype=np.int16)
        offer_confidence: Float32Array = np.zeros(
            (self._num_proposers, num_rows, k_max), dtype=np.float32
        )
        stale: Int32Array = np.zeros((self._num_proposers, num_rows), dtype=np.int32)
        for index, offer in offers.items():
            offer_lengths[index] = offer.lengths
            offer_confidence[index, :, : offer.confidence.shape[1]] = offer.confidence
        for index, model in self._models.items():
            if index not in self._failed:
                stale[index] = model.stale_tokens(scheduler.history, slots)
        return BatchState(
            handles=self._handles[slots],
            context_tokens=scheduler.history.lengths[slots],
            offer_lengths=offer_lengths,
            offer_confidence=offer_confidence,
            last_tokens=scheduler.history.tokens[slots, scheduler.history.lengths[slots] - 1],
            stale_tokens=stale,
            room=np.minimum(room, np.iinfo(np.int16).max).astype(np.int16),
            waiting_requests=scheduler.waiting_requests,
            prefill_tokens=batch.prefill_tokens,
        )


def _expected_probability(drafts: ModelDrafts, rows: Int64Array) -> Float32Array:
    """Expected draft probability [m] of the first token of each row, known before it is drawn."""
    assert drafts.probs is not None
    first = drafts.probs[torch.from_numpy(drafts.probs_row[rows, 0]).to(drafts.probs.device), 0]
    return cast(Float32Array, first.square().sum(dim=-1).float().cpu().numpy())


def _joined(distributions: list[torch.Tensor]) -> torch.Tensor | None:
    """All rows [d, k, vocab] of draft distributions that may differ in depth."""
    if len(distributions) <= 1:
        return distributions[0] if distributions else None
    depth = max(probs.shape[1] for probs in distributions)
    padded = [
        torch.nn.functional.pad(probs, (0, 0, 0, depth - probs.shape[1])) for probs in distributions
    ]
    return torch.cat(padded)
