"""A model proposer that stands before another one, for those who want to hear its drafts."""

from __future__ import annotations

from autospec.engine.cache import SlotCache
from autospec.engine.drafting import DraftTask, Kept, ModelDrafts, ModelProposer
from autospec.engine.model import CausalModel
from autospec.proposers.base import History
from autospec.records import Int32Array, ProposerInfo


class Relay:
    """Passes everything on to ``inner``."""

    def __init__(self, inner: ModelProposer) -> None:
        self.info: ProposerInfo = inner.info
        self.hidden_layers = inner.hidden_layers
        self._inner = inner

    def attach(self, target: CausalModel, cache: SlotCache) -> None:
        """Passed on."""
        self._inner.attach(target, cache)

    def reset(self, slot: int) -> None:
        """Passed on."""
        self._inner.reset(slot)

    def stale_tokens(self, history: History, slots: Int32Array) -> Int32Array:
        """Passed on."""
        return self._inner.stale_tokens(history, slots)

    def memory_bytes(self) -> int:
        """Passed on."""
        return self._inner.memory_bytes()

    def draft(self, task: DraftTask) -> ModelDrafts:
        """Passed on."""
        return self._inner.draft(task)

    def commit(self, kept: Kept, history: History) -> None:
        """Passed on."""
        self._inner.commit(kept, history)
