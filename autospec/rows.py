"""The controller's table of running requests, and the records of steps that are under way."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from autospec.acceptance import UInt8Array
from autospec.compiled import compiled
from autospec.policy.base import NO_ARM, View
from autospec.records import (
    Float32Array,
    Float64Array,
    Int16Array,
    Int32Array,
    Int64Array,
)

SLOT_BITS = 20
MAX_SLOTS = 1 << SLOT_BITS
UNKNOWN_SLOT = 0
"""The slot of a handle that is not running; never given to a request."""


class RequestRows:
    """Slots for running requests. A handle names a slot and its generation, so it is never reused.

    Slots of ended requests serve later ones; arrays double when there is no room.
    """

    def __init__(self, num_slots: int = 64) -> None:
        self.generation = np.zeros(num_slots, dtype=np.int64)
        self.running = np.zeros(num_slots, dtype=np.bool_)
        self.workload = np.zeros(num_slots, dtype=np.int32)
        self.max_k = np.zeros(num_slots, dtype=np.int16)
        self.target_seconds = np.zeros(num_slots)  # per token; 0: no target
        self.decode_seconds = np.zeros(num_slots)
        self.decode_tokens = np.zeros(num_slots)
        self.last_proposer = np.full(num_slots, -1, dtype=np.int16)
        self._free = list(range(num_slots - 1, UNKNOWN_SLOT, -1))

    def __len__(self) -> int:
        return len(self.generation)

    def start(self, workload: int, max_k: int, target_seconds: float) -> int:
        """Take a slot; returns the handle. Raises OverflowError at 2^20 running requests."""
        if not self._free:
            self._grow()
        slot = self._free.pop()
        self.generation[slot] += 1
        self.running[slot] = True
        self.workload[slot] = workload
        self.max_k[slot] = max_k
        self.target_seconds[slot] = target_seconds
        self.decode_seconds[slot] = 0.0
        self.decode_tokens[slot] = 0.0
        self.last_proposer[slot] = -1
        return (int(self.generation[slot]) << SLOT_BITS) | slot

    def slot_of(self, handle: int) -> int:
        """The running request's slot, UNKNOWN_SLOT when there is none."""
        slot = int(handle) & (MAX_SLOTS - 1)
        if slot >= len(self) or not self.running[slot]:
            return UNKNOWN_SLOT
        return slot if int(self.generation[slot]) == int(handle) >> SLOT_BITS else UNKNOWN_SLOT

    def finish(self, slot: int) -> None:
        """Give the slot back."""
        self.running[slot] = False
        self._free.append(slot)

    def resolve(self, handles: Int64Array, slots: Int32Array) -> int:
        """Write the slots [n] of handles [n]; returns how many are not running."""
        return resolve_handles(handles, self.generation, self.running, slots)

    def _grow(self) -> None:
        old = len(self)
        if old >= MAX_SLOTS:
            raise OverflowError(f"{MAX_SLOTS} requests are running; none more can start")
        for name in (
            "generation",
            "running",
            "workload",
            "max_k",
            "target_seconds",
            "decode_seconds",
            "decode_tokens",
            "last_proposer",
        ):
            array = getattr(self, name)
            setattr(self, name, np.concatenate([array, np.zeros_like(array)]))
        self._free = list(range(2 * old - 1, old - 1, -1))


class Nothing:
    """Stand-ins for what a batch state may leave out, for batches of any size."""

    def __init__(self, num_proposers: int, k_max: int) -> None:
        self._shape = (num_proposers, k_max)
        self._make(0)

    def fit(self, n: int) -> Nothing:
        """The same object, its arrays fitted to ``n`` requests."""
        if n != self.room.shape[0]:
            self._make(n)
        return self

    def _make(self, n: int) -> None:
        p, k = self._shape
        self.lengths: Int16Array = np.zeros((p, n), dtype=np.int16)
        self.confidence: Float32Array = np.zeros((p, n, k), dtype=np.float32)
        self.matched: Int16Array = np.full((p, n), -1, dtype=np.int16)
        self.last_tokens: Int32Array = np.zeros(n, dtype=np.int32)
        self.room: Int16Array = np.full(n, np.iinfo(np.int16).max, dtype=np.int16)
        self.behind: Float64Array = np.zeros(n)


