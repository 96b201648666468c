"""Every proposer there is, mixed at random in one batch: the target's output stays its own."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from autospec.engine.decoder import Decoder
from autospec.engine.drafting import ModelProposer
from autospec.engine.model import CausalModel
from autospec.engine.request import GenerationRequest
from autospec.proposers.base import LookupProposer
from autospec.proposers.draft_model import DraftModelProposer
from autospec.proposers.early_exit import EarlyExitProposer
from autospec.proposers.heads import HEAD_KINDS, head_state_bytes, load_head
from autospec.proposers.lookahead import LookaheadProposer
from autospec.proposers.medusa_folder import MedusaBlocks, MedusaLayout, write_medusa
from autospec.proposers.mlp_folder import write_shared
from autospec.proposers.mlp_network import SharedLayout, SharedNetwork
from autospec.proposers.ngram import NgramProposer
from autospec.proposers.suffix import SuffixProposer
from autospec.proposers.suffix_after import SuffixAfter
from tests.engine.test_distribution import (
    FITS,
    SETTINGS,
    ConfidentController,
    deviation,
    exact,
)
from tests.engine.tiny_models import CAPACITY, SIZES, VOCAB, ScriptedController, greedy, tiny
from tests.proposers.eagle_folders import eagle_1, eagle_3

HIDDEN = int(SIZES["hidden_size"])


def every_proposer(
    model: PreTrainedModel, folder: Path, slots: int, vocab: int
) -> tuple[CausalModel, list[LookupProposer | ModelProposer]]:
    """The target and all proposers for it: lookups, a draft that is often right, random heads."""
    target = CausalModel(copy.deepcopy(model), name="tiny")
    draft = copy.deepcopy(model)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in draft.parameters():
            if parameter.ndim > 1:
                parameter.add_(torch.randn_like(parameter) * 0.03)
    eagle_1(folder / "eagle", vocab=vocab)
    eagle_3(folder / "eagle3", vocab=vocab)
    frequent = torch.arange(vocab - 2)
    network = SharedNetwork(SharedLayout(HIDDEN, 8))
    write_shared(folder / "mlp", network, frequent, target, 4, {})
    blocks = MedusaBlocks(MedusaLayout(HIDDEN, num_heads=4, num_layers=1, has_bias=True))
    write_medusa(folder / "medusa", blocks, frequent, target, {})
    suffix = SuffixProposer(slots, CAPACITY, max_k=5, min_match=1)
    small = DraftModelProposer(CausalModel(draft, name="draft"), max_k=5)
    return target, [
        NgramProposer(slots, CAPACITY, max_k=5, min_match=1, max_match=3),
        suffix,
        small,
        load_head(folder / "eagle", target),
        load_head(folder / "eagle3", target),
        load_head(folder / "mlp", target),
        load_head(folder / "medusa", target),
        SuffixAfter(small, suffix, head_k=1, shared=True),
        SuffixAfter(load_head(folder / "eagle", target), SuffixProposer(slots, CAPACITY, max_k=4)),
        EarlyExitProposer(1),
        LookaheadProposer(window=3, max_k=5),
    ]


@pytest.mark.parametrize("family", ["llama", "qwen2-window", "granite"])
def test_greedy_equals_plain_decoding(family: str, tmp_path: Path) -> None:
    """Any proposer, k from 0 to 6 per request and step, chunked prefill, requests coming late."""
    rng = np.random.default_rng(5)
    model = tiny(family)
    prompts = [rng.integers(0, VOCAB, size).tolist() for size in (1, 3, 40, 17, 9, 64)]
    target, proposers = every_proposer(model, tmp_path, 4, VOCAB)
    controller = ScriptedController(len(proposers), 6, rng)
    decoder = Decoder(target, proposers, controller, slots=4, capacity=CAPACITY, prefill_tokens=11)
    outputs = decoder.generate([GenerationRequest(prompt, max_tokens=60) for prompt in prompts])
    for prompt, output in zip(prompts, outputs, strict=True):
        assert list(output.token_ids) == greedy(model, prompt, 60)
    right_by_chance = 0
    for index, proposer in enumerate(proposers):
        verified, accepted = 0, 0
        for plan, result in controller.results:
            verified += int(result.verified[plan.proposer == index].sum())
            accepted += int(result.accepted[plan.proposer == index].sum())
        assert verified > accepted, proposer.info.name
        if any(kind in proposer.info.name for kind in HEAD_KINDS):
            right_by_chance += accepted
        else:
            assert accepted > 0, proposer.info.name
    assert right_by_chance > 0


def test_memory_of_heads_is_known_before_they_are_loaded(tmp_path: Path) -> None:
    target, _ = every_proposer(tiny("llama"), tmp_path, 3, VOCAB)
    for folder in ("eagle", "eagle3", "mlp", "medusa"):
        head = load_head(tmp_path / folder, target)
        head.attach(target, target.new_cache(3, 50))
        assert head_state_bytes(tmp_path / folder, target, 3, 50) == head.memory_bytes() > 0


FEW = 8
SAMPLES = 20_000
PROMPT = [5, 6, 7, 0, 1, 2, 4, 3]
"""Every token once, so that a lookup finds something behind any of them."""


def few_tokens_target() -> PreTrainedModel:
    """As ``tiny_target`` of the distribution tests, for the heads here."""
    torch.manual_seed(3)
    sizes = {
        **SIZES,
        "vocab_size": FEW,
        "intermediate_size": 16,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 32,
    }
    model = LlamaForCausalLM(LlamaConfig(**sizes))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.3)
    return model


GROUPS = {
    "heads": ("eagle", "eagle3", "mlp_speculator", "medusa"),
    "composites and the target itself": (
        "suffix_after(draft_model)",
        "suffix_after(eagle)",
        "early_exit",
        "lookahead",
    ),
}


@pytest.mark.parametrize("group", GROUPS)
def test_sampling_keeps_the_distribution(group: str, tmp_path: Path) -> None:
    """Proposers change at random from step to step; drafts are trimmed by their confidence."""
    settings = SETTINGS["hot-all"]
    model = few_tokens_target()
    expected = []
    with torch.inference_mode():
        first = model(torch.tensor([PROMPT])).logits[0, -1].double().numpy()
        for token, prob in enumerate(exact(first, settings)):
            second = model(torch.tensor([[*PROMPT, token]])).logits[0, -1].double().numpy()
            expected.append(prob * exact(second, settings))
    target, proposers = every_proposer(model, tmp_path, 500, FEW)
    # Those that others share must stay, but only the group is asked to draft.
    controller = ConfidentController(len(proposers), 6, np.random.default_rng(4))
    listed = [proposer.info.name for proposer in proposers]
    controller.choices = np.array([-1, *(listed.index(name) for name in GROUPS[group])], np.int16)
    decoder = Decoder(target, proposers, controller, slots=500, capacity=len(PROMPT) + 6)
    request = GenerationRequest(PROMPT, max_tokens=3, sampling=settings)
    counts = np.zeros(FEW * FEW, dtype=np.int64)
    for output in decoder.generate([request] * SAMPLES):
        counts[output.token_ids[0] * FEW + output.token_ids[1]] += 1
    verified = sum(int(result.verified.sum()) for _, result in controller.results)
    assert verified > SAMPLES // 10
    assert deviation(counts, np.concatenate(expected)) < FITS
