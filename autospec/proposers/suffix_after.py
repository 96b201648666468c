"""A suffix lookup that goes on where a head's draft ends, as one draft.

A head is right about the next tokens of any text, a suffix lookup about long copies. Where the
head's tokens lead into something that was there before, the lookup continues them at no cost.
"""

from __future__ import annotations

import numpy as np

from autospec.engine.cache import SlotCache
from autospec.engine.drafting import DraftTask, Kept, ModelDrafts, ModelProposer
from autospec.engine.model import CausalModel
from autospec.errors import ModelError
from autospec.proposers.base import Drafts, History
from autospec.proposers.suffix import SuffixProposer
from autospec.records import Float32Array, Int32Array, Int64Array, ProposerInfo


class SuffixAfter:
    """Drafts up to ``head_k`` tokens with ``head``, then what ``suffix`` finds behind them.

    The confidence of a token is that of whoever drafted it. Under sampling the head's tokens have
    their distributions and the suffix's are point masses. As the head drafts ``head_k`` tokens
    however many follow, the kind is ``parallel``. With ``shared`` the head and the lookup are
    proposers of the same engine themselves, which looks after them; else they belong to this one,
    and the lookup remembers no ended requests.
    """

    def __init__(
        self,
        head: ModelProposer,
        suffix: SuffixProposer,
        *,
        head_k: int = 2,
        shared: bool = False,
        name: str | None = None,
    ) -> None:
        name = name or f"suffix_after({head.info.name})"
        if not 1 <= head_k <= head.info.max_k:
            raise ModelError(
                f"{name}: head_k is {head_k}; it must be from 1 to {head.info.max_k}, the most "
                f"that {head.info.name} drafts"
            )
        self.info = ProposerInfo(
            name,
            "parallel",
            head_k + suffix.info.max_k,
            needs_state=head.info.needs_state,
            head=head.info.name,
            head_k=head_k,
        )
        self.hidden_layers = head.hidden_layers
        self._head = head
        self._suffix = suffix
        self._head_k = head_k
        self._shared = shared

    def attach(self, target: CausalModel, cache: SlotCache) -> None:
        """Passed on to the head."""
        if not self._shared:
            self._head.attach(target, cache)

    def reset(self, slot: int) -> None:
        """Passed on to both."""
        if not self._shared:
            self._head.reset(slot)
            self._suffix.reset(slot)

    def stale_tokens(self, history: History, slots: Int32Array) -> Int32Array:
        """Those of the head; the lookup catches up in microseconds."""
        return self._head.stale_tokens(history, slots)

    def memory_bytes(self) -> int:
        """Bytes of both, where they are not shared."""
        if self._shared:
            return 0
        return self._head.memory_bytes() + self._suffix.memory_bytes()

    def commit(self, kept: Kept, history: History) -> None:
        """Passed on to the head."""
        if not self._shared:
            self._head.commit(kept, history)

    def draft(self, task: DraftTask) -> ModelDrafts:
        """Draft up to ``task.k`` tokens for each row that wants any."""
        wanted = np.minimum(task.k, self._head_k).astype(np.int16)
        first = self._head.draft(DraftTask(task.history, task.slots, wanted, task.sampling))
        shape = (len(task.slots), int(task.k.max(initial=0)))
        tokens: Int64Array = np.zeros(shape, dtype=np.int64)
        confidence: Float32Array = np.zeros(shape, dtype=np.float32)
        probs_row: Int64Array = np.full(shape, -1, dtype=np.int64)
        lengths = first.lengths.copy()
        depth = first.tokens.shape[1]
        tokens[:, :depth] = first.tokens
        confidence[:, :depth] = first.confidence
        probs_row[:, :depth] = np.where(np.arange(depth) < lengths[:, None], first.probs_row, -1)
        for tail in np.unique(first.lengths[task.k > first.lengths]).tolist():
            rows = np.flatnonzero((first.lengths == tail) & (task.k > tail))
            added = self._go_on(task, rows, tokens, tail)
            count = np.minimum(added.lengths, task.k[rows] - tail)
            width = min(added.tokens.shape[1], shape[1] - tail)
            tokens[rows, tail : tail + width] = added.tokens[:, :width]
            confidence[rows, tail : tail + width] = added.confidence[:, :width]
            lengths[rows] = tail + count
        return ModelDrafts(tokens, lengths, confidence, first.probs, probs_row)

    def _go_on(self, task: DraftTask, rows: Int64Array, tokens: Int64Array, tail: int) -> Drafts:
        """What the lookup finds behind the first ``tail`` draft tokens of ``rows``."""
        history, slots = task.history, task.slots[rows]
        lengths = history.lengths.copy()
        lengths[slots] += tail
        columns = history.lengths[slots][:, None] + np.arange(tail)
        # Behind a request's length its row is free: a draft is always written there.
        history.tokens[slots[:, None], columns] = tokens[rows, :tail]
        most = self._suffix.info.max_k
        found = Drafts(
            np.zeros((len(rows), most), dtype=np.int32),
            np.zeros(len(rows), dtype=np.int16),
            np.zeros((len(rows), most), dtype=np.float32),
        )
        self._suffix.propose(History(history.tokens, lengths), slots, found, tail=tail)
        return found
