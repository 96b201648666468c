"""What a step costs, learned online from served steps.

Verification is ``fixed + F(tokens) + context + requests [+ speculating]``, F piecewise linear;
drafting with a model is ``active + depth + tokens + catch-up``. All coefficients are non-negative
and found by least squares on relative errors, with priors that keep neighboring slopes alike.
Plain and speculative steps, and each octave of load, keep statistics of their own: they forget only
when steps of the same kind are seen again, so plain decoding's cost survives hours of speculation.
Steps that also prefill are never charged to speculation: they teach the prefill coefficient alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from autospec.compiled import compiled
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

LEAST_SECONDS = 1e-7
MOST_SECONDS = 1e5
"""Shorter and longer times are a clock's fault and teach nothing."""

_NOISE = 0.05  # relative standard error of one step time, the unit of the priors below
_MEMORY_STEPS = 512.0
_OUTLIER = 4.0  # in units of the running relative error
_SETTLED_STEPS = 8.0  # before any time can be called an outlier
_SURPRISE = 4.5  # the running sum of outliers' signs; 5 would be outliers for ever
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


@compiled
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


@compiled
def round_up(tokens: int, captured: Int32Array) -> int:
    """The smallest captured size that holds ``tokens``; above the largest, the number itself."""
    for c in range(captured.shape[0]):
        if captured[c] >= tokens:
            return int(captured[c])
    return tokens


@compiled
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


@compiled
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


def paid_tokens(
    shape: Shape, captured: Int32Array, requests: int, verified: int, longest: int
) -> int:
    """Tokens a target forward pays for: ``verified`` drafts in all, ``longest`` of a request."""
    if shape == "padded":
        return requests * (1 + longest)
    total = requests + verified
    return int(round_up(total, captured)) if shape == "stepped" and total else total


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


@compiled
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


@compiled
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


@compiled
def _learn(
    x: Float64Array,
    seconds: float,
    cell: int,
    first_cell: int,
    last_cell: int,
    most_surprise: float,
    health: Float64Array,
    doubt: Float64Array,
    cell_gram: Float64Array,
    cell_moment: Float64Array,
    gram: Float64Array,
    moment: Float64Array,
    fresh_gram: Float64Array,
    fresh_moment: Float64Array,
    fresh_weight: Float64Array,
    precision: Float64Array,
    target: Float64Array,
    beta: Float64Array,
) -> bool:
    """One equation ``x . beta = seconds``, its error relative to what was measured or expected.

    ``health`` holds the running relative error, the surprise and the steps since; ``doubt`` is the
    surprise of each cell. An outlier's weight is clipped, unless outliers keep coming: then the old
    statistics are what is wrong, those of the cell, or of all cells from ``first_cell`` to
    ``last_cell``; they are dropped, and True is returned in the latter case.
    """
    predicted = 0.0
    for i in range(x.shape[0]):
        predicted += x[i] * beta[i]
    error = seconds / predicted - 1.0 if predicted > 0.0 else 0.0
    limit = _OUTLIER * health[0]
    trust = 1.0
    surprised = False
    health[1] *= 0.8
    doubt[cell] *= 0.8
    if abs(error) > limit:
        sign = 1.0 if error > 0.0 else -1.0
        health[1] += sign
        doubt[cell] += sign
        if health[2] >= _SETTLED_STEPS:
            trust = limit / abs(error)
        surprised = abs(health[1]) > most_surprise
        if surprised or abs(doubt[cell]) > most_surprise:
            # Old times weigh 1 / seconds squared: were they shorter, they must not drown the new.
            kept = _FORGET_KEEP * min(1.0, (predicted / seconds) ** 2)
            for c in range(first_cell, last_cell):
                if not surprised and c != cell:
                    continue
                gram -= (1.0 - kept) * cell_gram[c]
                moment -= (1.0 - kept) * cell_moment[c]
                cell_gram[c] *= kept
                cell_moment[c] *= kept
                doubt[c] = 0.0
            health[0] = _NOISE
            health[1] = 0.0
            if surprised:
                health[2] = 0.0
            trust = 1.0
    if health[2] >= _SETTLED_STEPS:
        clipped = min(abs(error), limit)
        error_now = health[0] + 0.02 * (1.25 * clipped - health[0])
        health[0] = min(max(error_now, _LEAST_ERROR), _MOST_ERROR)
    _absorb(
        x, seconds, trust / max(seconds, predicted) ** 2, 1.0 - 1.0 / _MEMORY_STEPS,
        cell_gram[cell], cell_moment[cell], gram, moment, fresh_gram[cell], fresh_moment[cell],
    )  # fmt: skip
    fresh_weight[cell] += 1.0
    health[2] += 1.0
    _solve(gram, moment, precision, target, beta, _SWEEPS)
    return surprised


