"""The demo's real model in float32, token for token against ``transformers.generate``."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from autospec.engine.decoder import Decoder
from autospec.engine.demo_model import demo_model_path
from autospec.engine.model import CausalModel
from autospec.engine.request import GenerationRequest
from autospec.proposers.ngram import NgramProposer
from autospec.proposers.suffix import SuffixProposer
from tests.engine.tiny_models import ScriptedController

PROMPTS = (
    "Repeat this list twice: red, green, blue, white. Red, green, blue, white. Red, green,",
    "def area(width, height):\n    return width * height\n\ndef volume(width, height, depth):\n",
    "The capital of France is",
)
NEW_TOKENS = 24


@pytest.mark.skipif(demo_model_path() is None, reason="the demo's model has not been converted")
def test_speculative_greedy_equals_generate() -> None:
    folder = demo_model_path()
    assert folder is not None
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = [tokenizer(prompt).input_ids for prompt in PROMPTS]
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        output = cast(Any, reference).generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
        )
        expected.append(output[0, len(prompt) :].tolist())
    controller = ScriptedController(2, 8, np.random.default_rng(1))
    decoder = Decoder(
        CausalModel.load(folder, dtype="float32"),
        [NgramProposer(3, 256, max_k=8, min_match=1), SuffixProposer(3, 256, max_k=8)],
        controller,
        slots=3,
        capacity=256,
        prefill_tokens=16,
    )
    outputs = decoder.generate([GenerationRequest(prompt, NEW_TOKENS) for prompt in prompts])
    assert [list(output.token_ids) for output in outputs] == expected
    assert sum(int(result.accepted.sum()) for _, result in controller.results) > 0
