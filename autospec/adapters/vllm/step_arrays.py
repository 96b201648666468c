"""The arrays of steps that are under way: made once, written anew in every step."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from autospec.adapters.vllm.seats import SeatedStep
from autospec.compiled import by_reference
from autospec.proposers.base import Drafts
from autospec.records import BatchState


class StepArrays:
    """What one step of ``n`` requests is planned from and what it brought.

    Most are a ``SeatedStep``'s. Lists of numbers are written through ``seat_list`` and
    ``added_list``: from cold caches numpy takes several times as long.
    """

    def __init__(self, memory: StepMemory, n: int) -> None:
        p, k = memory.proposers, memory.k
        self.n = n
        self.memory = memory
        self.seats = memory.seats[:n]
        self.seat_list = self.seats.data
        self.counts_and_tokens = memory.counts_and_tokens[: n * (2 + k)]
        self.added_list = self.counts_and_tokens.data
        self.handles = memory.handles[:n]
        self.context_tokens = memory.context_tokens[:n]
        self.last_tokens = memory.last_tokens[:n]
        self.room = memory.room[:n]
        self.committed = memory.committed[:n]
        self.accepted = memory.accepted[:n]
        self.matched = memory.matched[: p * n].reshape(p, n)
        self.offered = memory.offered[: p * n * k].reshape(p, n, k)
        self.offer_lengths = memory.offer_lengths[: p * n].reshape(p, n)
        self.offer_confidence = memory.offer_confidence[: p * n * k].reshape(p, n, k)
        self.stale_tokens = memory.stale_tokens[: p * n].reshape(p, n)
        self.drafts = memory.drafts[: n * k]
        self.offers = [
            Drafts(self.offered[index], self.offer_lengths[index], self.offer_confidence[index])
            for index in range(memory.lookups)
        ]
        self.reference = by_reference(
            SeatedStep(
                self.seats, self.handles, self.context_tokens, self.last_tokens, self.room,
                self.counts_and_tokens, self.committed, self.accepted, self.matched, self.offered,
                self.offer_lengths, self.drafts, memory.lookups,
            )
        )  # fmt: skip
        """How kernels take them."""
        self.proposals: list[Callable[[], None] | None] = [None] * memory.lookups
        """What each lookup does to offer, once it has."""
        self._batch = self._make_batch(0, 0)

    def batch(self, waiting: int, prefill_tokens: int) -> BatchState:
        """These arrays as a controller takes them."""
        batch = self._batch
        if batch.waiting_requests != waiting or batch.prefill_tokens != prefill_tokens:
            self._batch = batch = self._make_batch(waiting, prefill_tokens)
        return batch

    def _make_batch(self, waiting: int, prefill_tokens: int) -> BatchState:
        has_lookups = self.memory.lookups > 0
        return BatchState(
            handles=self.handles,
            context_tokens=self.context_tokens,
            offer_lengths=self.offer_lengths if has_lookups else None,
            offer_confidence=self.offer_confidence if has_lookups else None,
            last_tokens=self.last_tokens,
            stale_tokens=self.stale_tokens if self.memory.has_model else None,
            room=self.room,
            waiting_requests=waiting,
            prefill_tokens=prefill_tokens,
        )


class StepMemory:
    """Room for the arrays of one step of any size. The first ``lookups`` of ``proposers`` offer."""

    def __init__(
        self, requests: int, proposers: int, lookups: int, k: int, *, has_model: bool
    ) -> None:
        self.proposers, self.lookups, self.k, self.has_model = proposers, lookups, k, has_model
        self.seats = np.zeros(requests, dtype=np.int32)
        self.counts_and_tokens = np.zeros(requests * (2 + k), dtype=np.int32)
        self.handles = np.zeros(requests, dtype=np.int64)
        self.context_tokens = np.zeros(requests, dtype=np.int32)
        self.last_tokens = np.zeros(requests, dtype=np.int32)
        self.room = np.zeros(requests, dtype=np.int16)
        self.committed = np.zeros(requests, dtype=np.int16)
        self.accepted = np.zeros(requests, dtype=np.int16)
        self.matched = np.zeros(proposers * requests, dtype=np.int16)
        self.offered = np.zeros(proposers * requests * k, dtype=np.int32)
        self.offer_lengths = np.zeros(proposers * requests, dtype=np.int16)
        self.offer_confidence = np.zeros(proposers * requests * k, dtype=np.float32)
        self.stale_tokens = np.zeros(proposers * requests, dtype=np.int32)
        self.drafts = np.zeros(requests * k, dtype=np.int32)
        self._views: dict[int, StepArrays] = {}

    def of(self, n: int) -> StepArrays:
        """The arrays for a step of ``n`` requests; they share their memory with any other ``n``."""
        views = self._views.get(n)
        if views is None:
            views = self._views[n] = StepArrays(self, n)
        return views
