"""How deep each model drafts in a step: a depth is paid once, by the whole batch."""

from __future__ import annotations

import numpy as np

from autospec.allocation.choice import Aim, Workspace
from autospec.compiled import compiled_brief
from autospec.records import Float64Array, Int16Array, Int64Array

_MAX_COMBINATIONS = 2048
_FLAT = 0.01  # share of a model's price that all its depths together may take to count as none


@compiled_brief
def _batch_surplus(
    n: int,
    surplus: Float64Array,
    best_lookup: Float64Array,
    models: Int64Array,
    depth: Int16Array,
    draft: Float64Array,
    price: float,
) -> float:
    """Surplus of the whole batch when model p may draft up to depth[p]."""
    total = 0.0
    for m in range(models.shape[0]):
        p = models[m]
        if depth[p] > 0:
            total -= price * (draft[p, 0] + draft[p, 1] * depth[p])
    for i in range(n):
        best = best_lookup[i]
        for m in range(models.shape[0]):
            best = max(best, surplus[models[m], depth[models[m]], i])
        total += best
    return total


@compiled_brief
def _only_model_worths(n: int, room: Workspace, p: int, draft: Float64Array, price: float) -> None:
    """``_batch_surplus`` of every depth of the only model p, all in one pass: ``worths[d]``."""
    surplus, best_lookup, worths = room.surplus, room.best_lookup, room.worths
    depths = range(0, room.deepest[p] + 1, room.pace[p])
    for d in depths:
        worths[d] = 0.0 if d == 0 else 0.0 - price * (draft[p, 0] + draft[p, 1] * d)
    for i in range(n):
        for d in depths:
            worths[d] += max(best_lookup[i], surplus[p, d, i])


@compiled_brief
def pattern_kept(depth: Int16Array, held: Int16Array) -> bool:
    """Whether the same models are in use."""
    changed = 0
    for p in range(depth.shape[0]):
        if (depth[p] > 0) != (held[p] > 0):
            changed += 1
    return changed == 0


@compiled_brief
def copy_depths(depth: Int16Array, into: Int16Array) -> None:
    """Copy [p]; a slice's assignment takes many times as long to compile."""
    for p in range(depth.shape[0]):
        into[p] = depth[p]


@compiled_brief
def best_depths(
    n: int, room: Workspace, models: Int64Array, draft: Float64Array, price: float, aim: Aim
) -> None:
    """Depth of every model: exhaustively where that is cheap, else one model at a time.

    Of a model that drafts any depth at one price, only its deepest is tried.
    """
    surplus, best_lookup, deepest = room.surplus, room.best_lookup, room.deepest
    pace, trial, depth = room.pace, room.depth, room.trial.depth
    hold = aim.hold * aim.base_value
    depth[:] = 0
    count = models.shape[0]
    if count == 0:
        return
    combinations = 1
    pace[:] = 1
    for m in range(count):
        p = models[m]
        if deepest[p] > 1 and draft[p, 1] * deepest[p] <= _FLAT * draft[p, 0]:
            pace[p] = deepest[p]
        combinations *= deepest[p] // pace[p] + 1
    trial[:] = 0
    best = -np.inf
    if count == 1:
        p = models[0]
        _only_model_worths(n, room, p, draft, price)
        for d in range(0, deepest[p] + 1, pace[p]):
            trial[p] = d
            worth = room.worths[d]
            if pattern_kept(trial, aim.held_depth):
                worth += hold
            if worth > best:
                best = worth
                depth[p] = d
        return
    if combinations * n <= 16 * _MAX_COMBINATIONS:
        for _ in range(combinations):
            worth = _batch_surplus(n, surplus, best_lookup, models, trial, draft, price)
            if pattern_kept(trial, aim.held_depth):
                worth += hold
            if worth > best:
                best = worth
                copy_depths(trial, depth)
            for m in range(count):  # count up, the first model's depth first
                p = models[m]
                trial[p] += pace[p]
                if trial[p] <= deepest[p]:
                    break
                trial[p] = 0
        return
    for _ in range(2):
        for m in range(count):
            p = models[m]
            copy_depths(depth, trial)
            best = -np.inf
            for d in range(0, deepest[p] + 1, pace[p]):
                trial[p] = d
                worth = _batch_surplus(n, surplus, best_lookup, models, trial, draft, price)
                if pattern_kept(trial, aim.held_depth):
                    worth += hold
                if worth > best:
                    best = worth
                    depth[p] = d
