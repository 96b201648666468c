"""What a step costs, learned online from served steps.

Verification is ``fixed + F(tokens) + context + requests [+ speculating]``, F piecewise linear;
drafting with a model is ``active + depth + tokens + catch-up``. All coefficients are non-negative
and found by least squares on relative errors, with priors that keep neighboring slopes alike.
Plain and speculative steps, and each octave of load, keep statistics of their own: they forget only
when steps of the same kind are seen again, so plain decoding's cost survives hours of speculation.
Steps that also prefill are never charged to speculation: they teach the prefill coefficient alone.

A machine's pace drifts, and what was measured in its slow minutes must not look dearer than what
was measured in others: errors that successive steps share are its pace, which all coefficients are
read at and learned without (errors as a first-order autoregression, Cochrane and Orcutt 1949).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from autospec.compiled import by_reference, compiled, compiled_brief
from autospec.octave import NUM_OCTAVES, octave_of
from autospec.records import (
    EngineInfo,
    Float64Array,
    Int32Array,
    Int64Array,
    ProposerInfo,
    Shape,
)

LAYOUT = "cost/1"
KNOTS = np.array([0.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0])
NUM_SEGMENTS = len(KNOTS)
FIXED = 0
SLOPES = 1
CONTEXT = SLOPES + NUM_SEGMENTS
REQUESTS = CONTEXT + 1
SPECULATING = CONTEXT + 2
NUM_VERIFY = CONTEXT + 3
ACTIVE, DEPTH, TOKENS, CATCH_UP = range(4)
NUM_DRAFT = 4
LOG, SPECULATIVE = range(2)
"""Of ``CostArrays.pace``: its logarithm, and the share of speculative steps lately."""

LEAST_SECONDS = 1e-7
MOST_SECONDS = 1e5
"""Shorter and longer times are a clock's fault and teach nothing."""

_NOISE = 0.05  # relative standard error of one step time, the unit of the priors below
_MEMORY_STEPS = 512.0
_OUTLIER = 4.0  # in units of the running relative error
_SETTLED_STEPS = 8.0  # before any time can be called an outlier
_SURPRISE = 4.5  # the running sum of outliers' signs; 5 would be outliers for ever
_GROSSLY_DEARER = 6.0  # a factor on the time of drafting that a busy machine hardly makes
_GROSSLY_CHEAPER = 2.0  # of any time
_GROSSLY = 3.0  # counts as so many other outliers: two in close succession are a surprise
_CHEAPER = 5.0  # one is: drafting is at times held up, but never done sooner than it can be
_PACE_RATE = 0.1  # of a step's error that is put down to the machine's pace
_PACE_KEEP = 0.98  # of that pace from step to step: what lasts is learned
_MIXED_SHARE = 0.1  # of plain steps among speculative ones, or the other way round, that is enough
_FAMILIAR_STEPS = 16.0  # of a kind before one tells the pace
_LEAST_ERROR = 0.01
_MOST_ERROR = 0.2
_FORGET_KEEP = 0.002
_REFERENCE_STEPS = 15
_FIRST_TOKENS = 8
_TRUST = 1.5
_MIXED_STEPS = 32
_SWEEPS = 5


class StepLoad(NamedTuple):
    """What one step carried: the regressors of its time.

    ``tokens`` is what the engine pays for (see ``paid_tokens``); ``depth``, ``draft_tokens`` and
    ``catch_up_tokens`` are [p], zero for lookups.
    """

    tokens: int
    requests: int
    context_tokens: int
    speculating: bool
    depth: Float64Array
    draft_tokens: Float64Array
    catch_up_tokens: Float64Array


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


@compiled_brief
def token_seconds(tokens: float, slopes: Float64Array, knots: Float64Array) -> float:
    """F(tokens): the area under the slopes up to ``tokens``."""
    seconds = 0.0
    for s in range(slopes.shape[0]):
        if tokens <= knots[s]:
            break
        upper = tokens
        if s + 1 < slopes.shape[0] and knots[s + 1] < tokens:
            upper = knots[s + 1]
        seconds += slopes[s] * (upper - knots[s])
    return seconds


