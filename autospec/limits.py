"""How much may be drafted, whatever a policy decides: by proposer, and of a request."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autospec.config import Settings
from autospec.errors import ConfigError
from autospec.records import KINDS, Int16Array, ProposerInfo, Request

MOST_K = 64
"""The longest draft of one request in one step that any proposer may have."""


def usable(settings: Settings, proposers: Sequence[ProposerInfo]) -> Int16Array:
    """The most tokens each proposer may draft [p]; 0 for those that the settings leave out."""
    names = [info.name for info in proposers]
    if len(set(names)) < len(names):
        raise ConfigError(f"proposers: every name must differ, found {names}")
    for info in proposers:
        if not 1 <= info.max_k <= MOST_K:
            raise ConfigError(
                f"proposers: {info.name!r} has max_k {info.max_k}; it must be 1 to {MOST_K}"
            )
        if info.kind not in KINDS:
            raise ConfigError(
                f"proposers: {info.name!r} is of kind {info.kind!r}; allowed: {', '.join(KINDS)}"
            )
    allowed = names if settings.proposers is None else settings.proposers
    for name in allowed:
        if name not in names:
            raise ConfigError(
                f"proposers: {name!r} is not a proposer of this engine; it has {names}"
            )
    return np.array(
        [info.max_k if info.name in allowed else 0 for info in proposers], dtype=np.int16
    )


def most_of(request: Request, settings: Settings) -> int:
    """The longest draft of a request. Raises ValueError."""
    max_k = request.max_k
    if max_k is None:
        return settings.max_k
    if not isinstance(max_k, int | np.integer) or max_k < 0:
        raise ValueError(
            f"request {request.id!r}: max_k is {max_k!r}; it must be an integer from 0, "
            "or None for no cap"
        )
    return min(int(max_k), settings.max_k)


def target_of(request: Request, settings: Settings) -> float:
    """The seconds per token that a request should take, 0 for no target. Raises ValueError."""
    target = request.tpot_target_seconds
    if target is None:
        return (settings.tpot_target_ms or 0.0) / 1000.0
    if not isinstance(target, int | float | np.number) or not target >= 0.0:
        raise ValueError(
            f"request {request.id!r}: tpot_target_seconds is {target!r}; it must be a number from "
            "0, or None for no target"
        )
    return float(target)
