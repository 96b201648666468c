"""Folders of MLP speculators: the published layout, and AutoSpec's own with its format version.

Published: config keys and tensor names of IBM's ``MLPSpeculatorPreTrainedModel`` (foundation-model
stack) as vLLM loads them: ``speculator.{emb,proj,head}.{i}.weight``, ``speculator.ln.{i}.{weight,
bias}``, the prefix optional. With tied weights later stages may be left out of the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from autospec.engine.model import CausalModel
from autospec.errors import ModelError
from autospec.proposers.checkpoint import CONFIG, Checkpoint
from autospec.proposers.mlp_network import (
    PublishedLayout,
    PublishedNetwork,
    SharedLayout,
    SharedNetwork,
)

PUBLISHED = "MLPSpeculatorPreTrainedModel"
SHARED = "AutoSpecMlpSpeculator"
FORMAT_VERSION = 1
WEIGHTS = "model.safetensors"
_TOKENS = "frequent_tokens"
_PREFIX = "speculator."


def architecture(checkpoint: Checkpoint) -> str:
    """Which of the two layouts a folder has. Raises ModelError for another."""
    names = checkpoint.config.get("architectures")
    found = names[0] if isinstance(names, list) and names else None
    if found is None and checkpoint.config.get("model_type") == "mlp_speculator":
        found = PUBLISHED
    checkpoint.require("architectures", found, (PUBLISHED, SHARED))
    return str(found)


def steps_of(checkpoint: Checkpoint) -> int:
    """How many tokens a head was made to draft."""
    published = architecture(checkpoint) == PUBLISHED
    return checkpoint.integer("n_predict" if published else "max_k")


def read_published(checkpoint: Checkpoint, target: CausalModel) -> PublishedNetwork:
    """Load a published head for ``target``. Raises ModelError where it does not fit."""
    emb_dim = checkpoint.integer("emb_dim")
    layout = PublishedLayout(
        vocab_size=checkpoint.integer("vocab_size"),
        emb_dim=emb_dim,
        inner_dim=checkpoint.integer("inner_dim", 0, at_least=0) or emb_dim,
        n_predict=checkpoint.integer("n_predict"),
        tie_weights=checkpoint.flag("tie_weights", False),
        scale_input=checkpoint.flag("scale_input", False),
    )
    checkpoint.fits("emb_dim", emb_dim, target.hidden_size, f"{target.name}'s hidden state")
    checkpoint.fits("vocab_size", layout.vocab_size, target.vocab_size, f"{target.name}'s output")
    prefix = _PREFIX if any(name.startswith(_PREFIX) for name in checkpoint.names) else ""
    network = PublishedNetwork(layout)
    for part, name in (
        (network.emb, "emb.{}.weight"),
        (network.proj, "proj.{}.weight"),
        (network.head, "head.{}.weight"),
        (network.scale, "ln.{}.weight"),
        (network.shift, "ln.{}.bias"),
    ):
        for stage, parameter in enumerate(part):
            part[stage] = _frozen(checkpoint, prefix + name.format(stage), parameter.shape, target)
    return network


def read_shared(checkpoint: Checkpoint, target: CausalModel) -> tuple[SharedNetwork, torch.Tensor]:
    """Load a head of AutoSpec's own for ``target``, and the tokens [frequent] that it drafts."""
    checkpoint.require("format_version", checkpoint.integer("format_version"), (FORMAT_VERSION,))
    layout = SharedLayout(checkpoint.integer("hidden_size"), checkpoint.integer("inner_size"))
    checkpoint.fits(
        "hidden_size", layout.hidden_size, target.hidden_size, f"{target.name}'s hidden state"
    )
    checkpoint.fits(
        "vocab_size",
        checkpoint.integer("vocab_size"),
        target.vocab_size,
        f"{target.name}'s output",
    )
    num_tokens = checkpoint.integer("num_frequent_tokens")
    tokens = checkpoint.tensor(_TOKENS, (num_tokens,), dtype=torch.int64, device=target.device)
    if (
        num_tokens > target.vocab_size
        or int(tokens.min()) < 0
        or int(tokens.max()) >= target.vocab_size
    ):
        raise ModelError(
            f"{checkpoint.folder}: {_TOKENS} holds tokens {int(tokens.min())} to "
            f"{int(tokens.max())}; allowed are 0 to {target.vocab_size - 1}"
        )
    network = SharedNetwork(layout)
    state = {
        name: checkpoint.tensor(name, parameter.shape, dtype=target.dtype, device=target.device)
        for name, parameter in network.state_dict().items()
    }
    network.load_state_dict(state, assign=True)
    network.requires_grad_(False)
    return network, tokens


def write_shared(
    folder: Path,
    network: SharedNetwork,
    token_ids: torch.Tensor,
    target: CausalModel,
    max_k: int,
    training: Mapping[str, Any],
) -> None:
    """Write a head in bfloat16, and ``training``, how it came to be, into its configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.detach().to("cpu", torch.bfloat16).contiguous()
        for name, tensor in network.state_dict().items()
    }
    tensors[_TOKENS] = token_ids.to("cpu", torch.int32)
    save_file(tensors, folder / WEIGHTS)
    config = {
        "architectures": [SHARED],
        "model_type": "autospec_mlp_speculator",
        "format_version": FORMAT_VERSION,
        "target": target.name,
        "hidden_size": network.layout.hidden_size,
        "inner_size": network.layout.inner_size,
        "vocab_size": target.vocab_size,
        "num_frequent_tokens": len(token_ids),
        "max_k": max_k,
        "training": dict(training),
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _frozen(
    checkpoint: Checkpoint, name: str, shape: torch.Size, target: CausalModel
) -> torch.nn.Parameter:
    tensor = checkpoint.tensor(name, shape, dtype=target.dtype, device=target.device)
    return torch.nn.Parameter(tensor, requires_grad=False)
