"""What a step costs, learned online from served steps.

Verification is ``fixed + F(tokens) + context + requests [+ speculating]``, F piecewise linear;
drafting with a model is ``active + depth + tokens + catch-up``. All coefficients are non-negative
and found by least squares on relative errors, with priors that keep neighboring slopes alike.
Plain and speculative steps, and each octave of load, keep statistics of their own: they forget only
when steps of the same kind are seen again, so plain decoding's cost survives hours of speculation.
Steps that also prefill are never charged to speculation: they teach the prefill coefficient alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autospec.compiled import compiled
from autospec.records import EngineInfo, Float64Array, Int32Array, ProposerInfo, Shape

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
NUM_OCTAVES = 12

_NOISE = 0.05  # relative standard error of one step time, the unit of the priors below
_MEMORY_STEPS = 512.0
_OUTLIER = 4.0  # in units of the running relative error
_SURPRISE = 4.5  # the running sum of outliers' signs; 5 would be outliers for ever
_LEAST_ERROR = 0.01
_FORGET_KEEP = 0.02
_SWEEPS = 12


@dataclass(frozen=True, slots=True)
class StepLoad:
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
def slope_at(tokens: float, slopes: Float64Array, knots: Float64Array) -> float:
    """Seconds for one more token after ``tokens``."""
    s = 0
    while s + 1 < slopes.shape[0] and tokens >= knots[s + 1]:
        s += 1
    return slopes[s]


@compiled
def round_up(tokens: int, captured: Int32Array) -> int:
    """The smallest captured size that holds ``tokens``; above the largest, the number itself."""
    for c in range(captured.shape[0]):
        if captured[c] >= tokens:
            return captured[c]
    return tokens


def paid_tokens(shape: Shape, captured: Int32Array, verify: Sequence[int]) -> int:
    """Tokens that a target forward pays for when request i carries 1 + verify[i] of them."""
    n = len(verify)
    if n == 0:
        return 0
    if shape == "padded":
        return n * (1 + max(verify))
    total = n + int(sum(verify))
    return int(round_up(total, captured)) if shape == "stepped" else total


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


class StepCost:
    """The step-time model of one engine: observe steps, read coefficients.

    Until the first step was observed ``is_known`` is False and predictions mean nothing.
    """

    def __init__(self, proposers: Sequence[ProposerInfo], engine: EngineInfo) -> None:
        self.engine = engine
        self._num_proposers = len(proposers)
        self.captured = np.array(engine.captured_sizes, dtype=np.int32)
        self.models = sorted(
            (p for p, info in enumerate(proposers) if info.kind != "lookup"),
            key=lambda p: proposers[p].name,  # saved statistics must not depend on the order
        )
        size = NUM_VERIFY + NUM_DRAFT * len(self.models)
        self.beta = np.zeros(size)
        self.relative_error = _NOISE
        self.prefill_token_seconds = 0.0
        self.is_known = False
        self._num_cells = 2 * NUM_OCTAVES + len(self.models)
        self._cell_gram = np.zeros((self._num_cells, size, size))
        self._cell_moment = np.zeros((self._num_cells, size))
        self._gram = np.zeros((size, size))
        self._moment = np.zeros(size)
        self._fresh_gram = np.zeros((self._num_cells, size, size))
        self._fresh_moment = np.zeros((self._num_cells, size))
        self._fresh_weight = np.zeros(self._num_cells)
        self._reference = np.zeros(4)
        self._precision = np.zeros((size, size))
        self._target = np.zeros(size)
        self._x = np.zeros(size)
        self._surprise = 0.0

    def observe(
        self,
        load: StepLoad,
        step_seconds: float,
        draft_seconds: Float64Array | None,
        prefill_tokens: int = 0,
    ) -> None:
        """Learn from one step. Times that are not finite and positive are ignored."""
        if not (np.isfinite(step_seconds) and step_seconds > 0.0):
            return
        if prefill_tokens > 0:
            self._observe_prefill(load, step_seconds, prefill_tokens)
            return
        if not self.is_known:
            self._reference += (step_seconds, load.tokens, load.context_tokens, 1.0)
            self._set_prior(step_seconds, load.tokens, load.context_tokens)
        cell = int(load.speculating) * NUM_OCTAVES + min(
            NUM_OCTAVES - 1, max(0, load.requests - 1).bit_length()
        )
        x = self._x
        self._fill_verify(load)
        if draft_seconds is None:
            for m, p in enumerate(self.models):
                self._fill_draft(m, load, p)
            self._learn(cell, step_seconds)
            return
        verify_seconds = step_seconds - float(np.sum(draft_seconds))
        if verify_seconds > 0.0:
            self._learn(cell, verify_seconds)
        for m, p in enumerate(self.models):
            if load.depth[p] > 0 and np.isfinite(draft_seconds[p]) and draft_seconds[p] > 0.0:
                x[:] = 0.0
                self._fill_draft(m, load, p)
                self._learn(2 * NUM_OCTAVES + m, float(draft_seconds[p]))

    def verify_seconds(
        self, tokens: int, requests: int, context_tokens: int, speculating: bool
    ) -> float:
        """Predicted seconds of a target forward over ``tokens`` paid tokens."""
        return (
            self.base_seconds(requests, context_tokens)
            + self.seconds_of_tokens(tokens)
            + (self.speculating_seconds if speculating else 0.0)
        )

    def plain_seconds(self, requests: int, context_tokens: int) -> float:
        """Predicted seconds of a plain decoding step."""
        tokens = (
            int(round_up(requests, self.captured)) if self.engine.shape == "stepped" else requests
        )
        return self.verify_seconds(tokens, requests, context_tokens, speculating=False)

    def base_seconds(self, requests: int, context_tokens: int) -> float:
        """The part of a step that does not depend on how many tokens are verified."""
        b = self.beta
        return float(b[FIXED] + b[CONTEXT] * context_tokens + b[REQUESTS] * requests)

    def seconds_of_tokens(self, tokens: int) -> float:
        """F(tokens), the part that does."""
        return float(token_seconds(float(tokens), self.slopes, KNOTS))

    @property
    def slopes(self) -> Float64Array:
        """Seconds per token in each segment between ``KNOTS``."""
        return self.beta[SLOPES:CONTEXT]

    @property
    def draft_coefficients(self) -> Float64Array:
        """[p, 4]: seconds per step in use, per depth, per drafted and per caught-up token."""
        coefficients = np.zeros((self._num_proposers, NUM_DRAFT))
        for m, p in enumerate(self.models):
            start = NUM_VERIFY + NUM_DRAFT * m
            coefficients[p] = self.beta[start : start + NUM_DRAFT]
        return coefficients

    @property
    def speculating_seconds(self) -> float:
        """What any draft adds to a target forward, its tokens apart."""
        return float(self.beta[SPECULATING])

    def predict(self, load: StepLoad) -> float:
        """Predicted seconds of a whole step, drafting included."""
        seconds = self.verify_seconds(
            load.tokens, load.requests, load.context_tokens, load.speculating
        )
        for m, p in enumerate(self.models):
            self._x[:] = 0.0
            self._fill_draft(m, load, p)
            seconds += float(self._x @ self.beta)
        return seconds

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
            self._set_prior(seconds / count, tokens / count, context / count)
            _solve(self._gram, self._moment, self._precision, self._target, self.beta, 500)

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

    def _learn(self, cell: int, seconds: float) -> None:
        """One equation ``x . beta = seconds`` in ``self._x``, weighted by 1 / seconds squared."""
        predicted = float(self._x @ self.beta)
        error = seconds / predicted - 1.0 if predicted > 0.0 else 0.0
        limit = _OUTLIER * self.relative_error
        trust = 1.0
        if abs(error) > limit:
            # Clipped, unless it keeps happening: then the old statistics are what is wrong.
            self._surprise = self._surprise * 0.8 + (1.0 if error > 0 else -1.0)
            trust = limit / abs(error)
            if abs(self._surprise) > _SURPRISE:
                self._forget()
                trust = 1.0
        else:
            self._surprise *= 0.8
        clipped = min(abs(error), limit)
        self.relative_error = max(
            _LEAST_ERROR, self.relative_error + 0.02 * (1.25 * clipped - self.relative_error)
        )
        _absorb(
            self._x,
            seconds,
            trust / seconds**2,
            1.0 - 1.0 / _MEMORY_STEPS,
            self._cell_gram[cell],
            self._cell_moment[cell],
            self._gram,
            self._moment,
            self._fresh_gram[cell],
            self._fresh_moment[cell],
        )
        self._fresh_weight[cell] += 1.0
        _solve(self._gram, self._moment, self._precision, self._target, self.beta, _SWEEPS)

    def _observe_prefill(self, load: StepLoad, step_seconds: float, prefill_tokens: int) -> None:
        if not self.is_known:
            return
        excess = max(0.0, step_seconds - self.predict(load)) / prefill_tokens
        rate = 0.1 if self.prefill_token_seconds > 0.0 else 1.0
        self.prefill_token_seconds += rate * (excess - self.prefill_token_seconds)

    def _forget(self) -> None:
        """The engine changed under us: keep the coefficients, drop most of the certainty."""
        self._surprise = 0.0
        for array in (self._cell_gram, self._cell_moment, self._gram, self._moment):
            array *= _FORGET_KEEP

    def _fill_verify(self, load: StepLoad) -> None:
        _verify_features(
            float(load.tokens),
            float(load.requests),
            float(load.context_tokens),
            1.0 if load.speculating else 0.0,
            KNOTS,
            self._x,
        )

    def _fill_draft(self, model: int, load: StepLoad, p: int) -> None:
        if load.depth[p] > 0:
            start = NUM_VERIFY + NUM_DRAFT * model
            self._x[start + ACTIVE] = 1.0
            self._x[start + DEPTH] = load.depth[p]
            self._x[start + TOKENS] = load.draft_tokens[p]
            self._x[start + CATCH_UP] = load.catch_up_tokens[p]

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
        for m in range(len(self.models)):
            start = NUM_VERIFY + NUM_DRAFT * m
            self._prior(start + ACTIVE, 0.02 * seconds, 0.2 * seconds)
            self._prior(start + DEPTH, 0.1 * seconds, 0.2 * seconds)
            self._prior(start + TOKENS, 0.0, 0.02 * seconds)
            self._prior(start + CATCH_UP, 0.0, 0.01 * seconds)
        self.is_known = True
        _solve(self._gram, self._moment, self._precision, self._target, self.beta, 200)

    def _prior(self, feature: int, mean: float, deviation: float) -> None:
        precision = _NOISE**2 / deviation**2
        self._precision[feature, feature] += precision
        self._target[feature] += precision * mean
