"""Training of EAGLE-1 heads that draft frequent tokens through the target's own output rows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig

from autospec.engine.model import CausalModel
from autospec.proposers.checkpoint import CONFIG
from autospec.proposers.eagle_files import save_eagle
from autospec.proposers.eagle_head import CausalSequences, EagleHead, EagleLayout
from autospec.training.recording import Recording
from autospec.training.rows_loss import rows_loss
from autospec.training.trainee import STEP_SHARE, Lesson, master_dtype, mixed_precision

TRAINED_STEPS = 2
DRAFTED_STEPS = 5
_EVALUATED = 8


class EagleTrainee:
    """Learns from whole sequences. From the second step on, a head goes on from its own states.

    There it sees its own states of all earlier places too, where drafting sees the target's: the
    acceptance of later positions comes out slightly low.
    """

    def __init__(self, target: CausalModel, lesson: Lesson, *, batch: int, seed: int) -> None:
        self._target = target
        self._lesson = lesson
        self.num_units = len(lesson.recording.starts) - 1
        tokens = max(1, len(lesson.recording.tokens) // max(1, self.num_units))
        self.batch_units = max(1, batch // tokens)
        layout = EagleLayout(_layer_config(target), target.hidden_size, (-1,))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.module = EagleHead(layout, lesson.token_ids)
        self.module.to(target.device, master_dtype(target))

    def loss(self, units: torch.Tensor) -> torch.Tensor:
        lesson, device = self._lesson, self._target.device
        total = torch.zeros((), dtype=master_dtype(self._target), device=device)
        passes = self._passes(lesson.recording, units.tolist(), TRAINED_STEPS)
        for step, (states, following) in enumerate(passes):
            if not len(following):
                continue
            probs = lesson.labels.probs[following].to(device)
            columns = lesson.labels.columns[following].to(device)
            total = total + STEP_SHARE**step * rows_loss(states, lesson.rows, probs, columns)
        return total

    def hits(self, recording: Recording, choices: torch.Tensor) -> torch.Tensor:
        lesson = self._lesson
        right: dict[int, list[bool]] = {}
        with torch.inference_mode():
            numbers = list(range(len(recording.starts) - 1))
            for begin in range(0, len(numbers), _EVALUATED):
                passes = self._passes(recording, numbers[begin : begin + _EVALUATED], DRAFTED_STEPS)
                for step, (states, following) in enumerate(passes):
                    logits = states.to(lesson.rows.dtype) @ lesson.rows.T
                    drafted = lesson.token_ids[logits.max(dim=-1).indices.cpu()]
                    good = (drafted == choices[following]).tolist()
                    for place, hit in zip((following - 1 - step).tolist(), good, strict=True):
                        row = right.setdefault(place, [])
                        row.append(hit and (not row or row[-1]))
        rows = [right[place] for place in sorted(right) if len(right[place]) == DRAFTED_STEPS]
        return torch.tensor(rows, dtype=torch.bool).view(-1, DRAFTED_STEPS)

    def save(self, folder: Path, training: Mapping[str, Any]) -> None:
        save_eagle(self.module.to(self._target.dtype), folder, self._target)
        file = folder / CONFIG
        config = json.loads(file.read_text(encoding="utf-8")) | {"training": dict(training)}
        file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")

    def _passes(
        self, recording: Recording, numbers: list[int], steps: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """For each step the states that are learned from, and the places that they stand for."""
        target = self._target
        spans = [
            torch.arange(int(recording.starts[number]), int(recording.starts[number + 1]))
            for number in numbers
        ]
        spans = [span for span in spans if len(span) > steps]
        known = [
            recording.hidden[span[:-1], -1].to(target.device, master_dtype(target))
            for span in spans
        ]
        for step in range(steps):
            following = [span[1 + step :] for span in spans]
            lengths = [len(places) for places in following]
            places = torch.cat(following)
            embedded = target.embed(recording.tokens[places].to(target.device))
            sequences = CausalSequences(lengths, target.device)
            with mixed_precision(target):
                states = self.module(embedded.to(known[0].dtype), torch.cat(known), sequences)
            # The draft's own tokens begin one place after the first state that is fed.
            learned = torch.cat([~recording.context[span[1 : len(span) - step]] for span in spans])
            yield states[learned.to(states.device)], places[learned]
            known = [part[:-1] for part in states.split(lengths)]


def _layer_config(target: CausalModel) -> LlamaConfig:
    """One decoder layer like those of the target."""
    config = target.model.config.get_text_config()
    return LlamaConfig(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=1,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", None),
        head_dim=getattr(config, "head_dim", None),
        max_position_embeddings=min(target.context_tokens, 1 << 20),
        rms_norm_eps=getattr(config, "rms_norm_eps", 1e-6),
        rope_parameters=getattr(config, "rope_parameters", None),
        tie_word_embeddings=False,
    )
