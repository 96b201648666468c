"""What a step costs, as coefficients, and the seconds that they add up to.

A target forward is ``fixed + F(tokens) + context + requests [+ speculating]``, F piecewise linear;
drafting with a model is ``active + depth + tokens + catch-up``.
"""

from __future__ import annotations

import numpy as np

from autospec.compiled import compiled_brief
from autospec.records import Float64Array, Int64Array

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
_FIRST_TOKENS = 8  # beyond one for each request, that are trusted at once
_TRUST = 1.5  # times the most tokens seen


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


@compiled_brief
def tokens_to_trust(requests: int, most_tokens: float) -> float:
    """Up to how many paid tokens a step's price can be told: somewhat beyond the most seen.

    Whoever asks a new engine for more may pay many times what it takes to learn the price.
    """
    return max(float(requests + _FIRST_TOKENS), _TRUST * most_tokens)


@compiled_brief
def verify_features(
    tokens: float,
    requests: float,
    context: float,
    speculating: float,
    knots: Float64Array,
    x: Float64Array,
) -> None:
    """What a target forward's coefficients are multiplied by; all else in ``x`` becomes 0."""
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
def draft_features(
    start: int, depth: float, draft_tokens: float, catch_up_tokens: float, x: Float64Array
) -> None:
    """What the coefficients of a model are multiplied by, those from ``start``."""
    x[start + ACTIVE] = 1.0
    x[start + DEPTH] = depth
    x[start + TOKENS] = draft_tokens
    x[start + CATCH_UP] = catch_up_tokens
