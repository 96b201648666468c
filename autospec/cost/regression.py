"""The regression behind what steps cost.

All coefficients are non-negative and found by least squares on relative errors, with priors that
keep neighboring slopes alike. Plain and speculative steps, and each octave of load, keep statistics
of their own: they forget only when steps of the same kind are seen again, so plain decoding's cost
survives hours of speculation.
"""

from __future__ import annotations

from typing import NamedTuple

from autospec.compiled import compiled, compiled_brief
from autospec.cost.coefficients import KNOTS, NUM_DRAFT, NUM_VERIFY, draft_features, verify_features
from autospec.cost.pace import note_pace, present_pace
from autospec.octave import NUM_OCTAVES
from autospec.records import Float64Array, Int32Array, Int64Array

LEAST_SECONDS = 1e-7
MOST_SECONDS = 1e5
"""Shorter and longer times are a clock's fault and teach nothing."""

NOISE = 0.05
"""Relative standard error of one step time, the unit of the priors."""

MEMORY_STEPS = 512.0
"""How many steps of its kind a cell remembers."""

_OUTLIER = 4.0  # in units of the running relative error
_SETTLED_STEPS = 8.0  # before any time can be called an outlier
_GROSSLY_DEARER = 6.0  # a factor on the time of drafting that a busy machine hardly makes
_GROSSLY_CHEAPER = 2.0  # of any time
_GROSSLY = 3.0  # counts as so many other outliers: two in close succession are a surprise
_CHEAPER = 5.0  # one is: drafting is at times held up, but never done sooner than it can be
_PROBED = 1.5  # weight of a probe that took clearly less than expected: five of them are enough
_FAMILIAR_STEPS = 16.0  # of a kind before one tells the pace
_LEAST_ERROR = 0.01
_MOST_ERROR = 0.2
_FORGET_KEEP = 0.002
_SWEEPS = 5


class CostArrays(NamedTuple):
    """Everything a step-cost model holds: f features, c cells (kinds of steps), m models.

    Sums of squares are ``gram``, those with the times ``moment``: of each cell, of all, and of what
    has not been saved yet. ``precision`` and ``target`` are the priors, ``steady`` the coefficients
    at the machine's usual pace, ``pace`` how much longer it takes now, ``beta`` the coefficients as
    they are now, ``draft`` [p, 4] those of drafting once more, by proposer.
    ``x`` is scratch. ``health`` holds a running relative error, a surprise and the steps since, of
    target forwards and of each model, ``doubt`` the surprise of each cell.
    """

    models: Int64Array  # [m]
    captured: Int32Array
    shape: int
    most_surprise: float
    x: Float64Array  # [f]
    health: Float64Array  # [1 + m, 3]
    doubt: Float64Array  # [c]
    cell_gram: Float64Array  # [c, f, f]
    cell_moment: Float64Array  # [c, f]
    gram: Float64Array  # [f, f]
    moment: Float64Array  # [f]
    fresh_gram: Float64Array  # [c, f, f]
    fresh_moment: Float64Array  # [c, f]
    fresh_weight: Float64Array  # [c]
    precision: Float64Array  # [f, f]
    target: Float64Array  # [f]
    pace: Float64Array  # [2]
    steady: Float64Array  # [f]
    beta: Float64Array  # [f]
    draft: Float64Array  # [p, 4]


@compiled
def solve_coefficients(
    gram: Float64Array,
    moment: Float64Array,
    precision: Float64Array,
    target: Float64Array,
    beta: Float64Array,
    sweeps: int,
) -> None:
    """Non-negative least squares by coordinate descent, warm-started from ``beta``."""
    d = beta.shape[0]
    for _ in range(sweeps):
        for i in range(d):
            a = gram[i, i] + precision[i, i]
            if a <= 0.0:
                continue
            r = moment[i] + target[i]
            for j in range(d):
                if j != i:
                    r -= (gram[i, j] + precision[i, j]) * beta[j]
            beta[i] = max(0.0, r / a)


