"""The controller's table of running requests."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autospec.compiled import compiled_brief
from autospec.records import (
    Float64Array,
    Int16Array,
    Int32Array,
    Int64Array,
)

SLOT_BITS = 20
MAX_SLOTS = 1 << SLOT_BITS
UNKNOWN_SLOT = 0
"""The slot of a handle that is not running; never given to a request."""


NO_HANDLE = 0
"""A handle that no request ever has."""


class RequestArrays(NamedTuple):
    """What is kept of every running request, by slot.

    ``read`` is the number of the last batch that a slot was found in, that of UNKNOWN_SLOT the
    number of batches.
    """

    generation: Int64Array
    running: NDArray[np.bool_]
    workload: Int32Array
    max_k: Int16Array
    target_seconds: Float64Array  # per token; 0: no target
    decode_seconds: Float64Array
    decode_tokens: Float64Array
    last_proposer: Int16Array
    read: Int64Array


class RequestRows:
    """Slots for running requests. A handle names a slot and its generation, so it is never reused.

    Slots of ended requests serve later ones; arrays double when there is no room.
    """

    def __init__(self, num_slots: int = 64) -> None:
        self.arrays = RequestArrays(
            np.zeros(num_slots, dtype=np.int64),
            np.zeros(num_slots, dtype=np.bool_),
            np.zeros(num_slots, dtype=np.int32),
            np.zeros(num_slots, dtype=np.int16),
            np.zeros(num_slots),
            np.zeros(num_slots),
            np.zeros(num_slots),
            np.full(num_slots, -1, dtype=np.int16),
            np.zeros(num_slots, dtype=np.int64),
        )
        self._free = list(range(num_slots - 1, UNKNOWN_SLOT, -1))

    def __len__(self) -> int:
        return len(self.arrays.generation)

    def start(self, workload: int, max_k: int, target_seconds: float) -> int:
        """Take a slot; returns the handle. Raises OverflowError at 2^20 running requests."""
        if not self._free:
            self._grow()
        slot = self._free.pop()
        arrays = self.arrays
        arrays.generation[slot] += 1
        arrays.running[slot] = True
        arrays.workload[slot] = workload
        arrays.max_k[slot] = max_k
        arrays.target_seconds[slot] = target_seconds
        arrays.decode_seconds[slot] = 0.0
        arrays.decode_tokens[slot] = 0.0
        arrays.last_proposer[slot] = -1
        return (int(arrays.generation[slot]) << SLOT_BITS) | slot

    def slot_of(self, handle: int) -> int:
        """The running request's slot, UNKNOWN_SLOT when there is none."""
        slot = int(handle) & (MAX_SLOTS - 1)
        if slot >= len(self) or not self.arrays.running[slot]:
            return UNKNOWN_SLOT
        generation = int(self.arrays.generation[slot])
        return slot if generation == int(handle) >> SLOT_BITS else UNKNOWN_SLOT

    @property
    def running(self) -> int:
        """How many requests run."""
        return len(self) - 1 - len(self._free)

    def finish(self, slot: int) -> None:
        """Give the slot back."""
        self.arrays.running[slot] = False
        self._free.append(slot)

    def _grow(self) -> None:
        old = len(self)
        if old >= MAX_SLOTS:
            raise OverflowError(f"{MAX_SLOTS} requests are running; none more can start")
        self.arrays = RequestArrays(
            *(np.concatenate([array, np.zeros_like(array)]) for array in self.arrays)
        )
        self._free = list(range(2 * old - 1, old - 1, -1))


@compiled_brief
def resolve_handles(requests: RequestArrays, handles: Int64Array, slots: Int32Array) -> int:
    """Slots [n] of handles [n]; 0 for those that are not running or were given before, which are
    counted."""
    read = requests.read
    read[UNKNOWN_SLOT] += 1
    unknown = 0
    for i in range(handles.shape[0]):
        slot = handles[i] & (MAX_SLOTS - 1)
        if (
            handles[i] > 0
            and slot < requests.running.shape[0]
            and requests.running[slot]
            and requests.generation[slot] == handles[i] >> SLOT_BITS
            and read[slot] != read[UNKNOWN_SLOT]
        ):
            slots[i] = slot
            read[slot] = read[UNKNOWN_SLOT]
        else:
            slots[i] = UNKNOWN_SLOT
            unknown += 1
    return unknown
