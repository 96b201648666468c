"""A head while it is trained: its module, its loss, and how well it drafts."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from autospec.engine.model import CausalModel
from autospec.training.labels import Labels
from autospec.training.recording import Recording

STEP_SHARE = 0.5
"""Weight of a draft position in the loss over that of the position before it."""


@dataclass(frozen=True, slots=True)
class Lesson:
    """What is learned from: a recording, its labels, and the tokens [columns] that can be drafted
    with the target's output rows for them."""

    recording: Recording
    labels: Labels
    token_ids: torch.Tensor  # [columns]
    rows: torch.Tensor  # [columns, hidden_size]


class Trainee(Protocol):
    """One kind of head. A unit is what batches are made of: a position, or a whole sequence."""

    num_units: int
    batch_units: int

    @property
    def module(self) -> nn.Module:
        """What is trained."""
        ...

    def loss(self, units: torch.Tensor) -> torch.Tensor:
        """Mean loss over some units."""
        ...

    def hits(self, recording: Recording, choices: torch.Tensor) -> torch.Tensor:
        """Whether draft positions 1..j are all right, [places, positions], greedily."""
        ...

    def save(self, folder: Path, training: Mapping[str, Any]) -> None:
        """Write the head's folder, with ``training`` on how it came to be."""
        ...


def survival(hits: torch.Tensor) -> tuple[float, ...]:
    """Shares of drafts whose first j tokens are all accepted."""
    return tuple(hits.double().mean(dim=0).tolist())


def conditional(survived: tuple[float, ...]) -> tuple[float, ...]:
    """Acceptance of each position once all before it were accepted."""
    before = (1.0, *survived)
    return tuple(
        later / earlier if earlier else 0.0
        for earlier, later in zip(before, survived, strict=False)
    )


def mixed_precision(target: CausalModel) -> contextlib.AbstractContextManager[Any]:
    """Matrix products in the target's own half precision, weights in float32."""
    half = target.dtype in (torch.bfloat16, torch.float16)
    if not half:
        return contextlib.nullcontext()
    return torch.autocast(target.device.type, dtype=target.dtype)


def master_dtype(target: CausalModel) -> torch.dtype:
    """What weights are trained in."""
    return torch.promote_types(target.dtype, torch.float32)
