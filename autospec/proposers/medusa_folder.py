"""Folders of Medusa heads, in the two layouts that are published, and writing one.

- vLLM: ``blocks.{i}.layers.{j}.weight`` and ``lm_heads.{i}.weight``, under ``medusa_heads.`` or
  not; with ``truncated_vocab_size`` a ``token_map`` of the tokens that are drafted; with
  ``original_lm_head`` one ``lm_heads.0`` for all.
- FasterDecoding/Medusa (``medusa_lm_head.pt``): ``{i}.{j}.linear.{weight,bias}`` and, behind the
  last block, ``{i}.{blocks}.weight``, under ``medusa_head.`` or not; ``medusa_num_heads`` and
  ``medusa_num_layers`` in the configuration.

Where a folder of the first layout has no output rows at all, they are the target's own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.functional import silu

from autospec.engine.model import CausalModel
from autospec.errors import ModelError
from autospec.proposers.checkpoint import CONFIG, Checkpoint

_TOKEN_MAP = "token_map"


@dataclass(frozen=True, slots=True)
class MedusaLayout:
    """The sizes of Medusa heads: ``num_layers`` residual blocks in each, then output rows."""

    hidden_size: int
    num_heads: int
    num_layers: int
    has_bias: bool


class MedusaBlocks(nn.Module):
    """What is between the target's state and the output rows: one stack of blocks per head."""

    def __init__(self, layout: MedusaLayout) -> None:
        super().__init__()
        self.layout = layout
        size = layout.hidden_size
        self.blocks = nn.ModuleList(
            nn.ModuleList(
                nn.Linear(size, size, bias=layout.has_bias) for _ in range(layout.num_layers)
            )
            for _ in range(layout.num_heads)
        )

    def forward(self, state: torch.Tensor, num_heads: int) -> list[torch.Tensor]:
        """States [n, hidden_size] of the first ``num_heads`` heads."""
        states = []
        for head in range(num_heads):
            values = state
            block = self.blocks[head]
            assert isinstance(block, nn.ModuleList)
            for layer in block:
                values = values + silu(layer(values))
            states.append(values)
        return states


@dataclass(frozen=True, slots=True)
class MedusaHeads:
    """Heads as drafting needs them: ``rows`` of each, and the tokens [columns] that these stand
    for, None for all of the target's."""

    blocks: MedusaBlocks
    rows: tuple[torch.Tensor, ...]  # [columns, hidden_size] each
    token_ids: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _Names:
    """How a folder calls its tensors."""

    layer: str
    rows: str
    prefix: str


def num_heads(checkpoint: Checkpoint) -> int:
    """How many tokens the heads in a folder draft."""
    original = "medusa_num_heads" in checkpoint.config
    return checkpoint.integer("medusa_num_heads" if original else "num_heads")


def read_medusa(checkpoint: Checkpoint, target: CausalModel) -> MedusaHeads:
    """Load heads for ``target``. Raises ModelError where they do not fit it."""
    layers = (
        "medusa_num_layers" if "medusa_num_layers" in checkpoint.config else "num_hidden_layers"
    )
    num_layers = checkpoint.integer(layers, 1)
    names = _names(checkpoint, num_layers)
    for key, whole in (("hidden_size", target.hidden_size), ("vocab_size", target.vocab_size)):
        if key in checkpoint.config:
            checkpoint.fits(key, checkpoint.integer(key), whole, target.name)
    has_bias = f"{names.layer.format(0, 0)}.bias" in checkpoint.names
    blocks = MedusaBlocks(
        MedusaLayout(target.hidden_size, num_heads(checkpoint), num_layers, has_bias)
    )
    state = {}
    for key, parameter in blocks.state_dict().items():
        _, head, layer, kind = key.split(".")
        name = f"{names.layer.format(head, layer)}.{kind}"
        state[key] = checkpoint.tensor(
            name, parameter.shape, dtype=target.dtype, device=target.device
        )
    blocks.load_state_dict(state, assign=True)
    blocks.requires_grad_(False)
    token_ids = _token_ids(checkpoint, target, names)
    return MedusaHeads(blocks, _rows(checkpoint, target, names, token_ids), token_ids)