@compiled_brief
def _absorb(
    x: Float64Array,
    y: float,
    weight: float,
    keep: float,
    cell_gram: Float64Array,
    cell_moment: Float64Array,
    gram: Float64Array,
    moment: Float64Array,
    fresh_gram: Float64Array,
    fresh_moment: Float64Array,
) -> None:
    """Fade one cell and add an observation to it and to the totals."""
    d = x.shape[0]
    lost = 1.0 - keep
    for i in range(d):
        xi = x[i] * weight
        moment[i] += xi * y - lost * cell_moment[i]
        cell_moment[i] = cell_moment[i] * keep + xi * y
        fresh_moment[i] += xi * y
        for j in range(d):
            gram[i, j] += xi * x[j] - lost * cell_gram[i, j]
            cell_gram[i, j] = cell_gram[i, j] * keep + xi * x[j]
            fresh_gram[i, j] += xi * x[j]


@compiled_brief
def _learn(
    model: CostArrays, seconds: float, cell: int, first_cell: int, last_cell: int,
    health: Float64Array, is_drafting: bool, is_cheap_probe: bool,
) -> bool:  # fmt: skip
    """One equation ``x . beta = seconds``, its error relative to what was measured or expected.

    An outlier's weight is clipped, unless outliers keep coming: then the old statistics are what is
    wrong, those of the cell, or of all cells from ``first_cell`` to ``last_cell``; they are
    dropped, and True is returned in the latter case. ``health`` [3] is that of these cells.
    Two far below the expected, of one cell, are enough for all: what was slow for a while is
    hardly used before it is known to be fast. Of drafting one is, and two far above it: a model
    that became dear is paid for in full until that is believed. What was known of a model is
    scaled, its parts mostly change together. Probes that take clearly less than expected one after
    the other (``is_cheap_probe``) are enough for their cell, outliers or not: nobody would try for
    long what looks dear. Times are taken at the machine's usual pace, which
    target forwards of a familiar kind tell.
    """
    x, steady, doubt = model.x, model.steady, model.doubt
    seconds /= present_pace(model.pace)
    predicted = 0.0
    for i in range(x.shape[0]):
        predicted += x[i] * steady[i]
    error = seconds / predicted - 1.0 if predicted > 0.0 else 0.0
    limit = _OUTLIER * health[0]
    is_familiar = model.cell_gram[cell, 0, 0] * predicted**2 >= _FAMILIAR_STEPS
    is_outlier = abs(error) > limit
    is_cheaper = is_outlier and predicted > _GROSSLY_CHEAPER * seconds
    trust = 1.0
    health[1] *= 0.8
    doubt[cell] *= 0.8
    if is_outlier:
        sign = 1.0 if error > 0.0 else -1.0
        own = sign
        if is_cheaper:
            own *= _CHEAPER if is_drafting else _GROSSLY
        elif is_drafting and seconds > _GROSSLY_DEARER * predicted:
            own *= _GROSSLY
        health[1] += own if is_drafting else sign
        doubt[cell] = own + (doubt[cell] if doubt[cell] * own > 0.0 else 0.0)
        if health[2] >= _SETTLED_STEPS:
            trust = limit / abs(error)
    elif is_cheap_probe:
        doubt[cell] -= _PROBED
    is_doubted = abs(doubt[cell]) > model.most_surprise
    surprised = abs(health[1]) > model.most_surprise or (is_doubted and is_cheaper)
    if surprised or is_doubted:
        # Old times weigh 1 / seconds squared: were they shorter, they must not drown the new.
        change = predicted / seconds
        kept = _FORGET_KEEP * (change**2 if is_drafting else min(1.0, change**2))
        scale = 1.0 / change if is_drafting else 1.0
        for c in range(first_cell, last_cell):
            if surprised or c == cell:
                _forget(model, c, kept, scale)
        health[0] = NOISE
        health[1] = 0.0
        if surprised:
            health[2] = 0.0
        trust, predicted = 1.0, seconds
    if health[2] >= _SETTLED_STEPS:
        clipped = min(abs(error), limit)
        error_now = health[0] + 0.02 * (1.25 * clipped - health[0])
        health[0] = min(max(error_now, _LEAST_ERROR), _MOST_ERROR)
    if not is_drafting:
        shared = min(max(error, -limit), limit) if is_familiar and not surprised else 0.0
        note_pace(model.pace, shared, cell >= NUM_OCTAVES)
    _absorb(
        x, seconds, trust / max(seconds, predicted) ** 2, 1.0 - 1.0 / MEMORY_STEPS,
        model.cell_gram[cell], model.cell_moment[cell], model.gram, model.moment,
        model.fresh_gram[cell], model.fresh_moment[cell],
    )  # fmt: skip
    model.fresh_weight[cell] += 1.0
    health[2] += 1.0
    solve_coefficients(model.gram, model.moment, model.precision, model.target, steady, _SWEEPS)
    return surprised


