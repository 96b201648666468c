"""Random heads for tiny targets, written as they are published, and their slow forwards."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from autospec.engine.drafting import DraftTask
from autospec.engine.model import CausalModel
from autospec.engine.sampling import SamplingParameters, SamplingRows
from autospec.proposers.base import History
from autospec.records import Int16Array, Int32Array

Tensors = dict[str, torch.Tensor]


def write_head(folder: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "m.safetensors"
    )
    return folder


def draft_task(
    history: History, k: list[int], settings: SamplingParameters | None = None
) -> DraftTask:
    slots: Int32Array = np.arange(len(k), dtype=np.int32)
    wanted: Int16Array = np.array(k, dtype=np.int16)
    return DraftTask(
        history, slots, wanted, SamplingRows.of([settings or SamplingParameters()] * len(k))
    )


@dataclass(frozen=True)
class MlpSizes:
    """What a published MLP speculator is made of."""

    vocab_size: int
    emb_dim: int
    inner_dim: int = 0
    n_predict: int = 3
    tie_weights: bool = False
    scale_input: bool = False

    @property
    def inner(self) -> int:
        return self.inner_dim or self.emb_dim


def published_mlp(sizes: MlpSizes, seed: int = 0) -> Tensors:
    """Weights under the names that ``MLPSpeculatorPreTrainedModel`` saves, float64.

    Source: ibm-fms checkpoints as read by vLLM's ``models/mlp_speculator.py``.
    """
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64) * 0.5

    tensors: Tensors = {}
    for stage in range(sizes.n_predict):
        first = 0 if not sizes.tie_weights else min(stage, 0)
        own = stage == first or not sizes.tie_weights
        if own:
            tensors[f"speculator.emb.{stage}.weight"] = random(sizes.vocab_size, sizes.inner)
            tensors[f"speculator.head.{stage}.weight"] = random(sizes.vocab_size, sizes.inner)
            tensors[f"speculator.ln.{stage}.weight"] = 1.0 + random(sizes.inner)
            tensors[f"speculator.ln.{stage}.bias"] = random(sizes.inner)
        if own or stage == 1:
            width = sizes.emb_dim if stage == 0 else sizes.inner
            tensors[f"speculator.proj.{stage}.weight"] = random(sizes.inner, width)
    return tensors


def slow_published_mlp(
    sizes: MlpSizes, tensors: Tensors, hidden: torch.Tensor, token: int, steps: int
) -> list[torch.Tensor]:
    """Logits of each greedy step from one hidden state; arXiv 2404.19124, section 3."""

    def normed(values: torch.Tensor) -> torch.Tensor:
        return values / torch.sqrt((values**2).mean() + 1e-6)

    state = normed(hidden) / math.sqrt(2) if sizes.scale_input else hidden
    state_weight = 0.5 ** (0.5 / sizes.n_predict)
    token_weight = math.sqrt((1 - state_weight**2) * (sizes.inner / 2))
    logits = []
    for step in range(steps):
        stage = 0 if sizes.tie_weights else step
        projection = min(step, 1) if sizes.tie_weights else step
        embedded = tensors[f"speculator.emb.{stage}.weight"][token]
        projected = tensors[f"speculator.proj.{projection}.weight"] @ state
        mixed = normed(projected + token_weight / state_weight * embedded)
        scaled = mixed * tensors[f"speculator.ln.{stage}.weight"]
        scaled = scaled + tensors[f"speculator.ln.{stage}.bias"]
        state = scaled * 0.5 * (1 + torch.erf(scaled / math.sqrt(2)))
        logits.append(tensors[f"speculator.head.{stage}.weight"] @ state)
        token = int(logits[-1].argmax())
    return logits


@dataclass(frozen=True)
class MedusaSizes:
    """What published Medusa heads are made of."""

    vocab_size: int
    hidden_size: int
    num_heads: int = 3
    num_layers: int = 2
    has_bias: bool = False


def medusa(sizes: MedusaSizes, rows: int, original: bool, seed: int = 0) -> Tensors:
    """Weights, float64, each head with ``rows`` output rows of its own.

    Names as FasterDecoding/Medusa saves them in ``medusa_lm_head.pt`` if ``original``, else as
    vLLM's ``models/medusa.py`` reads them.
    """
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64) * 0.3

    size = sizes.hidden_size
    tensors: Tensors = {}
    for head in range(sizes.num_heads):
        for layer in range(sizes.num_layers):
            name = f"{head}.{layer}.linear" if original else f"blocks.{head}.layers.{layer}"
            tensors[f"{name}.weight"] = random(size, size)
            if sizes.has_bias:
                tensors[f"{name}.bias"] = random(size)
        name = f"{head}.{sizes.num_layers}" if original else f"lm_heads.{head}"
        tensors[f"{name}.weight"] = random(rows, size)
    return tensors


def slow_medusa(
    sizes: MedusaSizes, tensors: Tensors, hidden: torch.Tensor, head: int, original: bool
) -> torch.Tensor:
    """Logits of one head from one hidden state; arXiv 2401.10774, section 2.1."""
    state = hidden
    for layer in range(sizes.num_layers):
        name = f"{head}.{layer}.linear" if original else f"blocks.{head}.layers.{layer}"
        inner = tensors[f"{name}.weight"] @ state
        if sizes.has_bias:
            inner = inner + tensors[f"{name}.bias"]
        state = state + inner * torch.sigmoid(inner)
    name = f"{head}.{sizes.num_layers}" if original else f"lm_heads.{head}"
    return tensors[f"{name}.weight"] @ state


def hidden_and_history(
    target: CausalModel, prompts: list[list[int]], capacity: int
) -> tuple[torch.Tensor, History]:
    """The target's last hidden state before each prompt's last token, [prompts, hidden_size]."""
    history = History(
        np.zeros((len(prompts), capacity), np.int32), np.zeros(len(prompts), np.int32)
    )
    states = []
    for slot, prompt in enumerate(prompts):
        history.tokens[slot, : len(prompt)] = prompt
        history.lengths[slot] = len(prompt)
        cache = target.new_cache(1, capacity)
        slots: Int32Array = np.zeros(1, np.int32)
        starts: Int32Array = np.zeros(1, np.int32)
        counts: Int32Array = np.array([len(prompt) - 1], np.int32)
        step = target.new_step(cache, slots, starts, counts)
        result = target.forward(torch.tensor(prompt[:-1]), step, torch.tensor([0]), (-1,))
        assert result.hidden is not None
        states.append(result.hidden[-1, 0])
    return torch.stack(states), history
