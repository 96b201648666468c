"""Token histories of running requests, as the lookup proposers read them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autospec.proposers.base import History

NO_SLOT = -1
"""Slot of a request that gets no lookups: too long, or more requests than slots."""


class TokenSlots:
    """Rows of a History, given to requests and brought up to date before each step."""

    def __init__(self, slots: int, capacity: int) -> None:
        self.history = History(
            np.zeros((slots, capacity), dtype=np.int32), np.zeros(slots, dtype=np.int32)
        )
        self._capacity = capacity
        self._free = list(range(slots - 1, -1, -1))

    def take(self) -> int:
        """A free slot with an empty history, or NO_SLOT."""
        if not self._free:
            return NO_SLOT
        slot = self._free.pop()
        self.history.lengths[slot] = 0
        return slot

    def give_back(self, slot: int) -> None:
        """The request of ``slot`` has ended or is too long."""
        self._free.append(slot)

    def sync(self, slot: int, tokens: Sequence[int], count: int) -> bool:
        """Append what is new among the first ``count`` tokens; False when there is no room."""
        have = int(self.history.lengths[slot])
        if count > self._capacity:
            return False
        if count < have:
            have = 0
        if count > have:
            self.history.tokens[slot, have:count] = tokens[have:count]
        self.history.lengths[slot] = count
        return True