@compiled_brief
def round_up(tokens: int, captured: Int32Array) -> int:
    """The smallest captured size that holds ``tokens``; above the largest, the number itself."""
    for c in range(captured.shape[0]):
        if captured[c] >= tokens:
            return int(captured[c])
    return tokens


@compiled_brief
def forward_seconds(
    beta: Float64Array,
    tokens: float,
    requests: float,
    context_tokens: float,
    speculating: bool,
    knots: Float64Array,
) -> float:
    """Predicted seconds of a target forward over ``tokens`` paid tokens."""
    seconds: float = token_seconds(tokens, beta[SLOPES:CONTEXT], knots)
    seconds += beta[FIXED] + beta[CONTEXT] * context_tokens + beta[REQUESTS] * requests
    if speculating:
        seconds += beta[SPECULATING]
    return seconds


@compiled_brief
def drafting_seconds(
    beta: Float64Array,
    models: Int64Array,
    depth: Float64Array,
    draft_tokens: Float64Array,
    catch_up_tokens: Float64Array,
) -> float:
    """Predicted seconds of a step's drafting, all models together."""
    seconds = 0.0
    for m in range(models.shape[0]):
        p = models[m]
        if depth[p] > 0.0:
            start = NUM_VERIFY + NUM_DRAFT * m
            seconds += (
                beta[start + ACTIVE]
                + beta[start + DEPTH] * depth[p]
                + beta[start + TOKENS] * draft_tokens[p]
                + beta[start + CATCH_UP] * catch_up_tokens[p]
            )
    return seconds


SHAPES: dict[Shape, int] = {"packed": 0, "padded": 1, "stepped": 2}
"""Shapes as kernels know them."""

PADDED = SHAPES["padded"]
STEPPED = SHAPES["stepped"]


def paid_tokens(
    shape: Shape, captured: Int32Array, requests: int, verified: int, longest: int
) -> int:
    """Tokens a target forward pays for: ``verified`` drafts in all, ``longest`` of a request."""
    return int(tokens_to_pay(SHAPES[shape], captured, requests, verified, longest))


@compiled_brief
def tokens_to_pay(
    shape: int, captured: Int32Array, requests: int, verified: int, longest: int
) -> int:
    """``paid_tokens`` in kernels."""
    if shape == PADDED:
        return requests * (1 + longest)
    total = requests + verified
    return round_up(total, captured) if shape == STEPPED and total > 0 else total


@compiled_brief
def tokens_to_trust(requests: int, most_tokens: float) -> float:
    """Up to how many paid tokens a step's price can be told: somewhat beyond the most seen.

    Whoever asks a new engine for more may pay many times what it takes to learn the price.
    """
    return max(float(requests + _FIRST_TOKENS), _TRUST * most_tokens)


