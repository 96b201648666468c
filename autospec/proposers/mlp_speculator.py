"""Drafting with a recurrent MLP on the target's last hidden state."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from autospec.engine.cache import SlotCache
from autospec.engine.drafting import DraftTask, Kept, ModelDrafts
from autospec.engine.model import CausalModel, token_tensor
from autospec.errors import ModelError
from autospec.proposers.base import History
from autospec.proposers.checkpoint import Checkpoint
from autospec.proposers.drawing import Drawing
from autospec.proposers.last_state import LastStates
from autospec.proposers.mlp_folder import (
    PUBLISHED,
    architecture,
    read_published,
    read_shared,
    steps_of,
)
from autospec.proposers.mlp_network import MlpNetwork, SharedDrafter
from autospec.records import Int32Array, ProposerInfo

NAME = "mlp_speculator"


class MlpSpeculatorProposer:
    """Drafts token by token: each step takes the state of the step before and the token it drew.

    Tokens are chosen as ``Drawing`` says. A draft needs nothing but the target's last hidden state,
    which every step leaves behind, whoever drafted: there is never anything to catch up on.
    Two kinds of folder are read: published MLP speculators and those of ``autospec
    train-proposer``, which draft over frequent tokens through the target's own output rows.
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
        """``max_k`` None takes all steps that the head was made for. Raises ModelError."""
        if not 0.0 <= min_confidence <= 1.0:
            raise ModelError(f"{name}: min_confidence is {min_confidence}; it must be from 0 to 1")
        made_for = steps_of(checkpoint)
        if max_k is not None and not 1 <= max_k <= made_for:
            raise ModelError(
                f"{name}: max_k is {max_k}; {checkpoint.folder} drafts from 1 to {made_for} tokens"
            )
        self.info = ProposerInfo(name, "sequential", max_k or made_for, needs_state=True)
        self._checkpoint = checkpoint
        self._min_confidence = min_confidence
        self._vocab_size = 0
        self._network: MlpNetwork | None = None
        self._states: LastStates | None = None

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
        states, network = self._own_states, self._network
        assert network is not None
        wanted = np.minimum(task.k, self.info.max_k).astype(np.int64)
        wanted[~states.known(task.history, task.slots)] = 0
        drawing = Drawing(
            task,
            wanted,
            self._vocab_size,
            min_confidence=self._min_confidence,
            vocabulary=network.token_ids,
        )
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

    def commit(self, kept: Kept, history: History) -> None:
        """Keep the hidden state of each slot's last fed token."""
        self._own_states.keep(kept)

    @property
    def _own_states(self) -> LastStates:
        if self._states is None:
            raise ModelError(f"{self.info.name}: used before it was attached to a target")
        return self._states