class StepRecord:
    """What the controller remembers of a step between plan and observe; arrays are reused."""

    def __init__(self, num_proposers: int, k_max: int) -> None:
        self._shape = (num_proposers, k_max)
        self.plan_id = -1
        self.decision_seconds = 0.0
        self.plain_seconds = 0.0
        self.context_tokens = 0
        self.waiting = 0
        self.is_trimmed = False
        self.has_models = False
        self.view: View | None = None
        self.arm = NO_ARM
        self._make(0)

    def resize(self, n: int) -> None:
        """Fit the arrays to ``n`` requests; their content is undefined."""
        if n != self.slots.shape[0]:
            self._make(n)

    def _make(self, n: int) -> None:
        p, k = self._shape
        self.slots: Int32Array = np.zeros(n, dtype=np.int32)
        self.workloads: Int32Array = np.zeros(n, dtype=np.int32)
        self.token_buckets: Int32Array = np.zeros(n, dtype=np.int32)
        self.limits: Int16Array = np.zeros((p, n), dtype=np.int16)
        self.offer_lengths: Int16Array = np.zeros((p, n), dtype=np.int16)
        self.reach: Int16Array = np.zeros((p, n), dtype=np.int16)
        self.drafted: Int16Array = np.zeros(n, dtype=np.int16)
        self.known = np.zeros(n, dtype=np.bool_)
        self.bins: UInt8Array = np.zeros((n, p, k), dtype=np.uint8)
        self.hazards: Float32Array = np.zeros((n, p, k), dtype=np.float32)
        self.draft_bins: UInt8Array = np.zeros((n, p, k), dtype=np.uint8)
        self.draft_hazards: Float32Array = np.zeros((n, p, k), dtype=np.float32)
        self.draft_limits: Int16Array = np.zeros((p, n), dtype=np.int16)
        self.draft_models: Int16Array = np.zeros(n, dtype=np.int16)
        self.kept: Int16Array = np.zeros(n, dtype=np.int16)
        self.stale: Float64Array = np.zeros((p, n))


@compiled
def resolve_handles(
    handles: Int64Array,
    generation: Int64Array,
    running: NDArray[np.bool_],
    slots: Int32Array,
) -> int:
    """Slots [n] of handles [n]; 0 for those that are not running, which are counted."""
    unknown = 0
    for i in range(handles.shape[0]):
        slot = handles[i] & ((1 << 20) - 1)
        if (
            handles[i] > 0
            and slot < running.shape[0]
            and running[slot]
            and generation[slot] == handles[i] >> 20
        ):
            slots[i] = slot
        else:
            slots[i] = 0
            unknown += 1
    return unknown


@compiled
def fill_rows(
    handles: Int64Array,
    generation: Int64Array,
    running: NDArray[np.bool_],
    slot_max_k: Int16Array,
    slot_workload: Int32Array,
    context_tokens: Int32Array,
    last_tokens: Int32Array,
    room: Int16Array,
    most: Int16Array,
    lookup: NDArray[np.bool_],
    offers: Int16Array,
    num_token_buckets: int,
    slots: Int32Array,
    workloads: Int32Array,
    token_buckets: Int32Array,
    limits: Int16Array,
    offer_lengths: Int16Array,
    reach: Int16Array,
) -> tuple[int, int]:
    """Slot, workload row and token bucket of every request [n], and what each may draft [p, n].

    ``most`` [p] is the proposers' own limit, 0 for one that may not be used; ``reach`` [p, n] is up
    to where the step may teach, offers that may not be used included. Returns how many handles
    are not running, and the sum of the context tokens.
    """
    unknown = resolve_handles(handles, generation, running, slots)
    context = 0
    for i in range(slots.shape[0]):
        s = slots[i]
        workloads[i] = slot_workload[s] + 1
        token_buckets[i] = last_tokens[i] % num_token_buckets
        context += context_tokens[i]
        cap = min(slot_max_k[s], room[i]) if s > 0 else 0
        for p in range(limits.shape[0]):
            length = most[p]
            offer_lengths[p, i] = 0
            if lookup[p]:
                length = max(0, min(most[p], offers[p, i])) if s > 0 else 0
                offer_lengths[p, i] = length
            limits[p, i] = max(0, min(cap, length))
            reach[p, i] = max(limits[p, i], offer_lengths[p, i])
    return unknown, context


