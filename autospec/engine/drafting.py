"""What a proposer that runs on the device is given, and what it returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from autospec.engine.cache import SlotCache
from autospec.engine.model import CausalModel
from autospec.engine.sampling import SamplingRows
from autospec.proposers.base import History, StatefulProposer
from autospec.records import Float32Array, Int16Array, Int32Array, Int64Array

DRAFT_STREAM = 1
"""Random stream of drafting, apart from the one that verification draws from."""


@dataclass(frozen=True, slots=True)
class DraftTask:
    """One step's decoding requests. Row ``i`` wants ``k[i]`` tokens, 0 where others draft or none.

    Rows with temperature 0 want the likeliest tokens; the others may be drafted from a distribution
    (then ``ModelDrafts.probs`` holds it) or as point masses.
    """

    history: History
    slots: Int32Array  # [n]
    k: Int16Array  # [n]
    sampling: SamplingRows  # [n]


@dataclass(frozen=True, slots=True)
class ModelDrafts:
    """Draft tokens over the rows of a task; ``lengths[i]`` of row ``i`` are valid.

    ``probs[probs_row[i, j], j]`` is the distribution that token ``j`` of row ``i`` was sampled
    from; a ``probs_row`` of -1 says that the token is a point mass given those before it. Whether
    token ``j`` was drafted at all may depend on the tokens before it, never on itself: else
    verification could not keep the target's distribution.
    """

    tokens: Int64Array  # [n, k]
    lengths: Int16Array  # [n]
    confidence: Float32Array  # [n, k]
    probs: torch.Tensor | None  # [sampled rows, k, vocab]
    probs_row: Int64Array  # [n, k]


@dataclass(frozen=True, slots=True)
class Kept:
    """Positions that a step added for good to the target's cache, prompt chunks included.

    Row ``i`` kept ``counts[i]`` input tokens of ``slots[i]`` from position ``starts[i]`` on. Their
    hidden states are concatenated in row order, for the layers that the proposer declared.
    """

    slots: Int32Array  # [m]
    starts: Int32Array  # [m]
    counts: Int32Array  # [m]
    hidden: torch.Tensor | None  # [sum of counts, layers, hidden_size]


class ModelProposer(StatefulProposer, Protocol):
    """Drafts on the device: a draft model, or heads on the target's hidden states.

    ``hidden_layers`` are the target layers whose outputs ``commit`` needs (-1: the last, normed);
    empty for none, which saves the target from collecting them.
    """

    hidden_layers: tuple[int, ...]

    def attach(self, target: CausalModel, cache: SlotCache) -> None:
        """Called once, before anything else, with the target and its key/value cache."""
        ...

    def draft(self, task: DraftTask) -> ModelDrafts:
        """Draft for the rows whose ``k`` is above 0."""
        ...

    def commit(self, kept: Kept, history: History) -> None:
        """Called after every step, whoever drafted; ``history`` holds the committed tokens."""
        ...
