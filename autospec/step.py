"""The records of steps that are under way, and what the controller computes around each step."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autospec.arrays import FLOAT32, INT16, INT32, INT64, checked
from autospec.compiled import by_reference, compiled_brief
from autospec.cost import (
    KNOTS,
    CostArrays,
    drafting_seconds,
    forward_seconds,
    learn_seconds,
    tokens_to_pay,
)
from autospec.counts import TokenCounts, count_tokens
from autospec.guard import GuardArrays, note_held, note_speculative
from autospec.hazards import (
    NUM_TOKEN_BUCKETS,
    HazardArrays,
    Rows,
    UInt8Array,
    Verified,
    draft_bins,
    fill_hazards,
    learn_rows,
    offer_bins,
)
from autospec.octave import octave_of
from autospec.policy.base import NO_ARM, View
from autospec.probe import (
    CHEAP,
    DEAR,
    ClockArrays,
    note_arms,
    repeat_probe,
    restart_clocks,
)
from autospec.records import (
    BatchState,
    Float32Array,
    Float64Array,
    Int16Array,
    Int32Array,
    Int64Array,
)
from autospec.rows import UNKNOWN_SLOT, RequestArrays, resolve_handles
from autospec.speedup import note_worth

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
    ``draft_models``, have names of their own. ``kept`` is what ``trim`` leaves of the ``drafted``,
    also where a probe verifies them all; ``worth`` and ``right`` are what would have been verified
    and accepted of those. ``depth``, ``draft_tokens`` and ``catch_up`` sum up the models' work.
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
    unmatched: Int16Array  # [p, n], -1
    depth: Float64Array  # [p]
    draft_tokens: Float64Array  # [p]
    catch_up: Float64Array  # [p]


class Watch(NamedTuple):
    """What watches over steps: probe clocks, the guard, and sums of the measured speedup [2]."""

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


Planned = tuple[bool, int, int, float, float, int, int, float, bool]
"""What is known of a step once it is planned: whether it is, how many handles are not running, the
sum of the context tokens, the seconds of a plain step; expected committed tokens, tokens to verify,
switches of proposer since the requests' last steps, predicted seconds, whether models draft."""

NOT_YET: Planned = (False, 0, 0, 0.0, 0.0, 0, 0, 0.0, False)

Observed = tuple[
    Int16Array, Int16Array, Int16Array, Int16Array, Float64Array, float, float, float, int,
    bool, bool, bool, bool, bool, bool, bool, bool,
]  # fmt: skip
"""What a step brought, and what was known of it. A plain tuple, made in every step: verified,
accepted and committed tokens [n], matched ones of offers [p, n], seconds of drafting [p] and of the
step, seconds of a plain step (0 where that says nothing of this one) and those that were predicted
(0: none), context tokens; whether it was trimmed, a probe, speculation that the policy wanted,
whether the seconds of drafting are told apart, those of the step usable, and all of it teaches what
steps cost; whether there are probe clocks and a guard."""


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
        "predicted_seconds",
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
        self.predicted_seconds = 0.0
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
        counts = np.zeros((10, n), dtype=np.int16)
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
            unmatched=np.full((p, n), -1, dtype=np.int16),
            depth=models[0],
            draft_tokens=models[1],
            catch_up=models[2],
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


@compiled_brief
def look_ahead(
    step: Step,
    handles: Int64Array,
    context_tokens: Int32Array,
    last_tokens: Int32Array,
    room: Int16Array,
    most: Int16Array,
    offers: Int16Array,
    confidence: Float32Array,
    is_cost_known: bool,
) -> tuple[int, int, float]:
    """Fill a step's record with what is known before it is planned.

    ``most`` [p] is the proposers' own limit, 0 for one that may not be used. Returns how many
    handles are not running, the sum of the context tokens, and the seconds of a plain step, 0 if
    that is not known.
    """
    arrays, standing = step.arrays, step.standing
    requests, hazards, model = standing.requests, standing.ahead, standing.cost
    arrays.handles[:] = handles
    unknown = resolve_handles(requests, handles, arrays.slots)
    context = _fill_rows(
        requests, hazards.lookup, arrays, context_tokens, last_tokens, room, most, offers
    )
    offer_bins(hazards.lookup, arrays.offer_lengths, arrays.reach, confidence, arrays.bins)
    rows = Rows(arrays.slots, arrays.workloads, arrays.token_buckets)
    fill_hazards(hazards, rows, arrays.reach, arrays.bins, arrays.hazards)
    n = handles.shape[0]
    plain_seconds = 0.0
    if is_cost_known and n > 0:
        paid = tokens_to_pay(model.shape, model.captured, n, 0, 0)
        plain_seconds = forward_seconds(model.beta, paid, n, context, False, KNOTS)
    return unknown, context, plain_seconds


