"""The default policy's step in compiled code: what it remembers, its decision, its second look."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autospec.allocation.choice import Aim, Prices, Workspace
from autospec.allocation.depths import copy_depths
from autospec.allocation.gains import latency_gains, throughput_gains, weigh
from autospec.allocation.solve import solve
from autospec.compiled import compiled_brief
from autospec.cost.coefficients import (
    CONTEXT,
    KNOTS,
    SLOPES,
    SPECULATING,
    forward_seconds,
    tokens_to_trust,
)
from autospec.cost.regression import CostArrays
from autospec.cost.shapes import PADDED
from autospec.policy.appended import (
    AppendedArrays,
    fold_appended,
    note_appended,
    unfold_appended,
)
from autospec.policy.going_rate import RateArrays, knows_all, note_rate, tokens_per_second
from autospec.policy.kept_share import ShareArrays, note_kept
from autospec.policy.offer_gate import GateArrays, note_offers
from autospec.policy.promise import ADVANTAGE, ALONE
from autospec.records import Float32Array, Float64Array, Int16Array, Int32Array

THROUGHPUT, LATENCY, SLO = range(3)
"""Objectives."""

LEARNED, GATE_IS_RIPE, NEW_WORKLOAD = range(3)
"""What ``learn_step`` says: it learned; and a lookup can be judged; or nothing for want of room."""

_MOST_PLAIN_STEPS = 32.0  # that one step may count for; a machine that slept tells nothing


class Memory(NamedTuple):
    """What the policy is asked for and remembers, and room for steps of up to n requests.

    ``urgency`` [n] are the weights of requests with a target, ``gross`` [p, n] the gains of what
    is appended behind heads, ``within`` [p, n] tighter limits: without that, or of a second look.
    """

    objective: int
    hysteresis: float
    catch_up_steps: float
    lookup: NDArray[np.bool_]  # [p]
    held_depth: Int16Array  # [p]
    cost: CostArrays
    rate: RateArrays
    kept: ShareArrays
    appended: AppendedArrays
    has_appended: bool
    gate: GateArrays
    room: Workspace
    gains: Float32Array  # [n, p, k]
    limits: Int16Array  # [p, n]
    within: Int16Array  # [p, n]
    stale: Float64Array  # [p, n]
    weights: Float64Array  # [n]
    urgency: Float64Array  # [n]
    gross: Float64Array  # [p, n]
    all_kept: Float64Array  # [p], 1
    free_drafts: Float64Array  # [p, 4], 0


class Setting(NamedTuple):
    """What a step is decided for; ``urgency`` is the sum of that of its requests."""

    objective: int
    octave: int
    context_tokens: int
    plain_seconds: float
    urgency: float


@compiled_brief
def decide_step(
    memory: Memory,
    hazards: Float32Array,
    limits: Int16Array,
    stale_tokens: Float64Array,
    workloads: Int32Array,
    octave: int,
    context_tokens: int,
    plain_seconds: float,
    urgency: float,
    most_tokens: float,
    promised: Float64Array,
) -> None:
    """The allocation of a step of requests [n], as far as its price can be told by the
    ``most_tokens`` that the engine has taken. Fills ``promised`` [4, p]."""
    setting = Setting(memory.objective, octave, context_tokens, plain_seconds, urgency)
    hysteresis, catch_up_steps = memory.hysteresis, memory.catch_up_steps
    n, num_proposers, positions = hazards.shape
    stale = memory.stale
    for p in range(num_proposers):
        for i in range(n):
            stale[p, i] = stale_tokens[p, i] / catch_up_steps
    share = memory.kept.share[octave]
    draft = memory.cost.draft
    best = memory.room.best
    rate = _allocate(memory, setting, hazards, limits, workloads, draft, share, True, hysteresis)
    trusted = tokens_to_trust(n, most_tokens)
    if trusted < n * (1 + positions) and _tokens(memory.cost, best.k, n) > trusted:
        _limit_to(int(trusted), memory.cost.shape, limits, memory.limits)
        limits = memory.limits
        rate = _allocate(
            memory, setting, hazards, limits, workloads, draft, share, True, hysteresis
        )
    copy_depths(best.depth, memory.held_depth)
    promised[:] = 0.0
    promised[ADVANTAGE] = best.advantage
    promised[ALONE] = best.alone
    if memory.has_appended and rate > 0.0:
        slopes = memory.cost.beta[SLOPES:CONTEXT]
        unfold_appended(
            memory.appended, n, limits, slopes, draft, rate, memory.gross, best.proposer, best.k,
            promised,
        )  # fmt: skip


@compiled_brief
def trim_step(
    memory: Memory,
    proposer: Int16Array,
    k: Int16Array,
    hazards: Float32Array,
    workloads: Int32Array,
    octave: int,
    context_tokens: int,
    plain_seconds: float,
    urgency: float,
    most_tokens: float,
) -> None:
    """The same program with drafting already paid, each request left its own k [n]."""
    setting = Setting(memory.objective, octave, context_tokens, plain_seconds, urgency)
    n, best, limits = proposer.shape[0], memory.room.best, memory.limits
    limits[:] = 0
    for i in range(n):
        if proposer[i] >= 0 and k[i] > 0:
            limits[proposer[i], i] = k[i]
    _allocate(
        memory, setting, hazards, limits, workloads, memory.free_drafts, memory.all_kept,
        False, 0.0,
    )  # fmt: skip
    trusted = tokens_to_trust(n, most_tokens)
    if memory.has_appended and _tokens(memory.cost, best.k, n) > trusted:
        _limit_to(int(trusted), memory.cost.shape, limits, memory.within)
        _allocate(
            memory, setting, hazards, memory.within, workloads, memory.free_drafts,
            memory.all_kept, False, 0.0,
        )  # fmt: skip


@compiled_brief
def _tokens(cost: CostArrays, k: Int16Array, n: int) -> int:
    """What the engine pays for where the first n requests verify ``k``, not rounded up."""
    total = 0
    longest = 0
    for i in range(n):
        total += k[i]
        longest = max(longest, k[i])
    return n * (1 + longest) if cost.shape == PADDED else n + total


@compiled_brief
def _allocate(
    memory: Memory,
    setting: Setting,
    hazards: Float32Array,
    limits: Int16Array,
    workloads: Int32Array,
    draft: Float64Array,
    share: Float64Array,
    is_ahead: bool,
    hold: float,
) -> float:
    """Fill ``memory.room.best``; returns the going rate, 0 where the objective has none."""
    n = hazards.shape[0]
    is_latency = setting.objective == LATENCY
    rate = 0.0
    base_value = float(n)
    if is_latency:
        memory.weights[:] = 1.0
        latency_gains(hazards, limits, share, memory.weights, memory.gains)
    else:
        rate = tokens_per_second(
            memory.rate, setting.octave, workloads, setting.plain_seconds, memory.weights
        )
        throughput_gains(hazards, limits, share, memory.weights, memory.gains)
    if setting.objective == SLO:
        weigh(n, memory.gains, limits, memory.urgency)
        base_value = setting.urgency
        rate *= base_value / max(n, 1)
    beta = memory.cost.beta
    prices = Prices(
        forward_seconds(beta, 0.0, n, setting.context_tokens, False, KNOTS),
        beta[SPECULATING],
        beta[SLOPES:CONTEXT],
        draft,
        memory.cost.shape,
        memory.cost.captured,
    )
    aim = Aim(base_value, is_latency, rate, share, memory.held_depth, hold)
    appended, room, gains = memory.appended, memory.room, memory.gains
    if is_ahead and rate > 0.0 and memory.has_appended:
        fold_appended(
            appended, setting.octave, n, limits, gains, prices.slopes, draft, rate, memory.gross,
            memory.within,
        )  # fmt: skip
        solve(n, gains, memory.within, memory.stale, memory.lookup, prices, aim, room)
    else:
        solve(n, gains, limits, memory.stale, memory.lookup, prices, aim, room)
    return rate


@compiled_brief
def _limit_to(trusted: int, shape: int, limits: Int16Array, limited: Int16Array) -> None:
    """Limits [p, n] under which a step pays for so many tokens at most.

    A padded one has at least one draft token a request: else it would never be tried.
    """
    n = limits.shape[1]
    if shape != PADDED:
        _limit_evenly(limits, trusted - n, limited)
        return
    most = max(1, trusted // n - 1)
    for i in range(n):
        for p in range(limits.shape[0]):
            limited[p, i] = min(limits[p, i], most)


@compiled_brief
def _limit_evenly(limits: Int16Array, tokens: int, limited: Int16Array) -> None:
    """Draft tokens dealt out evenly to the requests that can take some."""
    takers = 0
    for i in range(limits.shape[1]):
        takers += _can_draft(limits, i)
    share = tokens // takers
    left = tokens % takers
    rank = 0
    for i in range(limits.shape[1]):
        most = share + (1 if rank < left else 0)
        rank += _can_draft(limits, i)
        for p in range(limits.shape[0]):
            limited[p, i] = min(limits[p, i], most)


@compiled_brief
def _can_draft(limits: Int16Array, request: int) -> int:
    """1 if a proposer can draft for the request."""
    for p in range(limits.shape[0]):
        if limits[p, request] > 0:
            return 1
    return 0


@compiled_brief
def learn_step(
    memory: Memory,
    octave: int,
    workloads: Int32Array,
    proposer: Int16Array,
    drafted: Int16Array,
    kept: Int16Array,
    verified: Int16Array,
    accepted: Int16Array,
    committed: Int16Array,
    matched: Int16Array,
    step_seconds: float,
    plain_seconds: float,
    draft_seconds: Float64Array,
    has_draft_seconds: bool,
    promised: Float64Array,
) -> int:
    """Take note of what a step brought, and of what it had ``promised`` [4, p]; ``plain_seconds``
    is 0 where that is not known."""
    if plain_seconds > 0.0 and step_seconds > 0.0:
        if not knows_all(memory.rate, workloads):
            return NEW_WORKLOAD
        plain_steps = min(step_seconds / plain_seconds, _MOST_PLAIN_STEPS)
        note_rate(memory.rate, octave, workloads, committed, plain_steps)
    if memory.has_appended:
        note_appended(memory.appended, octave, proposer, verified, accepted, promised)
    note_kept(memory.kept, octave, proposer, drafted, kept)
    if has_draft_seconds and step_seconds > 0.0:
        rate = committed.sum() / step_seconds
        if note_offers(memory.gate, proposer, accepted, matched, promised, draft_seconds, rate):
            return GATE_IS_RIPE
    return LEARNED
