"""The records of steps that are under way, and what their kernels work on."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autospec.acceptance.hazards import HazardArrays, UInt8Array
from autospec.arrays import FLOAT32, INT16, INT32, INT64, checked
from autospec.compiled import by_reference
from autospec.cost.regression import CostArrays
from autospec.octave import octave_of
from autospec.policy.base import NO_ARM, View
from autospec.policy.promise import NUM_PROMISES
from autospec.rails.guard import GuardArrays
from autospec.rails.probe import ClockArrays
from autospec.records import (
    BatchState,
    Float32Array,
    Float64Array,
    Int16Array,
    Int32Array,
    Int64Array,
)
from autospec.step.counts import TokenCounts
from autospec.step.rows import RequestArrays

_SIZES_KEPT = 32
NOT_PLANNED = -1
"""The plan's number of a record that belongs to no step."""


class Nothing:
    """Stand-ins for what a batch state of ``n`` requests may leave out."""

    __slots__ = ("behind", "confidence", "last_tokens", "lengths", "room")

    def __init__(self, n: int, num_proposers: int, k_max: int) -> None:
        p, k = num_proposers, k_max
        self.lengths: Int16Array = np.zeros((p, n), dtype=np.int16)
        self.confidence: Float32Array = np.zeros((p, n, k), dtype=np.float32)
        self.last_tokens: Int32Array = np.zeros(n, dtype=np.int32)
        self.room: Int16Array = np.full(n, np.iinfo(np.int16).max, dtype=np.int16)
        self.behind: Float64Array = np.zeros(n)


Offered = tuple[
    Int64Array, Int32Array, Int32Array, Int16Array, Int16Array, Int16Array, Float32Array
]
"""What a step may be planned from, safe for kernels: handles, context tokens, last tokens and room
[n], what each proposer may draft [p], 0 for one that may not be used, lengths of offers [p, n] and
their confidence [p, n, k]. A plain tuple, made in every step."""


class StepArrays(NamedTuple):
    """What is kept of a step between plan and observe.

    ``reach`` is up to where the step may teach, offers that may not be used included. Evidence
    ``bins`` and ``hazards`` are those before drafting; those that know the drafts, of proposers
    ``draft_models``, have names of their own and are filled for what these drafted. ``kept`` is
    what ``trim`` leaves of the ``drafted``, also where a probe verifies them all; ``worth`` and
    ``right`` are what would have been verified and accepted of those. ``flaws`` is what is wrong
    with a row's counts, ``taught`` the committed tokens of the others. ``depth``, ``draft_tokens``
    and ``catch_up`` sum up the models' work; ``promised`` is what the policy expects of the drafts.
    """

    octave: int
    handles: Int64Array  # [n]
    proposer: Int16Array  # [n]
    asked: Int16Array  # [n]
    slots: Int32Array  # [n]
    workloads: Int32Array  # [n]
    token_buckets: Int32Array  # [n]
    limits: Int16Array  # [p, n]
    offer_lengths: Int16Array  # [p, n]
    reach: Int16Array  # [p, n]
    stale: Float64Array  # [p, n]
    bins: UInt8Array  # [n, p, k]
    hazards: Float32Array  # [n, p, k]
    draft_limits: Int16Array  # [p, n]
    draft_models: Int16Array  # [n]
    draft_bins: UInt8Array  # [n, p, k]
    draft_hazards: Float32Array  # [n, p, k]
    drafted: Int16Array  # [n]
    kept: Int16Array  # [n]
    known: NDArray[np.bool_]  # [n]
    verified: Int16Array  # [n]
    accepted: Int16Array  # [n]
    committed: Int16Array  # [n]
    worth: Int16Array  # [n]
    right: Int16Array  # [n]
    flaws: Int16Array  # [n]
    taught: Int16Array  # [n]
    unmatched: Int16Array  # [p, n], -1
    depth: Float64Array  # [p]
    draft_tokens: Float64Array  # [p]
    catch_up: Float64Array  # [p]
    promised: Float64Array  # [4, p]


class Watch(NamedTuple):
    """What watches over steps: probe clocks, the guard, and sums of the measured speedup [4]."""

    clocks: ClockArrays
    guard: GuardArrays
    worth: Float64Array


class Standing(NamedTuple):
    """What outlives steps: the running requests, acceptance before and after drafting, cost, what
    is counted, and what watches over steps. By reference, all of it.
    """

    requests: RequestArrays
    ahead: HazardArrays
    drafted: HazardArrays
    cost: CostArrays
    counts: TokenCounts
    watch: Watch


class Step(NamedTuple):
    """All that the kernels of a step work on."""

    standing: Standing
    arrays: StepArrays