@compiled_brief
def _fill_rows(
    requests: RequestArrays,
    lookup: NDArray[np.bool_],
    step: StepArrays,
    context_tokens: Int32Array,
    last_tokens: Int32Array,
    room: Int16Array,
    most: Int16Array,
    offers: Int16Array,
) -> int:
    """Workload row and token bucket of every request [n], and what each may draft [p, n]."""
    slots, workloads, token_buckets = step.slots, step.workloads, step.token_buckets
    limits, offer_lengths, reach = step.limits, step.offer_lengths, step.reach
    slot_workload, slot_max_k = requests.workload, requests.max_k
    context = 0
    for i in range(slots.shape[0]):
        s = slots[i]
        workloads[i] = slot_workload[s] + 1
        token_buckets[i] = last_tokens[i] % NUM_TOKEN_BUCKETS
        context += context_tokens[i]
        cap = min(slot_max_k[s], room[i]) if s != UNKNOWN_SLOT else 0
        for p in range(lookup.shape[0]):
            length = most[p]
            offer_lengths[p, i] = 0
            if lookup[p]:
                length = max(0, min(most[p], offers[p, i])) if s != UNKNOWN_SLOT else 0
                offer_lengths[p, i] = length
            limits[p, i] = max(0, min(cap, length))
            reach[p, i] = max(limits[p, i], offer_lengths[p, i])
    return context


@compiled_brief
def bound_decision(
    step: Step,
    proposer: Int16Array,
    k: Int16Array,
    context_tokens: int,
    plain_seconds: float,
    is_probe: bool,
    has_clocks: bool,
    bounded_proposer: Int16Array,
    bounded_k: Int16Array,
) -> tuple[float, int, int, float, bool]:
    """Force a decision into its limits, sum it up, and set the clocks of probes, if it has any.

    Returns (expected committed tokens, tokens to verify, switches of proposer since the requests'
    last steps, predicted seconds, whether models draft).
    """
    arrays, standing = step.arrays, step.standing
    own_proposer, asked = arrays.proposer, arrays.asked
    last_proposer, model = standing.requests.last_proposer, standing.cost
    slots, limits, hazards = arrays.slots, arrays.limits, arrays.hazards
    drafted, kept = arrays.drafted, arrays.kept
    expected = 0.0
    verified = 0
    longest = 0
    switches = 0
    n = slots.shape[0]
    for i in range(n):
        p = proposer[i]
        take = 0
        if 0 <= p < limits.shape[0]:
            take = max(0, min(k[i], limits[p, i]))
        if take == 0:
            p = -1
        bounded_proposer[i] = p
        bounded_k[i] = take
        own_proposer[i] = p
        asked[i] = take
        drafted[i] = take
        kept[i] = take
        expected += 1.0
        survival = 1.0
        for j in range(take):
            survival *= hazards[i, p, j]
            expected += survival
        verified += take
        longest = max(longest, take)
        s = slots[i]
        if s != UNKNOWN_SLOT:
            if last_proposer[s] != p:
                switches += 1
            last_proposer[s] = p
    has_models = _sum_up_models(standing.ahead.lookup, arrays)
    paid = tokens_to_pay(model.shape, model.captured, n, verified, longest)
    drafting = drafting_seconds(
        model.beta, model.models, arrays.depth, arrays.draft_tokens, arrays.catch_up
    )
    seconds = forward_seconds(model.beta, paid, n, context_tokens, verified > 0, KNOTS) + drafting
    if has_clocks and n > 0:
        price = 0.0
        if is_probe and plain_seconds > 0.0:
            # Of a model's probe it is the drafting: others may draft in the same step.
            price = max(0.0, drafting if has_models else seconds - plain_seconds) / plain_seconds
        has_few = verified == 1 or (
            verified > 1 and not _look_dear(model, n, context_tokens, plain_seconds)
        )
        _set_clocks(standing.watch.clocks, arrays, verified > 0, has_few, is_probe, price)
    return expected, verified, switches, seconds, has_models