@compiled
def _solve(
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
def _verify_features(
    tokens: float,
    requests: float,
    context: float,
    speculating: float,
    knots: Float64Array,
    x: Float64Array,
) -> None:
    x[:] = 0.0
    x[0] = 1.0
    segments = knots.shape[0]
    for s in range(segments):
        if tokens <= knots[s]:
            break
        upper = tokens
        if s + 1 < segments and knots[s + 1] < tokens:
            upper = knots[s + 1]
        x[1 + s] = upper - knots[s]
    x[1 + segments] = context
    x[2 + segments] = requests
    x[3 + segments] = speculating


@compiled_brief
def _learn(
    model: CostArrays, seconds: float, cell: int, first_cell: int, last_cell: int,
    health: Float64Array, is_drafting: bool,
) -> bool:  # fmt: skip
    """One equation ``x . beta = seconds``, its error relative to what was measured or expected.

    An outlier's weight is clipped, unless outliers keep coming: then the old statistics are what is
    wrong, those of the cell, or of all cells from ``first_cell`` to ``last_cell``; they are
    dropped, and True is returned in the latter case. ``health`` [3] is that of these cells.
    Two far below the expected, of one cell, are enough for all: what was slow for a while is
    hardly used before it is known to be fast. Of drafting one is, and two far above it: a model
    that became dear is paid for in full until that is believed. What was known of a model is
    scaled, its parts mostly change together. Times are taken at the machine's usual pace, which
    target forwards of a familiar kind tell.
    """
    x, steady, doubt = model.x, model.steady, model.doubt
    seconds /= math.exp(model.pace[LOG])
    predicted = 0.0
    for i in range(x.shape[0]):
        predicted += x[i] * steady[i]
    error = seconds / predicted - 1.0 if predicted > 0.0 else 0.0
    limit = _OUTLIER * health[0]
    is_familiar = model.cell_gram[cell, 0, 0] * predicted**2 >= _FAMILIAR_STEPS
    trust = 1.0
    surprised = False
    health[1] *= 0.8
    doubt[cell] *= 0.8
    if abs(error) > limit:
        sign = 1.0 if error > 0.0 else -1.0
        own = sign
        is_cheaper = predicted > _GROSSLY_CHEAPER * seconds
        if is_cheaper:
            own *= _CHEAPER if is_drafting else _GROSSLY
        elif is_drafting and seconds > _GROSSLY_DEARER * predicted:
            own *= _GROSSLY
        health[1] += own if is_drafting else sign
        doubt[cell] += own
        if health[2] >= _SETTLED_STEPS:
            trust = limit / abs(error)
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
            health[0] = _NOISE
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
        _note_pace(model.pace, shared, cell >= NUM_OCTAVES)
    _absorb(
        x, seconds, trust / max(seconds, predicted) ** 2, 1.0 - 1.0 / _MEMORY_STEPS,
        model.cell_gram[cell], model.cell_moment[cell], model.gram, model.moment,
        model.fresh_gram[cell], model.fresh_moment[cell],
    )  # fmt: skip
    model.fresh_weight[cell] += 1.0
    health[2] += 1.0
    _solve(model.gram, model.moment, model.precision, model.target, steady, _SWEEPS)
    return surprised


@compiled_brief
def _forget(model: CostArrays, cell: int, kept: float, scale: float) -> None:
    """Keep that share of what a cell has seen, all times of it multiplied by ``scale``."""
    for i in range(model.x.shape[0]):
        model.moment[i] -= (1.0 - kept * scale) * model.cell_moment[cell, i]
        model.cell_moment[cell, i] *= kept * scale
        for j in range(model.x.shape[0]):
            model.gram[i, j] -= (1.0 - kept) * model.cell_gram[cell, i, j]
            model.cell_gram[cell, i, j] *= kept
    model.doubt[cell] = 0.0


@compiled_brief
def _draft_features(
    start: int, depth: float, draft_tokens: float, catch_up_tokens: float, x: Float64Array
) -> None:
    x[start + ACTIVE] = 1.0
    x[start + DEPTH] = depth
    x[start + TOKENS] = draft_tokens
    x[start + CATCH_UP] = catch_up_tokens


@compiled_brief
def _note_pace(pace: Float64Array, error: float, speculating: bool) -> None:
    """Put a part of a step's relative error down to the machine's pace.

    Only as far as plain and speculative steps alternate: of one kind alone nobody knows whether the
    machine became slow, or that kind dear.
    """
    kind = 1.0 if speculating else 0.0
    share = pace[SPECULATIVE] + (1.0 - _PACE_KEEP) * (kind - pace[SPECULATIVE])
    mixed = min(1.0, min(share, 1.0 - share) / _MIXED_SHARE)
    pace[SPECULATIVE] = share
    pace[LOG] = _PACE_KEEP * (pace[LOG] + _PACE_RATE * mixed * error)


@compiled_brief
def _set_pace(model: CostArrays) -> None:
    """Bring the coefficients that are read to the machine's present pace."""
    pace = math.exp(model.pace[LOG])
    for i in range(model.beta.shape[0]):
        model.beta[i] = model.steady[i] * pace
    for m in range(model.models.shape[0]):
        for c in range(NUM_DRAFT):
            model.draft[model.models[m], c] = model.beta[NUM_VERIFY + NUM_DRAFT * m + c]


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
) -> bool:
    """Learn a step: the target forward, and each model's drafting where that is told apart.

    Returns whether the times of target forwards have changed for good.
    """
    models, x = model.models, model.x
    cell = octave + (NUM_OCTAVES if speculating else 0)
    _verify_features(tokens, requests, context, speculating, KNOTS, x)
    verifying = seconds
    if is_told_apart:
        verifying -= draft_seconds.sum()
    else:
        for m in range(models.shape[0]):
            p = models[m]
            if depth[p] > 0.0:
                _draft_features(
                    NUM_VERIFY + NUM_DRAFT * m, depth[p], draft_tokens[p], catch_up_tokens[p], x
                )
    surprised = False
    if verifying > LEAST_SECONDS:
        surprised = _learn(model, verifying, cell, 0, 2 * NUM_OCTAVES, model.health[0], False)
    if is_told_apart:
        for m in range(models.shape[0]):
            p = models[m]
            if depth[p] > 0.0 and LEAST_SECONDS < draft_seconds[p] < MOST_SECONDS:
                x[:] = 0.0
                _draft_features(
                    NUM_VERIFY + NUM_DRAFT * m, depth[p], draft_tokens[p], catch_up_tokens[p], x
                )
                own = 2 * NUM_OCTAVES + m
                _learn(model, draft_seconds[p], own, own, own + 1, model.health[1 + m], True)
    _set_pace(model)
    return surprised


