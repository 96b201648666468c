"""What each draft position of a step is expected to bring.

Gains never increase with the position. Throughput uses survivals S_j. Latency minimizes the mean of
seconds / (1 + A_r) over requests, with A_r the accepted tokens: 1/(1 + A_{j-1}) - 1/(1 + A_j).
"""

from __future__ import annotations

from autospec.compiled import compiled_brief
from autospec.records import Float32Array, Float64Array, Int16Array


@compiled_brief
def throughput_gains(
    hazards: Float32Array,
    limits: Int16Array,
    share: Float64Array,
    weights: Float64Array,
    gains: Float32Array,
) -> None:
    """S_j [n, p, k] of hazards [n, p, k], up to ``limits`` [p, n], times the row's weight [n].

    ``share`` [p] of a proposer's drafts will be verified, which the hazards take for granted.
    """
    for i in range(hazards.shape[0]):
        for p in range(hazards.shape[1]):
            survival = share[p]
            for j in range(limits[p, i]):
                survival *= hazards[i, p, j]
                gains[i, p, j] = survival
                if weights[i] != 1.0:
                    gains[i, p, j] *= weights[i]


@compiled_brief
def weigh(n: int, gains: Float32Array, limits: Int16Array, weights: Float64Array) -> None:
    """Multiply the gains [n, p, k] of each row by its weight [n]."""
    for i in range(n):
        if weights[i] != 1.0:
            for p in range(gains.shape[1]):
                for j in range(limits[p, i]):
                    gains[i, p, j] *= weights[i]


@compiled_brief
def latency_gains(
    hazards: Float32Array,
    limits: Int16Array,
    share: Float64Array,
    weights: Float64Array,
    gains: Float32Array,
) -> None:
    """What each position takes off weight / (1 + accepted), the request's time per token."""
    for i in range(hazards.shape[0]):
        for p in range(hazards.shape[1]):
            survival = share[p]
            accepted = 0.0
            for j in range(limits[p, i]):
                survival *= hazards[i, p, j]
                before = 1.0 / (1.0 + accepted)
                accepted += survival
                gains[i, p, j] = weights[i] * (before - 1.0 / (1.0 + accepted))