def write_medusa(
    folder: Path,
    blocks: MedusaBlocks,
    token_ids: torch.Tensor,
    target: CausalModel,
    training: Mapping[str, Any],
) -> None:
    """Write heads in bfloat16 that draft ``token_ids`` through the target's own output rows."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for head, block in enumerate(blocks.blocks):
        assert isinstance(block, nn.ModuleList)
        for number, layer in enumerate(block):
            for name, value in layer.state_dict().items():
                key = f"blocks.{head}.layers.{number}.{name}"
                tensors[key] = value.detach().to("cpu", torch.bfloat16).contiguous()
    tensors[_TOKEN_MAP] = token_ids.cpu()
    save_file(tensors, folder / "model.safetensors")
    layout = blocks.layout
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "target": target.name,
        "hidden_size": layout.hidden_size,
        "vocab_size": target.vocab_size,
        "truncated_vocab_size": len(token_ids),
        "num_heads": layout.num_heads,
        "num_hidden_layers": layout.num_layers,
        "medusa_fc_bias": layout.has_bias,
        "training": dict(training),
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _names(checkpoint: Checkpoint, num_layers: int) -> _Names:
    if any(".linear." in name for name in checkpoint.names):
        prefix = (
            "medusa_head." if any(n.startswith("medusa_head.") for n in checkpoint.names) else ""
        )
        return _Names(f"{prefix}{{}}.{{}}.linear", f"{prefix}{{}}.{num_layers}.weight", prefix)
    prefix = "medusa_heads." if any(n.startswith("medusa_heads.") for n in checkpoint.names) else ""
    shared = checkpoint.flag("original_lm_head", False)
    rows = "lm_heads.0.weight" if shared else "lm_heads.{}.weight"
    return _Names(f"{prefix}blocks.{{}}.layers.{{}}", prefix + rows, prefix)


def _token_ids(checkpoint: Checkpoint, target: CausalModel, names: _Names) -> torch.Tensor | None:
    count = checkpoint.integer("truncated_vocab_size", target.vocab_size)
    if count >= target.vocab_size:
        return None
    prefixed = names.prefix + _TOKEN_MAP
    name = prefixed if prefixed in checkpoint.names else _TOKEN_MAP
    tokens = checkpoint.tensor(name, (count,), dtype=torch.int64, device=target.device)
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= target.vocab_size:
        raise ModelError(
            f"{checkpoint.folder}: {_TOKEN_MAP} holds tokens {low} to {high}; "
            f"allowed are 0 to {target.vocab_size - 1}"
        )
    return tokens


def _rows(
    checkpoint: Checkpoint, target: CausalModel, names: _Names, token_ids: torch.Tensor | None
) -> tuple[torch.Tensor, ...]:
    """Output rows of every head; those over the whole vocabulary are cut to ``token_ids``."""
    wanted = [names.rows.format(head) for head in range(num_heads(checkpoint))]
    if not any("lm_head" in name for name in checkpoint.names) and ".linear" not in names.layer:
        every = torch.arange(target.vocab_size, device=target.device)
        own = target.output_rows(every if token_ids is None else token_ids)
        return tuple(own for _ in wanted)
    loaded: dict[str, torch.Tensor] = {}
    for name in dict.fromkeys(wanted):
        is_cut = token_ids is not None and checkpoint.shape(name)[0] != target.vocab_size
        count = len(token_ids) if token_ids is not None and is_cut else target.vocab_size
        rows = checkpoint.tensor(
            name, (count, target.hidden_size), dtype=target.dtype, device=target.device
        )
        loaded[name] = rows if token_ids is None or is_cut else rows[token_ids]
    return tuple(loaded[name] for name in wanted)