class StepCost:
    """The step-time model of one engine: observe steps, read coefficients.

    Until the first step was observed ``is_known`` is False and predictions mean nothing. With
    ``follows_jumps`` a sudden, lasting change of times makes it forget what it knew.
    """

    def __init__(
        self,
        proposers: Sequence[ProposerInfo],
        engine: EngineInfo,
        *,
        follows_jumps: bool = True,
    ) -> None:
        self.engine = engine
        self.captured = np.array(engine.captured_sizes, dtype=np.int32)
        self.models = sorted(
            (p for p, info in enumerate(proposers) if info.kind != "lookup"),
            key=lambda p: proposers[p].name,  # saved statistics must not depend on the order
        )
        self._by_depth = [proposers[p].kind == "sequential" for p in self.models]
        size = NUM_VERIFY + NUM_DRAFT * len(self.models)
        self._num_cells = cells = 2 * NUM_OCTAVES + len(self.models)
        health = np.zeros((1 + len(self.models), 3))
        health[:, 0] = _NOISE
        self.arrays = CostArrays(
            np.array(self.models, dtype=np.int64),
            self.captured,
            SHAPES[engine.shape],
            _SURPRISE if follows_jumps else math.inf,
            np.zeros(size),
            health,
            np.zeros(cells),
            np.zeros((cells, size, size)),
            np.zeros((cells, size)),
            np.zeros((size, size)),
            np.zeros(size),
            np.zeros((cells, size, size)),
            np.zeros((cells, size)),
            np.zeros(cells),
            np.zeros((size, size)),
            np.zeros(size),
            np.zeros(2),
            np.zeros(size),
            np.zeros(size),
            np.zeros((len(proposers), NUM_DRAFT)),
        )
        self.reference = by_reference(self.arrays)
        """All of it for kernels."""
        self.beta = self.arrays.beta
        self.slopes: Float64Array = self.beta[SLOPES:CONTEXT]
        """Seconds per token in each segment between ``KNOTS``; a view, always up to date."""
        self.prefill_token_seconds = 0.0
        self.is_known = False
        self._mixed_steps = 0
        self._fastest_mixed = math.inf
        self._reference_step = np.zeros(4)
        self._first_steps: list[tuple[float, float, float]] = []
        self._is_early = True
        self.most_tokens = 0.0
        """The most that the engine has taken in one step; infinite where a profile knows it."""
        self.no_times: Float64Array = np.zeros(len(proposers))
        """Those of drafting, where they are not told apart from the step's."""

    def observe(
        self,
        load: StepLoad,
        step_seconds: float,
        draft_seconds: Float64Array | None,
        prefill_tokens: int = 0,
    ) -> None:
        """Learn from one step. Times that are not finite and positive are ignored."""
        if not LEAST_SECONDS < step_seconds < MOST_SECONDS:
            return
        if prefill_tokens > 0:
            self._note_tokens(load.tokens + prefill_tokens)
            self._observe_prefill(load, step_seconds, prefill_tokens)
            return
        if self._is_early and self._set_scale(load, step_seconds):
            self._note_tokens(load.tokens)
            return
        is_told_apart = draft_seconds is not None
        if draft_seconds is None or min(draft_seconds.tolist(), default=0.0) < 0.0:
            draft_seconds, is_told_apart = self.no_times, False
        surprised = learn_seconds(
            self.reference, load.tokens, load.requests, load.context_tokens, load.speculating,
            load.depth, load.draft_tokens, load.catch_up_tokens, step_seconds, draft_seconds,
            is_told_apart, octave_of(load.requests),
        )  # fmt: skip
        self.learned(load.tokens, load.context_tokens, step_seconds, surprised)

    @property
    def is_settled(self) -> bool:
        """Whether ``learn_seconds`` and ``learned`` do for a step that does not prefill."""
        return not self._is_early

    def learned(
        self, tokens: int, context_tokens: int, step_seconds: float, surprised: bool
    ) -> None:
        """A kernel has called ``learn_seconds`` with these, and this is what it returned."""
        self._note_tokens(tokens)
        if surprised:
            self._set_prior(step_seconds, tokens, context_tokens)

    def _note_tokens(self, tokens: int) -> None:
        """The engine takes as many; a step that prefills shows it as well."""
        if tokens > self.most_tokens:
            self.most_tokens = float(tokens)

    def verify_seconds(
        self, tokens: int, requests: int, context_tokens: int, speculating: bool
    ) -> float:
        """Predicted seconds of a target forward over ``tokens`` paid tokens."""
        return forward_seconds(self.beta, tokens, requests, context_tokens, speculating, KNOTS)

    def plain_seconds(self, requests: int, context_tokens: int) -> float:
        """Predicted seconds of a plain decoding step."""
        tokens = paid_tokens(self.engine.shape, self.captured, requests, 0, 0)
        return self.verify_seconds(tokens, requests, context_tokens, speculating=False)

    @property
    def draft_coefficients(self) -> Float64Array:
        """[p, 4]: seconds per step in use, per depth, per drafted and per caught-up token."""
        return self.arrays.draft

    def predict(self, load: StepLoad) -> float:
        """Predicted seconds of a whole step, drafting included."""
        return forward_seconds(
            self.beta, load.tokens, load.requests, load.context_tokens, load.speculating, KNOTS
        ) + self.drafting_seconds(load.depth, load.draft_tokens, load.catch_up_tokens)

    def drafting_seconds(
        self, depth: Float64Array, draft_tokens: Float64Array, catch_up_tokens: Float64Array
    ) -> float:
        """Predicted seconds of a step's drafting, all models together; each [p]."""
        return float(
            drafting_seconds(self.beta, self.arrays.models, depth, draft_tokens, catch_up_tokens)
        )

    @property
    def relative_error(self) -> float:
        """Running mean of the relative error of predicted target forwards, outliers clipped."""
        return float(self.arrays.health[0, 0])

    def load(self, statistics: Mapping[str, Float64Array]) -> None:
        """Start from saved statistics, the form ``take_fresh`` returns; their weight is bounded."""
        arrays = self.arrays
        for cell in range(self._num_cells):
            weight = float(statistics["weight"][cell])
            fade = min(1.0, _MEMORY_STEPS / weight) if weight > 0 else 1.0
            arrays.cell_gram[cell] = statistics["gram"][cell] * fade
            arrays.cell_moment[cell] = statistics["moment"][cell] * fade
        arrays.gram[:] = arrays.cell_gram.sum(axis=0)
        arrays.moment[:] = arrays.cell_moment.sum(axis=0)
        seconds, tokens, context, count = statistics["reference"]
        if count > 0:
            self.most_tokens = math.inf
            self._is_early = False
            self._set_prior(seconds / count, tokens / count, context / count)
            self._settle(500)

    def take_fresh(self) -> Mapping[str, Float64Array]:
        """Additive statistics since the last call.

        gram [cell, f, f], moment [cell, f], weight [cell], and the reference step [seconds, tokens,
        context, count] that scales the priors.
        """
        taken = {}
        for name, array in self._fresh().items():
            taken[name] = array.copy()
            array[:] = 0.0
        return taken

    def return_fresh(self, statistics: Mapping[str, Float64Array]) -> None:
        """Take back statistics that could not be saved."""
        for name, array in self._fresh().items():
            array += statistics[name]

    def _fresh(self) -> Mapping[str, Float64Array]:
        return {
            "gram": self.arrays.fresh_gram,
            "moment": self.arrays.fresh_moment,
            "weight": self.arrays.fresh_weight,
            "reference": self._reference_step,
        }

    def _set_scale(self, load: StepLoad, step_seconds: float) -> bool:
        """Scale the priors to the median of the first steps; the very first does nothing else.

        (An absurd first time would otherwise outweigh whatever follows.) True for the first.
        """
        steps = self._first_steps
        steps.append((step_seconds, float(load.tokens), float(load.context_tokens)))
        median = sorted(steps)[len(steps) // 2]
        self._reference_step[:] = (*median, 1.0)
        self._is_early = len(steps) < _REFERENCE_STEPS
        self._set_prior(*median)
        return len(steps) == 1

    def _observe_prefill(self, load: StepLoad, step_seconds: float, prefill_tokens: int) -> None:
        if not self.is_known:
            # An engine that prefills in every step: start from priors, at its fastest step.
            self._mixed_steps += 1
            self._fastest_mixed = min(self._fastest_mixed, step_seconds)
            if self._mixed_steps >= _MIXED_STEPS:
                self._set_prior(self._fastest_mixed, load.tokens, load.context_tokens)
            return
        excess = max(0.0, step_seconds - self.predict(load)) / prefill_tokens
        rate = 0.1 if self.prefill_token_seconds > 0.0 else 1.0
        self.prefill_token_seconds += rate * (excess - self.prefill_token_seconds)

    def _set_prior(self, seconds: float, tokens: float, context: float) -> None:
        """Priors relative to a first step: most of it is fixed, a token costs some per cent."""
        precision = self.arrays.precision
        precision[:] = 0.0
        self.arrays.target[:] = 0.0
        per_token = seconds / max(tokens, 1.0)
        self._prior(FIXED, 0.8 * seconds, 0.8 * seconds)
        self._prior(SLOPES, 0.1 * per_token, 0.3 * per_token)
        for s in range(SLOPES, CONTEXT - 1):
            stiffness = _NOISE**2 / (0.1 * per_token) ** 2
            precision[s, s] += stiffness
            precision[s + 1, s + 1] += stiffness
            precision[s, s + 1] -= stiffness
            precision[s + 1, s] -= stiffness
        self._prior(CONTEXT, 0.0, 0.2 * seconds / max(context, 1.0))
        self._prior(REQUESTS, 0.0, 0.1 * per_token)
        self._prior(SPECULATING, 0.0, 0.1 * seconds)
        for m, by_depth in enumerate(self._by_depth):
            start = NUM_VERIFY + NUM_DRAFT * m
            self._prior(start + ACTIVE, (0.02 if by_depth else 0.1) * seconds, 0.2 * seconds)
            # A parallel one drafts all in one forward: no price by depth unless seen clearly.
            mean, deviation = (0.1, 0.2) if by_depth else (0.0, 0.001)
            self._prior(start + DEPTH, mean * seconds, deviation * seconds)
            self._prior(start + TOKENS, 0.0, 0.02 * seconds)
            self._prior(start + CATCH_UP, 0.0, 0.01 * seconds)
        self.is_known = True
        self._settle(200)

    def _settle(self, sweeps: int) -> None:
        """Find the coefficients anew."""
        arrays = self.arrays
        _solve(arrays.gram, arrays.moment, arrays.precision, arrays.target, arrays.steady, sweeps)
        _set_pace(self.reference)

    def _prior(self, feature: int, mean: float, deviation: float) -> None:
        precision = _NOISE**2 / deviation**2
        self.arrays.precision[feature, feature] += precision
        self.arrays.target[feature] += precision * mean