class StepRecord:
    """What is kept of one step of ``n`` requests between plan and observe.

    The arrays' content is undefined until a kernel fills it.
    """

    __slots__ = (
        "_arrays",
        "_standing",
        "arm",
        "arrays",
        "context_tokens",
        "decision_seconds",
        "has_models",
        "has_stale",
        "is_as_planned",
        "is_trimmed",
        "n",
        "nothing",
        "octave",
        "plain_seconds",
        "plan_id",
        "prefill_seconds",
        "reference",
        "view",
        "waiting",
    )

    def __init__(self, n: int, num_proposers: int, k_max: int) -> None:
        p, k = num_proposers, k_max
        self.n = n
        self.octave = octave_of(n)
        self.plan_id = NOT_PLANNED
        self.decision_seconds = 0.0
        self.plain_seconds = 0.0
        self.prefill_seconds = 0.0
        """What the prompts of the step are expected to take beside it."""
        self.context_tokens = 0
        self.waiting = 0
        self.has_models = False
        self.is_trimmed = False
        self.is_as_planned = False
        """Whether ``drafted`` and ``kept`` are what was asked for."""
        self.arm = NO_ARM
        self.view: View | None = None
        """What a policy was shown, unless it is a program."""
        self.has_stale = False
        self.nothing = Nothing(n, p, k)
        self._standing: Standing | None = None
        rows = np.zeros((3, n), dtype=np.int32)
        offered = np.zeros((4, p, n), dtype=np.int16)
        counts = np.zeros((12, n), dtype=np.int16)
        bins = np.zeros((2, n, p, k), dtype=np.uint8)
        hazards = np.zeros((2, n, p, k), dtype=np.float32)
        models = np.zeros((3, p))
        self.arrays = StepArrays(
            octave=self.octave,
            handles=np.zeros(n, dtype=np.int64),
            proposer=counts[8],
            asked=counts[9],
            slots=rows[0],
            workloads=rows[1],
            token_buckets=rows[2],
            limits=offered[0],
            offer_lengths=offered[1],
            reach=offered[2],
            stale=np.zeros((p, n)),
            bins=bins[0],
            hazards=hazards[0],
            draft_limits=offered[3],
            draft_models=counts[0],
            draft_bins=bins[1],
            draft_hazards=hazards[1],
            drafted=counts[1],
            kept=counts[2],
            known=np.zeros(n, dtype=np.bool_),
            verified=counts[3],
            accepted=counts[4],
            committed=counts[5],
            worth=counts[6],
            right=counts[7],
            flaws=counts[10],
            taught=counts[11],
            unmatched=np.full((p, n), -1, dtype=np.int16),
            depth=models[0],
            draft_tokens=models[1],
            catch_up=models[2],
            promised=np.zeros((NUM_PROMISES, p)),
        )
        self._arrays = by_reference(self.arrays)

    def offered(self, batch: BatchState, most: Int16Array) -> Offered:
        """What the batch offers where proposers may draft ``most`` [p], made safe for kernels."""
        nothing, of_each, of_offers = self.nothing, (self.n,), self.nothing.lengths.shape
        last_tokens, room = batch.last_tokens, batch.room
        lengths, confidence = batch.offer_lengths, batch.offer_confidence
        if batch.stale_tokens is not None:
            self.arrays.stale[:] = batch.stale_tokens
        elif self.has_stale:
            self.arrays.stale[:] = 0.0
        self.has_stale = batch.stale_tokens is not None
        if last_tokens is None:
            last_tokens = nothing.last_tokens
        if room is None:
            room = nothing.room
        elif room.dtype is not INT16:
            room = np.clip(room, 0, np.iinfo(np.int16).max)
        if lengths is None:
            lengths = nothing.lengths
        if confidence is None:
            confidence = nothing.confidence
        return (
            checked(batch.handles, INT64, of_each, "handles"),
            checked(batch.context_tokens, INT32, of_each, "context_tokens"),
            checked(last_tokens, INT32, of_each, "last_tokens"),
            checked(room, INT16, of_each, "room"),
            most,
            checked(lengths, INT16, of_offers, "offer_lengths"),
            checked(confidence, FLOAT32, nothing.confidence.shape, "offer_confidence"),
        )

    def refer_to(self, standing: Standing) -> None:
        """Work on this from now on; ``reference`` is how kernels take the step."""
        if standing is not self._standing:
            self._standing = standing
            self.reference = by_reference(Step(standing, self._arrays))


class StepRecords:
    """Records that no step uses now, by the number of requests.

    What was used last is used first: it is still in the processor's cache. Sizes are kept because
    the number of running requests goes up and down all the time.
    """

    def __init__(self, num_proposers: int, k_max: int) -> None:
        self._shape = (num_proposers, k_max)
        self._free: dict[int, list[StepRecord]] = {}
        self._n = -1  # the number of requests that was asked for last
        self._same: list[StepRecord] = []

    def take(self, n: int, standing: Standing) -> StepRecord:
        """One for a step of ``n`` requests."""
        if n != self._n:
            self._n, self._same = n, self._free.pop(n, [])
            self._free[n] = self._same
            if len(self._free) > _SIZES_KEPT:
                del self._free[next(iter(self._free))]
        record = self._same.pop() if self._same else StepRecord(n, *self._shape)
        record.refer_to(standing)
        return record

    def give_back(self, record: StepRecord) -> None:
        """The step is over, or will never be."""
        record.plan_id = NOT_PLANNED
        record.view = None
        same = self._free.get(record.n)
        if same is not None:
            same.append(record)
