"""What the controller computes around each step, in kernels."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from autospec.acceptance.hazards import (
    NUM_TOKEN_BUCKETS,
    Rows,
    Verified,
    draft_bins,
    fill_hazards,
    learn_rows,
    offer_bins,
)
from autospec.compiled import compiled_brief, inlined
from autospec.cost.coefficients import KNOTS, drafting_seconds, forward_seconds
from autospec.cost.regression import CostArrays, learn_seconds
from autospec.cost.shapes import PADDED, tokens_to_pay
from autospec.rails.guard import note_held, note_speculative
from autospec.rails.probe import (
    CHEAP,
    DEAR,
    ClockArrays,
    look_at_plain,
    note_arms,
    repeat_probe,
    restart_clocks,
    several,
)
from autospec.rails.speedup import note_worth
from autospec.records import Float32Array, Float64Array, Int16Array, Int32Array, Int64Array
from autospec.step.counts import count_tokens
from autospec.step.flaws import NOTHING_COMMITTED, SOUND, flaw_of
from autospec.step.record import Step, StepArrays
from autospec.step.rows import UNKNOWN_SLOT, RequestArrays, resolve_handles

Planned = tuple[bool, int, int, float, float, int, int, float, bool]
"""What is known of a step once it is planned: whether it is, how many handles are not running, the
sum of the context tokens, the seconds of a plain step; expected committed tokens, tokens to verify
for certain, switches of proposer since the requests' last steps, predicted seconds, whether models
draft."""

NOT_YET: Planned = (False, 0, 0, 0.0, 0.0, 0, 0, 0.0, False)

Trimmed = tuple[bool, bool, float, float]
"""What a second look at a step brought: whether fewer were drafted than planned, whether the
drafts' confidences told which are worth verifying, and if so, expected committed tokens and
seconds."""

Observed = tuple[
    Int16Array, Int16Array, Int16Array, Int16Array, Float64Array, float, float, int,
    bool, bool, bool, bool, bool, bool, bool, bool,
]  # fmt: skip
"""What a step brought, and what was known of it. A plain tuple, made in every step: verified,
accepted and committed tokens [n], matched ones of offers [p, n], seconds of drafting [p] and of the
step, seconds of a plain step (0 where that says nothing of this one), context tokens; whether it
was trimmed, a probe, speculation that the policy wanted, whether the seconds of drafting are told
apart, those of the step usable, and all of it teaches what steps cost; whether there are probe
clocks and a guard."""


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
    trims: bool,
    bounded_proposer: Int16Array,
    bounded_k: Int16Array,
) -> tuple[float, int, int, float, bool]:
    """Force a decision into its limits, sum it up, and set the clocks of probes, if it has any.

    What is appended to a head counts for nothing where a policy ``trims`` it: nobody knows yet how
    much of it will be there, and what is verified must be worth its time.

    Returns (expected committed tokens, tokens to verify for certain, switches of proposer since the
    requests' last steps, predicted seconds, whether models draft).
    """
    arrays, standing = step.arrays, step.standing
    own_proposer, asked = arrays.proposer, arrays.asked
    last_proposer, model = standing.requests.last_proposer, standing.cost
    slots, limits, hazards = arrays.slots, arrays.limits, arrays.hazards
    drafted, kept, heads = arrays.drafted, arrays.kept, standing.ahead.heads
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
        if trims and p >= 0 and heads[p, 1] > 0:
            take = min(take, heads[p, 1])
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
    _, has_models, drafting, seconds = _predict(step, n, verified, longest, context_tokens)
    if has_clocks and n > 0:
        price = 0.0
        if is_probe and plain_seconds > 0.0:
            # Of a model's probe it is the drafting: others may draft in the same step.
            price = max(0.0, drafting if has_models else seconds - plain_seconds) / plain_seconds
        has_few = verified == 1 or (
            verified > 1 and not _look_dear(model, n, context_tokens, plain_seconds)
        )
        draft_tokens = n * longest if model.shape == PADDED else verified
        _set_clocks(standing.watch.clocks, arrays, draft_tokens, has_few, is_probe, price)
    return expected, verified, switches, seconds, has_models


@inlined
def _predict(
    step: Step, n: int, verified: int, longest: int, context_tokens: int
) -> tuple[int, bool, float, float]:
    """Tokens paid for, whether models draft, the seconds that drafting takes, and those of the
    whole step in which ``n`` requests verify so many tokens, the ``longest`` draft of them so many.
    """
    arrays, model = step.arrays, step.standing.cost
    has_models = _sum_up_models(step.standing.ahead.lookup, arrays)
    paid = tokens_to_pay(model.shape, model.captured, n, verified, longest)
    drafting = drafting_seconds(
        model.beta, model.models, arrays.depth, arrays.draft_tokens, arrays.catch_up
    )
    forward = forward_seconds(model.beta, paid, n, context_tokens, verified > 0, KNOTS)
    return paid, has_models, drafting, forward + drafting


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
    draft_tokens: int,
    has_few: bool,
    is_probe: bool,
    price: float,
) -> None:
    """Note who drafts, and how much; ``has_few`` says whether the clock of drafts by anybody starts
    again."""
    last = clocks.arms.shape[0] - 1
    for a in range(last - 1):
        clocks.used[a] = step.depth[clocks.arms[a]] > 0.0
    clocks.used[last - 1] = has_few
    clocks.used[last] = draft_tokens >= several(clocks, step.handles.shape[0])
    note_arms(clocks, step.octave, draft_tokens, is_probe, price)


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
            p = proposer[i]
            for j in range(verify[i]):  # 0 where nobody drafts
                hazards[i, p, j] = known[i, p, j]
        rows = Rows(arrays.slots, arrays.workloads, arrays.token_buckets)
        fill_hazards(table, rows, limits, arrays.draft_bins, hazards)
    return count


@compiled_brief
def foresee(step: Step, k: Int16Array, context_tokens: int) -> tuple[float, float]:
    """Tokens that a step is expected to commit, and its seconds, if ``k`` [n] tokens of the drafts
    are verified that a second look was taken at."""
    arrays = step.arrays
    proposer, models = arrays.proposer, arrays.draft_models
    expected = 0.0
    verified = 0
    longest = 0
    n = k.shape[0]
    for i in range(n):
        p = proposer[i]
        hazards = arrays.draft_hazards if models[i] >= 0 else arrays.hazards
        expected += 1.0
        survival = 1.0
        for j in range(k[i]):  # 0 where nobody drafts
            survival *= hazards[i, p, j]
            expected += survival
        verified += k[i]
        longest = max(longest, k[i])
    _, _, _, seconds = _predict(step, n, verified, longest, context_tokens)
    return expected, seconds


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
def conclude(step: Step, observed: Observed) -> tuple[int, int, int, int, bool, bool, bool, bool]:
    """Clean a step's result, count it, learn acceptance and, if it teaches that, cost; sum it up.

    Counts are forced into 0 <= accepted <= verified <= drafted and 0 <= committed <= verified + 1.
    A row with a flaw teaches nothing of acceptance and counts as not verified; the step is still
    paid for and worth what they were forced into. A probe teaches as if it had been trimmed.

    Returns (tokens paid for, draft tokens among them, running requests whose rows are flawed,
    sudden changes of acceptance noticed, whether cost has changed for good, whether the guard turns
    speculation off, whether the seconds of drafting are told apart and make sense, whether a probe
    took far less than expected, other than one of models whose times are told apart).
    """
    (
        verified, accepted, committed, matched, draft_seconds, seconds, plain_seconds,
        context_tokens, is_trimmed, is_probe, is_speculative, is_told_apart, is_timed,
        teaches_seconds, has_clocks, has_guard,
    ) = observed  # fmt: skip
    is_told_apart = is_told_apart and _make_sense(draft_seconds, seconds)
    arrays, standing = step.arrays, step.standing
    slots, known, drafted, kept = arrays.slots, arrays.known, arrays.drafted, arrays.kept
    handles, proposer = arrays.handles, arrays.proposer
    clean_verified, clean_accepted = arrays.verified, arrays.accepted
    clean_committed, worth, right = arrays.committed, arrays.worth, arrays.right
    flaws, taught, draft_models = arrays.flaws, arrays.taught, arrays.draft_models
    most_matched = arrays.bins.shape[2]
    resolve_handles(standing.requests, handles, slots)
    flawed = 0
    total = 0
    total_verified = 0
    longest = 0
    for i in range(handles.shape[0]):
        known[i] = slots[i] != UNKNOWN_SLOT
        clean_verified[i] = max(0, min(drafted[i], verified[i]))
        clean_accepted[i] = max(0, min(clean_verified[i], accepted[i]))
        clean_committed[i] = max(0, min(clean_verified[i] + 1, committed[i]))
        total += clean_committed[i]
        total_verified += clean_verified[i]
        longest = max(longest, clean_verified[i])
        flaws[i] = flaw_of(
            drafted[i], verified[i], accepted[i], committed[i], matched, i, most_matched
        )
        taught[i] = clean_committed[i]
        if flaws[i] != SOUND:
            clean_verified[i] = 0
            clean_accepted[i] = 0
            taught[i] = 0
            draft_models[i] = -1
            # Of a request that ended meanwhile nobody need know.
            flawed += known[i]
        worth[i] = clean_verified[i]
        if is_trimmed and is_probe:
            worth[i] = min(clean_verified[i], kept[i])
        right[i] = min(clean_accepted[i], worth[i])
    if total == 0 and is_timed and flawed == 0:
        for i in range(handles.shape[0]):
            if known[i]:
                flaws[i] = NOTHING_COMMITTED
                flawed += 1
    rows = Rows(slots, arrays.workloads, arrays.token_buckets)
    drifts = learn_rows(
        standing.ahead,
        rows,
        Verified(known, proposer, arrays.asked, drafted, worth, right, taught),
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
                known, draft_models, clean_verified, clean_verified, clean_verified,
                clean_accepted, taught,
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
    model = standing.cost
    n = handles.shape[0]
    paid, has_models, _, predicted = _predict(step, n, total_verified, longest, context_tokens)
    surprised = False
    is_cheap = False
    if teaches_seconds:
        is_by_itself = not (has_models and is_told_apart)  # else that model's times tell
        is_cheap = is_probe and is_by_itself and seconds < CHEAP * predicted
        surprised = learn_seconds(
            model, paid, n, context_tokens, total_verified > 0, arrays.depth,
            arrays.draft_tokens, arrays.catch_up, seconds, draft_seconds, is_told_apart,
            arrays.octave, is_cheap,
        )  # fmt: skip
    watch = standing.watch
    if has_clocks and drifts > 0:
        restart_clocks(watch.clocks)
    if has_clocks and surprised:
        look_at_plain(watch.clocks, arrays.octave)
    if has_clocks and is_cheap:
        repeat_probe(watch.clocks, arrays.octave, arrays.depth, total_verified)
    is_loss = False
    if has_guard:
        note_held(watch.guard, arrays.octave)
    if is_timed and plain_seconds > 0.0:
        plain = note_worth(watch.worth, total, n / plain_seconds, seconds, predicted)
        if has_guard and is_speculative and total_verified > 0:
            is_loss = note_speculative(watch.guard, arrays.octave, total, plain)
    return (
        paid, total_verified, flawed, drifts, surprised, is_loss, is_told_apart, is_cheap,
    )  # fmt: skip
