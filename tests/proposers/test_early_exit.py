"""The target's first layers as its draft."""

from __future__ import annotations

import copy
from typing import Any, cast

import numpy as np
import pytest
import torch

from autospec.engine.decoder import Decoder
from autospec.engine.model import CausalModel
from autospec.engine.request import GenerationRequest
from autospec.errors import ModelError
from autospec.proposers.early_exit import EarlyExitProposer
from tests.engine.tiny_models import CAPACITY, ScriptedController, greedy, tiny

torch.set_num_threads(1)


def shortened(family: str, layers: int) -> Any:
    """The same model without its last layers, cut the obvious way."""
    model = cast(Any, tiny(family))
    del model.model.layers[layers:]
    model.config.num_hidden_layers = layers
    return model


class Recorder(EarlyExitProposer):
    """Keeps what was drafted behind which text."""

    seen: list[tuple[list[int], list[int]]]

    def draft(self, task: Any) -> Any:
        drafts = super().draft(task)
        for row, slot in enumerate(task.slots.tolist()):
            if task.k[row]:
                text = task.history.tokens[slot, : task.history.lengths[slot]].tolist()
                self.seen.append((text, drafts.tokens[row, : drafts.lengths[row]].tolist()))
        return drafts


@pytest.mark.parametrize("family", ["llama", "qwen2-window", "smollm3", "granite", "olmo2", "phi3"])
def test_drafts_are_those_of_the_shortened_model(family: str) -> None:
    """Among accepted, rejected and foreign tokens, and the target's output stays its own."""
    model = tiny(family)
    early = Recorder(1, max_k=4)
    early.seen = []
    controller = ScriptedController(1, 4, np.random.default_rng(0))
    decoder = Decoder(
        CausalModel(copy.deepcopy(model)), [early], controller, slots=2, capacity=CAPACITY
    )
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8] * 3]
    outputs = decoder.generate([GenerationRequest(prompt, max_tokens=24) for prompt in prompts])
    for prompt, output in zip(prompts, outputs, strict=True):
        assert list(output.token_ids) == greedy(model, prompt, 24)
    short = shortened(family, 1)
    assert len(early.seen) > 10
    for text, drafted in early.seen[::2]:
        assert drafted == greedy(short, text, len(drafted))


def test_it_costs_no_memory_and_is_never_stale() -> None:
    target = CausalModel(tiny("llama"))
    early = EarlyExitProposer(1)
    early.attach(target, target.new_cache(2, 16))
    assert early.memory_bytes() == 0
    assert not early.info.needs_state


@pytest.mark.parametrize("layers", [0, 2])
def test_layers_that_the_target_does_not_have(layers: int) -> None:
    target = CausalModel(tiny("llama"))
    with pytest.raises(ModelError, match=f"layers is {layers}; model has 2, so it must be from 1"):
        EarlyExitProposer(layers).attach(target, target.new_cache(1, 16))