@compiled
def sum_up_models(
    proposer: Int16Array,
    k: Int16Array,
    stale: Float64Array,
    lookup: NDArray[np.bool_],
    depth: Float64Array,
    draft_tokens: Float64Array,
    catch_up: Float64Array,
) -> None:
    """What each model does in a step [p]: depth, draft tokens and tokens to catch up on."""
    depth[:] = 0.0
    draft_tokens[:] = 0.0
    catch_up[:] = 0.0
    for i in range(proposer.shape[0]):
        p = proposer[i]
        if p >= 0 and k[i] > 0 and not lookup[p]:
            depth[p] = max(depth[p], k[i])
            draft_tokens[p] += k[i]
            catch_up[p] += stale[p, i]


@compiled
def bound_decision(
    proposer: Int16Array,
    k: Int16Array,
    limits: Int16Array,
    hazards: Float32Array,
    last_proposer: Int16Array,
    slots: Int32Array,
    lookup: NDArray[np.bool_],
    stale: Float64Array,
    bounded_proposer: Int16Array,
    bounded_k: Int16Array,
    depth: Float64Array,
    draft_tokens: Float64Array,
    catch_up: Float64Array,
) -> tuple[float, int, int, int]:
    """Force a decision into its limits and sum it up.

    Returns (expected committed tokens, tokens to verify, longest k, switches of proposer), and
    fills what the models will do, as ``sum_up_models``.
    """
    expected = 0.0
    verified = 0
    longest = 0
    switches = 0
    for i in range(slots.shape[0]):
        p = proposer[i]
        take = 0
        if 0 <= p < limits.shape[0]:
            take = max(0, min(k[i], limits[p, i]))
        if take == 0:
            p = -1
        bounded_proposer[i] = p
        bounded_k[i] = take
        expected += 1.0
        survival = 1.0
        for j in range(take):
            survival *= hazards[i, p, j]
            expected += survival
        verified += take
        longest = max(longest, take)
        s = slots[i]
        if s > 0:
            if last_proposer[s] != p:
                switches += 1
            last_proposer[s] = p
    sum_up_models(bounded_proposer, bounded_k, stale, lookup, depth, draft_tokens, catch_up)
    return expected, verified, longest, switches


@compiled
def select_drafted(
    proposer: Int16Array,
    verify: Int16Array,
    confidence: Float32Array,
    lookup: NDArray[np.bool_],
    limits: Int16Array,
    models: Int16Array,
) -> int:
    """The model drafts whose confidence is known: limits [p, n] and proposers [n], -1 for others.

    It is known if the last token's is: a composite may know that of its later tokens alone.
    Returns their number.
    """
    limits[:] = 0
    models[:] = -1
    count = 0
    for i in range(proposer.shape[0]):
        p = proposer[i]
        last = verify[i] - 1
        if p >= 0 and not lookup[p] and last >= 0 and not np.isnan(confidence[i, last]):
            limits[p, i] = verify[i]
            models[i] = p
            count += 1
    return count


@compiled
def bound_drafted(drafted: Int16Array, k: Int16Array, verify: Int16Array) -> None:
    """``drafted`` [n] forced into 0 to k."""
    for i in range(k.shape[0]):
        verify[i] = max(0, min(drafted[i], k[i]))


@compiled
def clean_result(
    handles: Int64Array,
    generation: Int64Array,
    running: NDArray[np.bool_],
    drafted: Int16Array,
    verified: Int16Array,
    accepted: Int16Array,
    committed: Int16Array,
    slots: Int32Array,
    known: NDArray[np.bool_],
    clean_verified: Int16Array,
    clean_accepted: Int16Array,
    clean_committed: Int16Array,
) -> tuple[int, int, int]:
    """Who still runs, and the counts forced into 0 <= accepted <= verified <= drafted.

    Returns the committed tokens, the verified ones, and the most verified of one request.
    """
    resolve_handles(handles, generation, running, slots)
    total = 0
    total_verified = 0
    longest = 0
    for i in range(handles.shape[0]):
        known[i] = slots[i] != 0
        clean_verified[i] = max(0, min(drafted[i], verified[i]))
        clean_accepted[i] = max(0, min(clean_verified[i], accepted[i]))
        clean_committed[i] = max(0, committed[i])
        total += clean_committed[i]
        total_verified += clean_verified[i]
        longest = max(longest, clean_verified[i])
    return total, total_verified, longest
