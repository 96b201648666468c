"""Drafting with Medusa heads: all draft tokens at once, from the target's last hidden state.

Source: Cai et al. 2024 (arXiv 2401.10774).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import linear

from autospec.engine.cache import SlotCache
from autospec.engine.drafting import DraftTask, Kept, ModelDrafts
from autospec.engine.model import CausalModel
from autospec.errors import ModelError
from autospec.proposers.base import History
from autospec.proposers.checkpoint import Checkpoint
from autospec.proposers.drawing import Drawing
from autospec.proposers.last_state import LastStates
from autospec.proposers.medusa_folder import MedusaHeads, num_heads, read_medusa
from autospec.records import Int32Array, ProposerInfo

NAME = "medusa"


class MedusaProposer:
    """Drafts token ``j`` with head ``j``; no head knows what the others drew.

    Tokens are chosen as ``Drawing`` says. As only the last hidden state is needed, which every step
    leaves behind, there is never anything to catch up on.
    """

    hidden_layers: tuple[int, ...] = (-1,)

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        max_k: int | None = None,
        min_confidence: float = 0.0,
        name: str = NAME,
    ) -> None:
        """``max_k`` None takes all heads. Raises ModelError."""
        if not 0.0 <= min_confidence <= 1.0:
            raise ModelError(f"{name}: min_confidence is {min_confidence}; it must be from 0 to 1")
        count = num_heads(checkpoint)
        if max_k is not None and not 1 <= max_k <= count:
            raise ModelError(
                f"{name}: max_k is {max_k}; {checkpoint.folder} drafts from 1 to {count} tokens"
            )
        self.info = ProposerInfo(name, "parallel", max_k or count, needs_state=True)
        self._checkpoint = checkpoint
        self._min_confidence = min_confidence
        self._vocab_size = 0
        self._heads: MedusaHeads | None = None
        self._states: LastStates | None = None

    @classmethod
    def load(
        cls, folder: str | Path, *, max_k: int | None = None, min_confidence: float = 0.0
    ) -> MedusaProposer:
        """Read the heads' folder; weights are loaded when it is attached to a target."""
        return cls(Checkpoint.open(folder), max_k=max_k, min_confidence=min_confidence)

    def attach(self, target: CausalModel, cache: SlotCache) -> None:
        """Load the weights beside the target's. Raises ModelError where they do not fit it."""
        self._heads = read_medusa(self._checkpoint, target)
        self._vocab_size = target.vocab_size
        self._states = LastStates(cache.slots, target)

    def reset(self, slot: int) -> None:
        """Forget the slot's last request."""
        self._own_states.reset(slot)

    def stale_tokens(self, history: History, slots: Int32Array) -> Int32Array:
        """Always 0: the last hidden state is kept while others draft."""
        return np.zeros(len(slots), dtype=np.int32)

    def memory_bytes(self) -> int:
        """Bytes of the hidden states that are kept."""
        return self._own_states.memory_bytes()

    def draft(self, task: DraftTask) -> ModelDrafts:
        """Draft up to ``task.k`` tokens for each row that wants any."""
        states, heads = self._own_states, self._heads
        assert heads is not None
        wanted = np.minimum(task.k, self.info.max_k).astype(np.int64)
        wanted[~states.known(task.history, task.slots)] = 0
        drawing = Drawing(
            task,
            wanted,
            self._vocab_size,
            min_confidence=self._min_confidence,
            vocabulary=heads.token_ids,
        )
        rows = drawing.active(0)
        with torch.inference_mode():
            outputs = heads.blocks(states.take(task.slots[rows]), drawing.width)
            for depth, output in enumerate(outputs):
                active = drawing.active(depth)
                if not len(active):
                    break
                kept = torch.from_numpy(np.flatnonzero(np.isin(rows, active))).to(output.device)
                logits = linear(output.index_select(0, kept), heads.rows[depth])
                drawing.choose(depth, active, logits)
        return drawing.drafts()

    def commit(self, kept: Kept, history: History) -> None:
        """Keep the hidden state of each slot's last fed token."""
        self._own_states.keep(kept)

    @property
    def _own_states(self) -> LastStates:
        if self._states is None:
            raise ModelError(f"{self.info.name}: used before it was attached to a target")
        return self._states
