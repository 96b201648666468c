"""Drafting with Medusa heads: all draft tokens at once, from the target's last hidden state.

Source: Cai et al. 2024 (arXiv 2401.10774).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import linear

from autospec.engine.cache import SlotCache
from autospec.engine.drafting import DraftTask, ModelDrafts
from autospec.engine.model import CausalModel
from autospec.proposers.checkpoint import Checkpoint
from autospec.proposers.last_state import LastStateProposer
from autospec.proposers.medusa_folder import MedusaHeads, num_heads, read_medusa

NAME = "medusa"


class MedusaProposer(LastStateProposer):
    """Drafts token ``j`` with head ``j``; no head knows what the others drew.

    Tokens are chosen as ``Drawing`` says. As only the last hidden state is needed, which every step
    leaves behind, there is never anything to catch up on.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        max_k: int | None = None,
        min_confidence: float = 0.0,
        name: str = NAME,
    ) -> None:
        """``max_k`` None takes all heads. Raises ModelError."""
        super().__init__(
            checkpoint,
            "parallel",
            num_heads(checkpoint),
            max_k=max_k,
            min_confidence=min_confidence,
            name=name,
        )
        self._heads: MedusaHeads | None = None

    @classmethod
    def load(
        cls, folder: str | Path, *, max_k: int | None = None, min_confidence: float = 0.0
    ) -> MedusaProposer:
        """Read the heads' folder; weights are loaded when it is attached to a target."""
        return cls(Checkpoint.open(folder), max_k=max_k, min_confidence=min_confidence)

    def attach(self, target: CausalModel, cache: SlotCache) -> None:
        """Load the weights beside the target's. Raises ModelError where they do not fit it."""
        self._heads = read_medusa(self._checkpoint, target)
        super().attach(target, cache)

    def draft(self, task: DraftTask) -> ModelDrafts:
        """Draft up to ``task.k`` tokens for each row that wants any."""
        states, heads = self._own_states, self._heads
        assert heads is not None
        drawing = self._begin(task, heads.token_ids)
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
