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
from dataclasses import dataclass

import numpy as np

from autospec.compiled import compiled
from autospec.octave import NUM_OCTAVES, octave_of
from autospec.records import EngineInfo, Float64Array, Int32Array, ProposerInfo, Shape

LAYOUT = "cost/1"
KNOTS = np.array([0.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0])
NUM_SEGMENTS = len(KNOTS)
_STARTS = tuple(KNOTS.tolist())
_ENDS = (*_STARTS[1:], math.inf)
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
def round_up(tokens: int, captured: Int32Array) -> int:
    """The smallest captured size that holds ``tokens``; above the largest, the number itself."""
    for c in range(captured.shape[0]):
        if captured[c] >= tokens:
            return int(captured[c])
    return tokens


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
def _fill_and_learn(
    tokens: float,
    requests: float,
    context: float,
    speculating: float,
    knots: Float64Array,
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
    """``_learn`` of a target forward, in one call since it is made in every step."""
    _verify_features(tokens, requests, context, speculating, knots, x)
    return _learn(
        x, seconds, cell, first_cell, last_cell, most_surprise, health, doubt, cell_gram,
        cell_moment, gram, moment, fresh_gram, fresh_moment, fresh_weight, precision, target, beta,
    )  # fmt: skip


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
        size = NUM_VERIFY + NUM_DRAFT * len(self.models)
        self.beta = np.zeros(size)
        self.prefill_token_seconds = 0.0
        self.is_known = False
        self._mixed_steps = 0
        self._fastest_mixed = math.inf
        self._coefficients: list[float] = self.beta.tolist()
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
        parts = None if draft_seconds is None else draft_seconds.tolist()
        if parts is None or not all(part >= 0.0 for part in parts):
            self._fill_verify(load)
            for m, p in enumerate(self.models):
                self._fill_draft(m, load, p)
            if self._learn(cell, step_seconds):
                self._set_prior(step_seconds, load.tokens, load.context_tokens)
            self._refresh()
            return
        verify_seconds = step_seconds - sum(parts)
        is_timed = verify_seconds > LEAST_SECONDS
        if is_timed and self._learn_verify(load, cell, verify_seconds):
            self._set_prior(step_seconds, load.tokens, load.context_tokens)
        for m, p in enumerate(self.models):
            if load.depth[p] > 0 and LEAST_SECONDS < parts[p] < MOST_SECONDS:
                self._x[:] = 0.0
                self._fill_draft(m, load, p)
                self._learn(2 * NUM_OCTAVES + m, parts[p])
        self._refresh()

    def verify_seconds(
        self, tokens: int, requests: int, context_tokens: int, speculating: bool
    ) -> float:
        """Predicted seconds of a target forward over ``tokens`` paid tokens."""
        b = self._coefficients
        seconds = b[FIXED] + b[CONTEXT] * context_tokens + b[REQUESTS] * requests
        if speculating:
            seconds += b[SPECULATING]
        for slope, start, end in zip(b[SLOPES:CONTEXT], _STARTS, _ENDS, strict=True):
            if tokens <= start:
                break
            seconds += slope * (min(tokens, end) - start)
        return seconds

    def plain_seconds(self, requests: int, context_tokens: int) -> float:
        """Predicted seconds of a plain decoding step."""
        tokens = paid_tokens(self.engine.shape, self.captured, requests, 0, 0)
        return self.verify_seconds(tokens, requests, context_tokens, speculating=False)

    def base_seconds(self, requests: int, context_tokens: int) -> float:
        """The part of a step that does not depend on how many tokens are verified."""
        b = self._coefficients
        return b[FIXED] + b[CONTEXT] * context_tokens + b[REQUESTS] * requests

    @property
    def slopes(self) -> Float64Array:
        """Seconds per token in each segment between ``KNOTS``."""
        return self.beta[SLOPES:CONTEXT]

    @property
    def draft_coefficients(self) -> Float64Array:
        """[p, 4]: seconds per step in use, per depth, per drafted and per caught-up token."""
        return self._draft_coefficients

    @property
    def speculating_seconds(self) -> float:
        """What any draft adds to a target forward, its tokens apart."""
        return self._coefficients[SPECULATING]

    def predict(self, load: StepLoad) -> float:
        """Predicted seconds of a whole step, drafting included."""
        seconds = self.verify_seconds(
            load.tokens, load.requests, load.context_tokens, load.speculating
        )
        for m, p in enumerate(self.models):
            if load.depth[p] > 0:
                start = NUM_VERIFY + NUM_DRAFT * m
                active, depth, tokens, catch_up = self._coefficients[start : start + NUM_DRAFT]
                seconds += (
                    active
                    + depth * float(load.depth[p])
                    + tokens * float(load.draft_tokens[p])
                    + catch_up * float(load.catch_up_tokens[p])
                )
        return seconds

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
            self._refresh()

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

    def _refresh(self) -> None:
        """Coefficients as Python floats: what is asked for many times a step costs no call."""
        self._coefficients = self.beta.tolist()
        for m, p in enumerate(self.models):
            start = NUM_VERIFY + NUM_DRAFT * m
            self._draft_coefficients[p] = self.beta[start : start + NUM_DRAFT]

    def _learn_verify(self, load: StepLoad, cell: int, seconds: float) -> bool:
        return _fill_and_learn(
            load.tokens, load.requests, load.context_tokens, load.speculating, KNOTS, self._x,
            seconds, cell, 0, 2 * NUM_OCTAVES, self._most_surprise, self._health[0], self._doubt,
            self._cell_gram, self._cell_moment, self._gram, self._moment, self._fresh_gram,
            self._fresh_moment, self._fresh_weight, self._precision, self._target, self.beta,
        )  # fmt: skip

    def _learn(self, cell: int, seconds: float) -> bool:
        part = max(0, cell - 2 * NUM_OCTAVES + 1)
        first, last = (0, 2 * NUM_OCTAVES) if part == 0 else (cell, cell + 1)
        return _learn(
            self._x, seconds, cell, first, last, self._most_surprise, self._health[part],
            self._doubt, self._cell_gram, self._cell_moment, self._gram, self._moment,
            self._fresh_gram, self._fresh_moment, self._fresh_weight, self._precision,
            self._target, self.beta,
        )  # fmt: skip

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
        self._refresh()

    def _prior(self, feature: int, mean: float, deviation: float) -> None:
        precision = _NOISE**2 / deviation**2
        self._precision[feature, feature] += precision
        self._target[feature] += precision * mean