@compiled_brief
def _look_dear(model: CostArrays, n: int, context_tokens: int, plain_seconds: float) -> bool:
    """Whether one draft token is expected to cost so much that only many together can pay.

    Then many are all that is tried, and nobody learns what a few cost, unless a probe does.
    """
    paid = tokens_to_pay(model.shape, model.captured, n, 1, 1)
    return forward_seconds(model.beta, paid, n, context_tokens, True, KNOTS) > DEAR * plain_seconds


@compiled_brief
def _set_clocks(
    clocks: ClockArrays,
    step: StepArrays,
    has_drafts: bool,
    has_few: bool,
    is_probe: bool,
    price: float,
) -> None:
    """Note who drafts; ``has_few`` says whether the clock of drafts by anybody starts again."""
    last = clocks.arms.shape[0] - 1
    for a in range(last):
        clocks.used[a] = step.depth[clocks.arms[a]] > 0.0
    clocks.used[last] = has_few
    note_arms(clocks, step.octave, not has_drafts, is_probe, price)


@compiled_brief
def _sum_up_models(lookup: NDArray[np.bool_], step: StepArrays) -> bool:
    """What each model does in a step [p]: depth, draft tokens and tokens to catch up on.

    Returns whether any does something.
    """
    depth, draft_tokens, catch_up = step.depth, step.draft_tokens, step.catch_up
    proposer, k, stale = step.proposer, step.drafted, step.stale
    has_models = False
    depth[:] = 0.0
    draft_tokens[:] = 0.0
    catch_up[:] = 0.0
    for i in range(proposer.shape[0]):
        p = proposer[i]
        if p >= 0 and k[i] > 0 and not lookup[p]:
            depth[p] = max(depth[p], k[i])
            draft_tokens[p] += k[i]
            catch_up[p] += stale[p, i]
            has_models = True
    return has_models


@compiled_brief
def bound_drafted(step: Step, drafted: Int16Array) -> bool:
    """Note ``drafted`` [n], forced into 0 to k, in the step's record; True if it is less than k."""
    k, noted, kept = step.arrays.asked, step.arrays.drafted, step.arrays.kept
    is_less = False
    for i in range(k.shape[0]):
        take = max(0, min(drafted[i], k[i]))
        noted[i] = take
        kept[i] = take
        is_less = is_less or take < k[i]
    return is_less


@compiled_brief
def look_again(step: Step, confidence: Float32Array) -> int:
    """Hazards that know the drafts' own confidence [n, k]; returns how many drafts have one.

    It is known if the last token's is: a composite may know that of its later tokens alone.
    """
    arrays, table = step.arrays, step.standing.drafted
    proposer, verify = arrays.proposer, arrays.drafted
    lookup, limits, models = table.lookup, arrays.draft_limits, arrays.draft_models
    limits[:] = 0
    count = 0
    for i in range(proposer.shape[0]):
        p = proposer[i]
        last = verify[i] - 1
        models[i] = -1
        if p >= 0 and not lookup[p] and last >= 0 and not np.isnan(confidence[i, last]):
            limits[p, i] = verify[i]
            models[i] = p
            count += 1
    if count > 0:
        draft_bins(confidence, limits, arrays.draft_bins)
        hazards, known = arrays.draft_hazards, arrays.hazards
        for i in range(known.shape[0]):
            for p in range(known.shape[1]):
                for j in range(known.shape[2]):
                    hazards[i, p, j] = known[i, p, j]
        rows = Rows(arrays.slots, arrays.workloads, arrays.token_buckets)
        fill_hazards(table, rows, limits, arrays.draft_bins, hazards)
    return count


@compiled_brief
def _make_sense(draft_seconds: Float64Array, step_seconds: float) -> bool:
    """Whether seconds of drafting [p] can be a part of a step's."""
    total = 0.0
    for p in range(draft_seconds.shape[0]):
        if draft_seconds[p] < 0.0:
            return False
        total += draft_seconds[p]
    return total < step_seconds


