"""Planning, trimming and observing in one kernel each, for a policy that is a program.

They do what the controller does step by step for every other policy. Each call of a kernel and each
object between two of them takes time, several times as much where the engine has emptied the
processor's caches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from autospec.compiled import compiled_brief
from autospec.policy.program import Memory, decide_step, learn_step, trim_step
from autospec.records import Float32Array, Float64Array, Int16Array, Int32Array, Int64Array
from autospec.step import (
    Step,
    bound_decision,
    bound_drafted,
    conclude,
    look_again,
    look_ahead,
)


@compiled_brief
def plan_fused(
    step: Step,
    program: Memory,
    handles: Int64Array,
    context_tokens: Int32Array,
    last_tokens: Int32Array,
    room: Int16Array,
    most: Int16Array,
    offers: Int16Array,
    confidence: Float32Array,
    octave: int,
    spare_tokens: float,
    proposer: Int16Array,
    k: Int16Array,
) -> tuple[int, int, float, float, int, int, float]:
    """``look_ahead``, ``decide_step`` and ``bound_decision``, what the first and last return."""
    unknown, context, plain_seconds = look_ahead(
        step, handles, context_tokens, last_tokens, room, most, offers, confidence, True
    )
    arrays, best = step.arrays, program.room.best
    decide_step(
        program, arrays.hazards, arrays.limits, arrays.stale, arrays.workloads, octave, context,
        plain_seconds, 0.0, spare_tokens,
    )  # fmt: skip
    expected, verified, switches, seconds = bound_decision(
        step, best.proposer, best.k, context, proposer, k
    )
    return unknown, context, plain_seconds, expected, verified, switches, seconds


@compiled_brief
def trim_fused(
    step: Step,
    program: Memory,
    proposer: Int16Array,
    k: Int16Array,
    drafted: Int16Array,
    confidence: Float32Array,
    octave: int,
    context_tokens: int,
    plain_seconds: float,
) -> tuple[bool, bool]:
    """``bound_drafted``, ``look_again`` and ``trim_step``.

    Returns whether fewer were drafted than planned, and whether the drafts' confidences say which
    are worth verifying, which is then in the step's ``kept``.
    """
    arrays = step.arrays
    is_less = bound_drafted(step, drafted, k)
    is_told = look_again(step, proposer, arrays.drafted, confidence) > 0
    if is_told:
        trim_step(
            program, proposer, arrays.drafted, arrays.draft_hazards, arrays.workloads, octave,
            context_tokens, plain_seconds, 0.0,
        )  # fmt: skip
        worth = program.room.best.k
        for i in range(k.shape[0]):
            arrays.kept[i] = min(arrays.drafted[i], worth[i])
    return is_less, is_told


@compiled_brief
def observe_fused(
    step: Step,
    program: Memory,
    handles: Int64Array,
    proposer: Int16Array,
    asked: Int16Array,
    verified: Int16Array,
    accepted: Int16Array,
    committed: Int16Array,
    matched: Int16Array,
    is_trimmed: bool,
    is_probe: bool,
    octave: int,
    context_tokens: int,
    seconds: float,
    draft_seconds: Float64Array,
    is_told_apart: bool,
    teaches_seconds: bool,
    plain_seconds: float,
) -> tuple[int, int, int, int, bool, int]:
    """``conclude`` and ``learn_step``, what both return."""
    total, num_verified, paid, drifts, surprised = conclude(
        step, handles, proposer, asked, verified, accepted, committed, matched, is_trimmed,
        is_probe, octave, context_tokens, seconds, draft_seconds, is_told_apart, teaches_seconds,
    )  # fmt: skip
    arrays = step.arrays
    learned = learn_step(
        program, octave, arrays.workloads, proposer, asked, arrays.kept, arrays.verified,
        arrays.accepted, arrays.committed, matched, seconds, plain_seconds, draft_seconds,
        is_told_apart,
    )  # fmt: skip
    return total, num_verified, paid, drifts, surprised, learned


class Fused(NamedTuple):
    """The three of them, as a controller calls them: compiled for any types, or prepared."""

    plan: Callable[..., tuple[int, int, float, float, int, int, float]] = plan_fused
    trim: Callable[..., tuple[bool, bool]] = trim_fused
    observe: Callable[..., tuple[int, int, int, int, bool, int]] = observe_fused
