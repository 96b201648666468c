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
from autospec.rails.probe import may_probe
from autospec.records import Float32Array, Int16Array, Int32Array, Int64Array
from autospec.step.kernels import (
    NOT_YET,
    Observed,
    Planned,
    Trimmed,
    bound_decision,
    bound_drafted,
    conclude,
    foresee,
    look_again,
    look_ahead,
)
from autospec.step.record import Step


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
    most_tokens: float,
    has_clocks: bool,
    has_guard: bool,
    proposer: Int16Array,
    k: Int16Array,
) -> Planned:
    """``look_ahead``, ``decide_step`` and ``bound_decision``, what the first and last return.

    Nothing of it if clocks or guard may have a say in the step.
    """
    octave, watch = step.arrays.octave, step.standing.watch
    is_held = has_guard and watch.guard.left[octave] > 0
    if is_held or (has_clocks and may_probe(watch.clocks, octave)):
        return NOT_YET
    unknown, context, plain_seconds = look_ahead(
        step, handles, context_tokens, last_tokens, room, most, offers, confidence, True
    )
    arrays, best = step.arrays, program.room.best
    decide_step(
        program, arrays.hazards, arrays.limits, arrays.stale, arrays.workloads, octave, context,
        plain_seconds, 0.0, most_tokens, arrays.promised,
    )  # fmt: skip
    expected, verified, switches, seconds, has_models = bound_decision(
        step, best.proposer, best.k, context, plain_seconds, False, has_clocks, True, proposer, k,
    )  # fmt: skip
    return (
        True, unknown, context, plain_seconds, expected, verified, switches, seconds, has_models,
    )  # fmt: skip


@compiled_brief
def trim_fused(
    step: Step,
    program: Memory,
    drafted: Int16Array,
    confidence: Float32Array,
    context_tokens: int,
    plain_seconds: float,
    most_tokens: float,
    is_probe: bool,
) -> Trimmed:
    """``bound_drafted``, ``look_again``, ``trim_step`` and ``foresee``.

    What the drafts' confidences say is worth verifying is then in the step's ``kept``; a probe
    verifies all.
    """
    arrays = step.arrays
    is_less = bound_drafted(step, drafted)
    is_told = look_again(step, confidence) > 0
    if is_told:
        trim_step(
            program, arrays.proposer, arrays.drafted, arrays.draft_hazards, arrays.workloads,
            arrays.octave, context_tokens, plain_seconds, 0.0, most_tokens,
        )  # fmt: skip
        worth = program.room.best.k
        for i in range(arrays.kept.shape[0]):
            arrays.kept[i] = min(arrays.drafted[i], worth[i])
        verify = arrays.drafted if is_probe else arrays.kept
        expected, seconds = foresee(step, verify, context_tokens)
        return is_less, True, expected, seconds
    return is_less, False, 0.0, 0.0


@compiled_brief
def observe_fused(
    step: Step, program: Memory, observed: Observed
) -> tuple[int, int, int, int, bool, bool, bool, bool, int]:
    """``conclude`` and ``learn_step``, what both return."""
    (
        paid, verified, flawed, drifts, surprised, is_loss, is_told_apart, is_cheap,
    ) = conclude(step, observed)  # fmt: skip
    _, _, _, matched, draft_seconds, seconds, plain_seconds = observed[:7]
    arrays = step.arrays
    learned = learn_step(
        program, arrays.octave, arrays.workloads, arrays.proposer, arrays.drafted, arrays.kept,
        arrays.verified, arrays.accepted, arrays.committed, matched, seconds, plain_seconds,
        draft_seconds, is_told_apart, arrays.promised,
    )  # fmt: skip
    return (
        paid, verified, flawed, drifts, surprised, is_loss, is_told_apart, is_cheap, learned,
    )  # fmt: skip


class Fused(NamedTuple):
    """The three of them, as a controller calls them: compiled for any types, or prepared."""

    plan: Callable[..., Planned] = plan_fused
    trim: Callable[..., Trimmed] = trim_fused
    observe: Callable[..., tuple[int, int, int, int, bool, bool, bool, bool, int]] = observe_fused
