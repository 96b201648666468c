"""Tiny random models in float64, their plain output, and a controller that decides at random."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import (
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from autospec.engine.drafting import ModelProposer
from autospec.engine.model import CausalModel
from autospec.proposers.base import LookupProposer
from autospec.proposers.draft_model import DraftModelProposer
from autospec.proposers.ngram import NgramProposer
from autospec.proposers.suffix import SuffixProposer
from autospec.records import (
    BatchState,
    Float32Array,
    Int16Array,
    Plan,
    Request,
    StepResult,
)

VOCAB = 24
CAPACITY = 160
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CAPACITY,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}

FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "qwen2-window": lambda: Qwen2ForCausalLM(
        Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=12, max_window_layers=1)
    ),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=None)),
    "smollm3": lambda: SmolLM3ForCausalLM(SmolLM3Config(**SIZES, no_rope_layer_interval=2)),
    "granite": lambda: GraniteForCausalLM(
        GraniteConfig(
            **SIZES,
            embedding_multiplier=2.0,
            logits_scaling=3.0,
            residual_multiplier=0.5,
            attention_multiplier=0.3,
        )
    ),
    "olmo2": lambda: Olmo2ForCausalLM(Olmo2Config(**SIZES)),
    "phi3": lambda: Phi3ForCausalLM(Phi3Config(**SIZES, sliding_window=12)),
    "mistral-window": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=10)),
}


def tiny(family: str, seed: int = 0) -> PreTrainedModel:
    """A random model whose greedy output neither loops at once nor is uniform noise."""
    torch.manual_seed(seed)
    model = FAMILIES[family]()
    cast(torch.nn.Module, model).to(torch.float64)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 1.0 if "embed" in name or "lm_head" in name else 0.25)
    model.eval()
    return model


def greedy(model: PreTrainedModel, prompt: list[int], num_tokens: int) -> list[int]:
    """Plain greedy decoding, one full forward per token, without any cache."""
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(num_tokens):
            logits = model(torch.tensor([tokens]), use_cache=False).logits
            tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@dataclass
class ScriptedController:
    """Chooses proposers, draft lengths and trims at random, and checks what the engine reports."""

    num_proposers: int
    k_max: int
    rng: np.random.Generator
    running: set[int] = field(default_factory=set)
    results: list[tuple[Plan, StepResult]] = field(default_factory=list)
    states: list[BatchState] = field(default_factory=list)
    trims: list[tuple[Int16Array, Float32Array]] = field(default_factory=list)
    started: int = 0
    fixed_k: int | None = None
    wants: bool = True
    choices: NDArray[np.int16] | None = None  # proposers to choose among, -1 for none

    def start(self, request: Request) -> int:
        self.started += 1
        self.running.add(self.started)
        return self.started

    def plan(self, state: BatchState) -> Plan:
        assert set(state.handles.tolist()) <= self.running
        self.states.append(state)
        num_rows = len(state.handles)
        proposer = self.rng.integers(-1, self.num_proposers, num_rows).astype(np.int16)
        if self.choices is not None:
            proposer = self.rng.choice(self.choices, num_rows)
        k = self.rng.integers(0, self.k_max + 1, num_rows).astype(np.int16)
        if self.fixed_k is not None:
            proposer[:], k[:] = 0, self.fixed_k
        k[proposer < 0] = 0
        return Plan(len(self.states), state.handles, proposer, k, k, "speculate")

    def wants_offers(self) -> NDArray[np.bool_]:
        return np.full(self.num_proposers, self.wants)

    def trim(self, plan: Plan, drafted: Int16Array, confidence: Float32Array) -> Plan:
        assert confidence.shape == (len(drafted), self.k_max)
        self.trims.append((drafted.copy(), confidence.copy()))
        if self.fixed_k is not None:
            return plan._replace(verify=drafted)
        verify = np.minimum(drafted, self.rng.integers(0, self.k_max + 1, len(drafted)))
        return plan._replace(verify=verify.astype(np.int16))

    def observe(self, plan: Plan, result: StepResult) -> None:
        assert (result.accepted <= result.verified).all()
        assert (result.committed >= 1).all()
        assert (result.committed <= result.accepted + 1).all()
        self.results.append((plan, result))

    def finish(self, handle: int) -> None:
        self.running.remove(handle)


def proposers_for(model: PreTrainedModel, slots: int) -> list[LookupProposer | ModelProposer]:
    """Two lookup proposers and a draft model that is right about half of the time."""
    draft = copy.deepcopy(model)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in draft.parameters():
            if parameter.ndim > 1:
                parameter.add_(torch.randn_like(parameter) * 0.03)
    return [
        NgramProposer(slots, CAPACITY, max_k=8, min_match=1, max_match=3),
        SuffixProposer(slots, CAPACITY, max_k=8),
        DraftModelProposer(CausalModel(draft, name="draft"), max_k=8),
    ]