@compiled
def _draft_features(
    start: int, depth: float, draft_tokens: float, catch_up_tokens: float, x: Float64Array
) -> None:
    x[start + ACTIVE] = 1.0
    x[start + DEPTH] = depth
    x[start + TOKENS] = draft_tokens
    x[start + CATCH_UP] = catch_up_tokens


@compiled
def _copy_draft_coefficients(
    beta: Float64Array, models: Int64Array, draft_coefficients: Float64Array
) -> None:
    for m in range(models.shape[0]):
        for c in range(NUM_DRAFT):
            draft_coefficients[models[m], c] = beta[NUM_VERIFY + NUM_DRAFT * m + c]


@compiled
def _learn_step(
    tokens: float,
    requests: float,
    context: float,
    speculating: float,
    models: Int64Array,
    depth: Float64Array,
    draft_tokens: Float64Array,
    catch_up_tokens: Float64Array,
    seconds: float,
    draft_seconds: Float64Array,
    is_told_apart: bool,
    cell: int,
    most_surprise: float,
    knots: Float64Array,
    x: Float64Array,
    health: Float64Array,
    doubt: Float64Array,
    cell_gram: Float64Array,
    cell_moment: Float64Array,
    gram: Float64Array,
    moment: Float64Array,
    fresh_gram: Float64Array,
    fresh_moment: Float64Array,
    fresh_weight: Float64Array,
    precision: Float64Array,
    target: Float64Array,
    beta: Float64Array,
    draft_coefficients: Float64Array,
) -> bool:
    """Learn a step: the target forward, and each model's drafting where that is told apart.

    Returns whether the times of target forwards have changed for good.
    """
    _verify_features(tokens, requests, context, speculating, knots, x)
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
        surprised = _learn(
            x, verifying, cell, 0, 2 * NUM_OCTAVES, most_surprise, health[0], doubt, cell_gram,
            cell_moment, gram, moment, fresh_gram, fresh_moment, fresh_weight, precision, target,
            beta,
        )  # fmt: skip
    if is_told_apart:
        for m in range(models.shape[0]):
            p = models[m]
            if depth[p] > 0.0 and LEAST_SECONDS < draft_seconds[p] < MOST_SECONDS:
                x[:] = 0.0
                _draft_features(
                    NUM_VERIFY + NUM_DRAFT * m, depth[p], draft_tokens[p], catch_up_tokens[p], x
                )
                own = 2 * NUM_OCTAVES + m
                _learn(
                    x, draft_seconds[p], own, own, own + 1, most_surprise, health[1 + m], doubt,
                    cell_gram, cell_moment, gram, moment, fresh_gram, fresh_moment, fresh_weight,
                    precision, target, beta,
                )  # fmt: skip
    _copy_draft_coefficients(beta, models, draft_coefficients)
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
        self._most_surprise = _SURPRISE if follows_jumps else math.inf
        self.captured = np.array(engine.captured_sizes, dtype=np.int32)
        self.models = sorted(
            (p for p, info in enumerate(proposers) if info.kind != "lookup"),
            key=lambda p: proposers[p].name,  # saved statistics must not depend on the order
        )
        self._by_depth = [proposers[p].kind == "sequential" for p in self.models]
        size = NUM_VERIFY + NUM_DRAFT * len(self.models)
        self.beta = np.zeros(size)
        self.slopes: Float64Array = self.beta[SLOPES:CONTEXT]
        """Seconds per token in each segment between ``KNOTS``; a view, always up to date."""
        self.prefill_token_seconds = 0.0
        self.is_known = False
        self._mixed_steps = 0
        self._fastest_mixed = math.inf
        self._draft_coefficients = np.zeros((len(proposers), NUM_DRAFT))
        self._num_cells = 2 * NUM_OCTAVES + len(self.models)
        self._cell_gram = np.zeros((self._num_cells, size, size))
        self._cell_moment = np.zeros((self._num_cells, size))
        self._gram = np.zeros((size, size))
        self._moment = np.zeros(size)
        self._fresh_gram = np.zeros((self._num_cells, size, size))
        self._fresh_moment = np.zeros((self._num_cells, size))
        self._fresh_weight = np.zeros(self._num_cells)
        self._reference = np.zeros(4)
        self._first_steps: list[tuple[float, float, float]] = []
        self._is_loaded = False
        self._most_tokens = 0
        self._precision = np.zeros((size, size))
        self._target = np.zeros(size)
        self._x = np.zeros(size)
        self._rows: Int64Array = np.array(self.models, dtype=np.int64)
        self._no_times = np.zeros(len(proposers))
        self._health = np.zeros((1 + len(self.models), 3))  # relative error, surprise, steps
        self._health[:, 0] = _NOISE
        self._doubt = np.zeros(self._num_cells)

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
        # A step that prefills shows as well that the engine takes so many tokens.
        self._most_tokens = max(self._most_tokens, load.tokens + prefill_tokens)
        if prefill_tokens > 0:
            self._observe_prefill(load, step_seconds, prefill_tokens)
            return
        is_early = len(self._first_steps) < _REFERENCE_STEPS and not self._is_loaded
        if is_early and self._set_scale(load, step_seconds):
            return
        cell = int(load.speculating) * NUM_OCTAVES + octave_of(load.requests)
        is_told_apart = draft_seconds is not None
        if draft_seconds is None or min(draft_seconds.tolist(), default=0.0) < 0.0:
            draft_seconds, is_told_apart = self._no_times, False
        if _learn_step(
            load.tokens, load.requests, load.context_tokens, load.speculating, self._rows,
            load.depth, load.draft_tokens, load.catch_up_tokens, step_seconds,
            draft_seconds, is_told_apart, cell,
            self._most_surprise, KNOTS, self._x, self._health, self._doubt, self._cell_gram,
            self._cell_moment, self._gram, self._moment, self._fresh_gram, self._fresh_moment,
            self._fresh_weight, self._precision, self._target, self.beta,
            self._draft_coefficients,
        ):  # fmt: skip
            self._set_prior(step_seconds, load.tokens, load.context_tokens)

    def verify_seconds(
        self, tokens: int, requests: int, context_tokens: int, speculating: bool
    ) -> float:
        """Predicted seconds of a target forward over ``tokens`` paid tokens."""
        return forward_seconds(self.beta, tokens, requests, context_tokens, speculating, KNOTS)

    def plain_seconds(self, requests: int, context_tokens: int) -> float:
        """Predicted seconds of a plain decoding step."""
        tokens = paid_tokens(self.engine.shape, self.captured, requests, 0, 0)
        return self.verify_seconds(tokens, requests, context_tokens, speculating=False)

    def base_seconds(self, requests: int, context_tokens: int) -> float:
        """The part of a step that does not depend on how many tokens are verified."""
        return forward_seconds(self.beta, 0.0, requests, context_tokens, False, KNOTS)

    @property
    def draft_coefficients(self) -> Float64Array:
        """[p, 4]: seconds per step in use, per depth, per drafted and per caught-up token."""
        return self._draft_coefficients

    @property
    def speculating_seconds(self) -> float:
        """What any draft adds to a target forward, its tokens apart."""
        return float(self.beta[SPECULATING])

    def predict(self, load: StepLoad) -> float:
        """Predicted seconds of a whole step, drafting included."""
        return forward_seconds(
            self.beta, load.tokens, load.requests, load.context_tokens, load.speculating, KNOTS
        ) + drafting_seconds(
            self.beta, self._rows, load.depth, load.draft_tokens, load.catch_up_tokens
        )

    def trusted_tokens(self, requests: int) -> float:
        """Up to how many paid tokens a step's price can be told: somewhat beyond the most seen.

        Whoever asks a new engine for more may pay many times what it takes to learn the price.
        """
        if self._is_loaded:
            return math.inf
        return max(requests + _FIRST_TOKENS, _TRUST * self._most_tokens)

    @property
    def relative_error(self) -> float:
        """Running mean of the relative error of predicted target forwards, outliers clipped."""
        return float(self._health[0, 0])

    def load(self, statistics: Mapping[str, Float64Array]) -> None:
        """Start from saved statistics, the form ``take_fresh`` returns; their weight is bounded."""
        for cell in range(self._num_cells):
            weight = float(statistics["weight"][cell])
            fade = min(1.0, _MEMORY_STEPS / weight) if weight > 0 else 1.0
            self._cell_gram[cell] = statistics["gram"][cell] * fade
            self._cell_moment[cell] = statistics["moment"][cell] * fade
        self._gram = self._cell_gram.sum(axis=0)
        self._moment = self._cell_moment.sum(axis=0)
        seconds, tokens, context, count = statistics["reference"]
        if count > 0:
            self._is_loaded = True
            self._set_prior(seconds / count, tokens / count, context / count)
            _solve(self._gram, self._moment, self._precision, self._target, self.beta, 500)
            _copy_draft_coefficients(self.beta, self._rows, self._draft_coefficients)

    def take_fresh(self) -> Mapping[str, Float64Array]:
        """Additive statistics since the last call.

        gram [cell, f, f], moment [cell, f], weight [cell], and the reference step [seconds, tokens,
        context, count] that scales the priors.
        """
        fresh = {
            "gram": self._fresh_gram.copy(),
            "moment": self._fresh_moment.copy(),
            "weight": self._fresh_weight.copy(),
            "reference": self._reference.copy(),
        }
        for array in (self._fresh_gram, self._fresh_moment, self._fresh_weight, self._reference):
            array[:] = 0.0
        return fresh

    def return_fresh(self, statistics: Mapping[str, Float64Array]) -> None:
        """Take back statistics that could not be saved."""
        self._fresh_gram += statistics["gram"]
        self._fresh_moment += statistics["moment"]
        self._fresh_weight += statistics["weight"]
        self._reference += statistics["reference"]

    def _set_scale(self, load: StepLoad, step_seconds: float) -> bool:
        """Scale the priors to the median of the first steps; the very first does nothing else.

        (An absurd first time would otherwise outweigh whatever follows.) True for the first.
        """
        steps = self._first_steps
        steps.append((step_seconds, float(load.tokens), float(load.context_tokens)))
        median = sorted(steps)[len(steps) // 2]
        self._reference[:] = (*median, 1.0)
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
        self._precision[:] = 0.0
        self._target[:] = 0.0
        per_token = seconds / max(tokens, 1.0)
        self._prior(FIXED, 0.8 * seconds, 0.8 * seconds)
        self._prior(SLOPES, 0.1 * per_token, 0.3 * per_token)
        for s in range(SLOPES, CONTEXT - 1):
            stiffness = _NOISE**2 / (0.1 * per_token) ** 2
            self._precision[s, s] += stiffness
            self._precision[s + 1, s + 1] += stiffness
            self._precision[s, s + 1] -= stiffness
            self._precision[s + 1, s] -= stiffness
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
        _solve(self._gram, self._moment, self._precision, self._target, self.beta, 200)
        _copy_draft_coefficients(self.beta, self._rows, self._draft_coefficients)

    def _prior(self, feature: int, mean: float, deviation: float) -> None:
        precision = _NOISE**2 / deviation**2
        self._precision[feature, feature] += precision
        self._target[feature] += precision * mean
