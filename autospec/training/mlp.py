"""Training of AutoSpec's own recurrent MLP head."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from autospec.engine.model import CausalModel
from autospec.proposers.mlp_folder import write_shared
from autospec.proposers.mlp_network import SharedLayout, SharedNetwork
from autospec.training.recording import Recording
from autospec.training.rows_loss import rows_loss
from autospec.training.trainee import STEP_SHARE, Lesson, master_dtype, mixed_precision

TRAINED_STEPS = 2
DRAFTED_STEPS = 5
_EVALUATED = 2048


class MlpTrainee:
    """Learns from single positions: the state there, and the tokens that followed."""

    def __init__(
        self, target: CausalModel, lesson: Lesson, *, inner_size: int, batch: int, seed: int
    ) -> None:
        self._target = target
        self._lesson = lesson
        self._places = lesson.recording.places(TRAINED_STEPS + 1)
        self.num_units = len(self._places)
        self.batch_units = batch
        self.module = _new_network(target, lesson, inner_size, seed)

    def loss(self, units: torch.Tensor) -> torch.Tensor:
        lesson, device = self._lesson, self._target.device
        places = self._places[units]
        state = lesson.recording.hidden[places, -1].to(device, master_dtype(self._target))
        total = torch.zeros((), dtype=state.dtype, device=device)
        for step in range(TRAINED_STEPS):
            following = places + 1 + step
            tokens = lesson.recording.tokens[following].to(device)
            with mixed_precision(self._target):
                state = self.module(state, self._target.embed(tokens).to(state.dtype))
            probs = lesson.labels.probs[following].to(device)
            columns = lesson.labels.columns[following].to(device)
            total = total + STEP_SHARE**step * rows_loss(state, lesson.rows, probs, columns)
        return total

    def hits(self, recording: Recording, choices: torch.Tensor) -> torch.Tensor:
        target, lesson = self._target, self._lesson
        parts = []
        with torch.inference_mode():
            for places in recording.places(DRAFTED_STEPS + 1).split(_EVALUATED):
                state = recording.hidden[places, -1].to(target.device, master_dtype(target))
                right = torch.ones(len(places), dtype=torch.bool)
                columns = []
                for step in range(DRAFTED_STEPS):
                    following = places + 1 + step
                    tokens = recording.tokens[following].to(target.device)
                    with mixed_precision(target):
                        state = self.module(state, target.embed(tokens).to(state.dtype))
                    logits = state.to(lesson.rows.dtype) @ lesson.rows.T
                    drafted = lesson.token_ids[logits.max(dim=-1).indices.cpu()]
                    right = right & (drafted == choices[following])
                    columns.append(right)
                parts.append(torch.stack(columns, dim=1))
        return torch.cat(parts)

    def save(self, folder: Path, training: Mapping[str, Any]) -> None:
        write_shared(
            folder, self.module, self._lesson.token_ids, self._target, DRAFTED_STEPS, training
        )


def _new_network(target: CausalModel, lesson: Lesson, inner_size: int, seed: int) -> SharedNetwork:
    """Starts by repeating half of the state it is given, at the scale of the target's states."""
    generator = torch.Generator().manual_seed(seed)
    network = SharedNetwork(SharedLayout(target.hidden_size, inner_size))
    with torch.no_grad():
        for linear, spread in (
            (network.base, 0.002),
            (network.gate, 0.02),
            (network.up, 0.02),
            (network.down, 0.002),
        ):
            noise = torch.randn(linear.weight.shape, generator=generator)
            linear.weight.copy_(spread * noise)
        network.base.weight[:, : target.hidden_size] += 0.5 * torch.eye(target.hidden_size)
        scale = lesson.recording.hidden[:, -1].float().square().mean(dim=0).sqrt()
        network.output_norm.copy_(scale)
    return network.to(target.device, master_dtype(target))
