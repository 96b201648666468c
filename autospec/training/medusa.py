"""Training of Medusa heads that draft through the target's own output rows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from autospec.engine.model import CausalModel
from autospec.proposers.medusa_folder import MedusaBlocks, MedusaLayout, write_medusa
from autospec.training.recording import Recording
from autospec.training.rows_loss import rows_loss
from autospec.training.trainee import STEP_SHARE, Lesson, master_dtype, mixed_precision

HEADS = 4
_LAYERS = 1
_EVALUATED = 2048


class MedusaTrainee:
    """Learns from single positions: the state there, and what the target chose further on.

    Heads start as the paper's do: blocks of zeros, so that each repeats the target's own choice.
    """

    def __init__(self, target: CausalModel, lesson: Lesson, *, batch: int) -> None:
        self._target = target
        self._lesson = lesson
        self._places = lesson.recording.places(HEADS + 1)
        self.num_units = len(self._places)
        self.batch_units = batch
        self.module = MedusaBlocks(MedusaLayout(target.hidden_size, HEADS, _LAYERS, has_bias=True))
        with torch.no_grad():
            for parameter in self.module.parameters():
                parameter.zero_()
        self.module.to(target.device, master_dtype(target))

    def loss(self, units: torch.Tensor) -> torch.Tensor:
        lesson, device = self._lesson, self._target.device
        places = self._places[units]
        total = torch.zeros((), dtype=master_dtype(self._target), device=device)
        for head, state in enumerate(self._states(lesson.recording, places)):
            following = places + 1 + head
            probs = lesson.labels.probs[following].to(device)
            columns = lesson.labels.columns[following].to(device)
            total = total + STEP_SHARE**head * rows_loss(state, lesson.rows, probs, columns)
        return total

    def hits(self, recording: Recording, choices: torch.Tensor) -> torch.Tensor:
        lesson = self._lesson
        parts = []
        with torch.inference_mode():
            for places in recording.places(HEADS + 1).split(_EVALUATED):
                right = torch.ones(len(places), dtype=torch.bool)
                columns = []
                for head, state in enumerate(self._states(recording, places)):
                    logits = state.to(lesson.rows.dtype) @ lesson.rows.T
                    drafted = lesson.token_ids[logits.max(dim=-1).indices.cpu()]
                    right = right & (drafted == choices[places + 1 + head])
                    columns.append(right)
                parts.append(torch.stack(columns, dim=1))
        return torch.cat(parts)

    def save(self, folder: Path, training: Mapping[str, Any]) -> None:
        write_medusa(folder, self.module, self._lesson.token_ids, self._target, training)

    def _states(self, recording: Recording, places: torch.Tensor) -> list[torch.Tensor]:
        state = recording.hidden[places, -1].to(self._target.device, master_dtype(self._target))
        with mixed_precision(self._target):
            states: list[torch.Tensor] = self.module(state, HEADS)
        return states
