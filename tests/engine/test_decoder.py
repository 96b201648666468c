"""The decoder against plain greedy decoding by transformers, on tiny random models in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from autospec.engine.decoder import Decoder
from autospec.engine.drafting import ModelProposer
from autospec.engine.model import CausalModel
from autospec.engine.request import GenerationRequest
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
SIZES = {
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
    "mistral-window": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=10)),
}


def tiny(family: str, seed: int = 0) -> PreTrainedModel:
    """A random model whose greedy output neither loops at once nor is uniform noise."""
    torch.manual_seed(seed)
    model = FAMILIES[family]().to(torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.25)
    return model.eval()


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

    def start(self, request: Request) -> int:
        self.started += 1
        self.running.add(self.started)
        return self.started

    def plan(self, state: BatchState) -> Plan:
        assert set(state.handles.tolist()) <= self.running
        self.states.append(state)
        num_rows = len(state.handles)
        proposer = self.rng.integers(-1, self.num_proposers, num_rows).astype(np.int16)
        k = self.rng.integers(0, self.k_max + 1, num_rows).astype(np.int16)
        k[proposer < 0] = 0
        return Plan(len(self.states), state.handles, proposer, k, k, "speculate")

    def trim(self, plan: Plan, drafted: Int16Array, confidence: Float32Array) -> Plan:
        assert confidence.shape == (len(drafted), self.k_max)
        self.trims.append((drafted.copy(), confidence.copy()))
        verify = np.minimum(drafted, self.rng.integers(0, self.k_max + 1, len(drafted)))
        return replace(plan, verify=verify.astype(np.int16))

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


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_plain_decoding(family: str) -> None:
    """Any proposer, k from 0 to 8 per request and step, chunked prefill and cancellation between."""
    rng = np.random.default_rng(5)
    model = tiny(family)
    prompts = [rng.integers(0, VOCAB, size).tolist() for size in (1, 3, 40, 17, 9, 2, 64, 25, 30, 5)]
    expected = [greedy(model, prompt, 48) for prompt in prompts]
    proposers = proposers_for(model, slots=4)
    controller = ScriptedController(len(proposers), 8, rng)
    decoder = Decoder(
        CausalModel(model), proposers, controller, slots=4, capacity=CAPACITY, prefill_tokens=11
    )
    ids = [decoder.submit(GenerationRequest(prompt, max_tokens=48)) for prompt in prompts]
    streamed: dict[str, list[int]] = {request_id: [] for request_id in ids}
    outputs = {}
    steps = 0
    while decoder.has_work:
        for event in decoder.step():
            streamed[event.request_id].extend(event.token_ids)
            if event.output is not None:
                outputs[event.request_id] = event.output
        steps += 1
        if steps == 20:
            decoder.cancel(ids[1])
            decoder.cancel(ids[9])
    for request_id, reference in zip(ids, expected, strict=True):
        tokens = list(outputs[request_id].token_ids)
        assert streamed[request_id] == tokens
        if outputs[request_id].finish_reason == "cancelled":
            assert request_id in (ids[1], ids[9])
            assert tokens == reference[: len(tokens)]
        else:
            assert outputs[request_id].finish_reason == "length"
            assert tokens == reference
    assert not controller.running
    accepted = np.zeros(len(proposers))
    rejected = np.zeros(len(proposers))
    for plan, result in controller.results:
        for index in range(len(proposers)):
            rows = plan.proposer == index
            accepted[index] += result.accepted[rows].sum()
            rejected[index] += (result.verified - result.accepted)[rows].sum()
    assert (accepted > 0).all()
    assert (rejected > 0).all()
