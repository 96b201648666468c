"""The target's last hidden state of every slot, all that some heads need."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from autospec.engine.drafting import Kept
from autospec.engine.model import CausalModel
from autospec.proposers.base import History
from autospec.records import Int32Array


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