@compiled_brief
def _forget(model: CostArrays, cell: int, kept: float, scale: float) -> None:
    """Keep that share of what a cell has seen, all times of it multiplied by ``scale``; also of
    what is to be saved, or the next run would start at the old times."""
    for i in range(model.x.shape[0]):
        model.moment[i] -= (1.0 - kept * scale) * model.cell_moment[cell, i]
        model.cell_moment[cell, i] *= kept * scale
        model.fresh_moment[cell, i] *= kept * scale
        for j in range(model.x.shape[0]):
            model.gram[i, j] -= (1.0 - kept) * model.cell_gram[cell, i, j]
            model.cell_gram[cell, i, j] *= kept
            model.fresh_gram[cell, i, j] *= kept
    model.fresh_weight[cell] *= kept
    model.doubt[cell] = 0.0


@compiled_brief
def set_pace(model: CostArrays) -> None:
    """Bring the coefficients that are read to the machine's present pace."""
    pace = present_pace(model.pace)
    for i in range(model.beta.shape[0]):
        model.beta[i] = model.steady[i] * pace
    for m in range(model.models.shape[0]):
        for c in range(NUM_DRAFT):
            model.draft[model.models[m], c] = model.beta[NUM_VERIFY + NUM_DRAFT * m + c]


@compiled_brief
def step_features(
    model: CostArrays,
    tokens: float,
    requests: float,
    context: float,
    speculating: bool,
    depth: Float64Array,
    draft_tokens: Float64Array,
    catch_up_tokens: Float64Array,
    is_told_apart: bool,
) -> None:
    """Fill ``model.x`` with a step's features, those of drafting unless that is told apart."""
    models, x = model.models, model.x
    verify_features(tokens, requests, context, speculating, KNOTS, x)
    if not is_told_apart:
        for m in range(models.shape[0]):
            p = models[m]
            if depth[p] > 0.0:
                draft_features(
                    NUM_VERIFY + NUM_DRAFT * m, depth[p], draft_tokens[p], catch_up_tokens[p], x
                )


@compiled_brief
def learn_seconds(
    model: CostArrays,
    tokens: float,
    requests: float,
    context: float,
    speculating: bool,
    depth: Float64Array,
    draft_tokens: Float64Array,
    catch_up_tokens: Float64Array,
    seconds: float,
    draft_seconds: Float64Array,
    is_told_apart: bool,
    octave: int,
    is_cheap_probe: bool,
) -> bool:
    """Learn a step: the target forward, and each model's drafting where that is told apart.

    Returns whether the times of target forwards have changed for good.
    """
    models, x = model.models, model.x
    cell = octave + (NUM_OCTAVES if speculating else 0)
    step_features(
        model, tokens, requests, context, speculating, depth, draft_tokens, catch_up_tokens,
        is_told_apart,
    )  # fmt: skip
    verifying = seconds
    if is_told_apart:
        verifying -= draft_seconds.sum()
    surprised = False
    if verifying > LEAST_SECONDS:
        surprised = _learn(
            model, verifying, cell, 0, 2 * NUM_OCTAVES, model.health[0], False, is_cheap_probe
        )
    if is_told_apart:
        for m in range(models.shape[0]):
            p = models[m]
            if depth[p] > 0.0 and LEAST_SECONDS < draft_seconds[p] < MOST_SECONDS:
                x[:] = 0.0
                draft_features(
                    NUM_VERIFY + NUM_DRAFT * m, depth[p], draft_tokens[p], catch_up_tokens[p], x
                )
                own = 2 * NUM_OCTAVES + m
                _learn(model, draft_seconds[p], own, own, own + 1, model.health[1 + m], True, False)
    set_pace(model)
    return surprised
