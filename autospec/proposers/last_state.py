"""The target's last hidden state of every slot, and what heads that need no more have in common."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from autospec.engine.cache import SlotCache
from autospec.engine.drafting import DraftTask, Kept
from autospec.engine.model import CausalModel
from autospec.errors import ModelError
from autospec.proposers.base import History
from autospec.proposers.checkpoint import Checkpoint
from autospec.proposers.drawing import Drawing
from autospec.records import Int32Array, Kind, ProposerInfo


class LastStates:
    """States [slots, hidden_size] after the last token that the target was fed."""

    def __init__(self, slots: int, target: CausalModel) -> None:
        self._states = torch.zeros(
            (slots, target.hidden_size), dtype=target.dtype, device=target.device
        )
        self._fed: Int32Array = np.zeros(slots, dtype=np.int32)  # tokens behind each state

    def keep(self, kept: Kept) -> None:
        """Note what a step added for good."""
        assert kept.hidden is not None
        rows = np.flatnonzero(kept.counts)
        ends = np.cumsum(kept.counts)[rows] - 1
        device = self._states.device
        last = kept.hidden.index_select(0, torch.from_numpy(ends.astype(np.int64)).to(device))
        slots = torch.from_numpy(kept.slots[rows].astype(np.int64)).to(device)
        self._states[slots] = last[:, 0]
        self._fed[kept.slots[rows]] = kept.starts[rows] + kept.counts[rows]

    def known(self, history: History, slots: Int32Array) -> NDArray[np.bool_]:
        """Which slots [n] have the state that their newest token was chosen from."""
        known: NDArray[np.bool_] = self._fed[slots] == history.lengths[slots] - 1
        return known

    def take(self, slots: Int32Array) -> torch.Tensor:
        """States [n, hidden_size]."""
        return self._states[torch.from_numpy(slots.astype(np.int64)).to(self._states.device)]

    def reset(self, slot: int) -> None:
        """Forget a slot's state."""
        self._fed[slot] = 0

    def memory_bytes(self) -> int:
        """Bytes of all states."""
        return self._states.nbytes


class LastStateProposer:
    """A head that drafts from the target's last hidden state alone.

    Every step leaves that state behind, whoever drafted: there is never anything to catch up on.
    Subclasses load their weights in ``attach`` and draft.
    """

    hidden_layers: tuple[int, ...] = (-1,)

    def __init__(
        self,
        checkpoint: Checkpoint,
        kind: Kind,
        made_for: int,
        *,
        max_k: int | None,
        min_confidence: float,
        name: str,
    ) -> None:
        """``max_k`` None takes all ``made_for`` tokens of the head. Raises ModelError."""
        if not 0.0 <= min_confidence <= 1.0:
            raise ModelError(f"{name}: min_confidence is {min_confidence}; it must be from 0 to 1")
        if max_k is not None and not 1 <= max_k <= made_for:
            raise ModelError(
                f"{name}: max_k is {max_k}; {checkpoint.folder} drafts from 1 to {made_for} tokens"
            )
        self.info = ProposerInfo(name, kind, max_k or made_for, needs_state=True)
        self._checkpoint = checkpoint
        self._min_confidence = min_confidence
        self._vocab_size = 0
        self._states: LastStates | None = None

    def attach(self, target: CausalModel, cache: SlotCache) -> None:
        """Make room for the states of a target. Subclasses load their weights first."""
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

    def commit(self, kept: Kept, history: History) -> None:
        """Keep the hidden state of each slot's last fed token."""
        self._own_states.keep(kept)

    def _begin(self, task: DraftTask, vocabulary: torch.Tensor | None) -> Drawing:
        """Draws up to ``task.k`` tokens for the rows whose state is known."""
        wanted = np.minimum(task.k, self.info.max_k).astype(np.int64)
        wanted[~self._own_states.known(task.history, task.slots)] = 0
        return Drawing(
            task,
            wanted,
            self._vocab_size,
            min_confidence=self._min_confidence,
            vocabulary=vocabulary,
        )

    @property
    def _own_states(self) -> LastStates:
        if self._states is None:
            raise ModelError(f"{self.info.name}: used before it was attached to a target")
        return self._states
