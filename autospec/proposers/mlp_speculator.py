"""Drafting with a recurrent MLP on the target's last hidden state."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from autospec.engine.cache import SlotCache
from autospec.engine.drafting import DraftTask, ModelDrafts
from autospec.engine.model import CausalModel, token_tensor
from autospec.proposers.checkpoint import Checkpoint
from autospec.proposers.last_state import LastStateProposer
from autospec.proposers.mlp_folder import (
    PUBLISHED,
    architecture,
    read_published,
    read_shared,
    steps_of,
)
from autospec.proposers.mlp_network import MlpNetwork, SharedDrafter

NAME = "mlp_speculator"


class MlpSpeculatorProposer(LastStateProposer):
    """Drafts token by token: each step takes the state of the step before and the token it drew.

    Tokens are chosen as ``Drawing`` says. A draft needs nothing but the target's last hidden state,
    which every step leaves behind, whoever drafted: there is never anything to catch up on.
    Two kinds of folder are read: published MLP speculators and those of ``autospec
    train-proposer``, which draft over frequent tokens through the target's own output rows.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        max_k: int | None = None,
        min_confidence: float = 0.0,
        name: str = NAME,
    ) -> None:
        """``max_k`` None takes all steps that the head was made for. Raises ModelError."""
        super().__init__(
            checkpoint,
            "sequential",
            steps_of(checkpoint),
            max_k=max_k,
            min_confidence=min_confidence,
            name=name,
        )
        self._network: MlpNetwork | None = None

    @classmethod
    def load(
        cls, folder: str | Path, *, max_k: int | None = None, min_confidence: float = 0.0
    ) -> MlpSpeculatorProposer:
        """Read a head's folder; its weights are loaded when it is attached to a target."""
        return cls(Checkpoint.open(folder), max_k=max_k, min_confidence=min_confidence)

    def attach(self, target: CausalModel, cache: SlotCache) -> None:
        """Load the weights beside the target's. Raises ModelError where they do not fit it."""
        checkpoint = self._checkpoint
        if architecture(checkpoint) == PUBLISHED:
            self._network = read_published(checkpoint, target)
        else:
            network, token_ids = read_shared(checkpoint, target)
            self._network = SharedDrafter(network, target, token_ids)
        super().attach(target, cache)

    def draft(self, task: DraftTask) -> ModelDrafts:
        """Draft up to ``task.k`` tokens for each row that wants any."""
        states, network = self._own_states, self._network
        assert network is not None
        drawing = self._begin(task, network.token_ids)
        active = drawing.active(0)
        slots = task.slots[active]
        tokens = task.history.tokens[slots, task.history.lengths[slots] - 1]
        with torch.inference_mode():
            state = network.begin(states.take(slots))
            for depth in range(drawing.width):
                fed = token_tensor(tokens, state.device)
                state, logits = network.advance(depth, state, fed)
                drawing.choose(depth, active, logits)
                going_on = np.flatnonzero(np.isin(active, drawing.active(depth + 1)))
                if len(going_on) < len(active):
                    state = state.index_select(0, torch.from_numpy(going_on).to(state.device))
                active = active[going_on]
                if not len(active):
                    break
                tokens = drawing.tokens[active, depth]
        return drawing.drafts()