@compiled_brief
def conclude(step: Step, observed: Observed) -> tuple[int, int, bool, bool, bool]:
    """Clean a step's result, count it, learn acceptance and, if it teaches that, cost; sum it up.

    Counts are forced into 0 <= accepted <= verified <= drafted. A probe teaches as if it had been
    trimmed. Returns (tokens paid for, sudden changes of acceptance noticed, whether cost has
    changed for good, whether the guard turns speculation off, whether the seconds of drafting are
    told apart and make sense).
    """
    (
        verified, accepted, committed, matched, draft_seconds, seconds, plain_seconds,
        predicted_seconds, context_tokens, is_trimmed, is_probe, is_speculative, is_told_apart,
        is_timed, teaches_seconds, has_clocks, has_guard,
    ) = observed  # fmt: skip
    is_told_apart = is_told_apart and _make_sense(draft_seconds, seconds)
    arrays, standing = step.arrays, step.standing
    slots, known, drafted, kept = arrays.slots, arrays.known, arrays.drafted, arrays.kept
    handles, proposer = arrays.handles, arrays.proposer
    clean_verified, clean_accepted = arrays.verified, arrays.accepted
    clean_committed, worth, right = arrays.committed, arrays.worth, arrays.right
    resolve_handles(standing.requests, handles, slots)
    total = 0
    total_verified = 0
    longest = 0
    for i in range(handles.shape[0]):
        known[i] = slots[i] != UNKNOWN_SLOT
        clean_verified[i] = max(0, min(drafted[i], verified[i]))
        clean_accepted[i] = max(0, min(clean_verified[i], accepted[i]))
        clean_committed[i] = max(0, committed[i])
        total += clean_committed[i]
        total_verified += clean_verified[i]
        longest = max(longest, clean_verified[i])
        worth[i] = clean_verified[i]
        if is_trimmed and is_probe:
            worth[i] = min(clean_verified[i], kept[i])
        right[i] = min(clean_accepted[i], worth[i])
    rows = Rows(slots, arrays.workloads, arrays.token_buckets)
    drifts = learn_rows(
        standing.ahead,
        rows,
        Verified(known, proposer, arrays.asked, drafted, worth, right, clean_committed),
        matched,
        arrays.offer_lengths,
        arrays.draft_hazards if is_trimmed else arrays.hazards,
        arrays.bins,
        arrays.hazards,
    )
    if is_trimmed:
        learn_rows(
            standing.drafted,
            rows,
            Verified(
                known, arrays.draft_models, clean_verified, clean_verified, clean_verified,
                clean_accepted, clean_committed,
            ),
            arrays.unmatched,
            arrays.offer_lengths,
            arrays.draft_hazards,
            arrays.draft_bins,
            arrays.draft_hazards,
        )  # fmt: skip
    count_tokens(
        standing.counts, proposer, arrays.workloads, drafted, clean_verified, clean_accepted,
        clean_committed,
    )  # fmt: skip
    _sum_up_models(standing.ahead.lookup, arrays)
    model = standing.cost
    n = handles.shape[0]
    paid = tokens_to_pay(model.shape, model.captured, n, total_verified, longest)
    surprised = False
    if teaches_seconds:
        surprised = learn_seconds(
            model, paid, n, context_tokens, total_verified > 0, arrays.depth,
            arrays.draft_tokens, arrays.catch_up, seconds, draft_seconds, is_told_apart,
            arrays.octave,
        )  # fmt: skip
    watch = standing.watch
    if has_clocks and drifts > 0:
        restart_clocks(watch.clocks)
    is_cheap = seconds < CHEAP * predicted_seconds
    if has_clocks and is_probe and teaches_seconds and is_cheap:
        repeat_probe(watch.clocks)
    is_loss = False
    if has_guard:
        note_held(watch.guard, arrays.octave)
    if is_timed and plain_seconds > 0.0:
        plain = n / plain_seconds * seconds
        note_worth(watch.worth, total, plain)
        if has_guard and is_speculative and total_verified > 0:
            is_loss = note_speculative(watch.guard, arrays.octave, total, plain)
    return paid, drifts, surprised, is_loss, is_told_apart
