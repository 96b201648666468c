"""A proposer that fails in the middle of serving costs its drafts, never an answer."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import pytest

from autospec.engine.decoder import Decoder
from autospec.engine.model import CausalModel
from autospec.engine.request import GenerationRequest
from tests.engine.tiny_models import CAPACITY, ScriptedController, greedy, proposers_for, tiny

PROMPTS = [[1, 2, 3, 1, 2], [7], [4, 4, 4, 4]]


def failing_after(calls: int, work: Callable[..., object]) -> Callable[..., object]:
    """``work``, which raises from the given call on."""
    count = 0

    def call(*arguments: object) -> object:
        nonlocal count
        count += 1
        if count > calls:
            raise RuntimeError("injected")
        return work(*arguments)

    return call


@pytest.mark.parametrize("index,method", [(1, "propose"), (2, "draft"), (2, "commit")])
def test_answers_are_complete_and_right(
    index: int, method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny("llama")
    expected = [greedy(model, prompt, 40) for prompt in PROMPTS]
    proposers = proposers_for(model, slots=3)
    monkeypatch.setattr(
        proposers[index], method, failing_after(5, getattr(proposers[index], method))
    )
    controller = ScriptedController(len(proposers), 8, np.random.default_rng(0))
    decoder = Decoder(CausalModel(model), proposers, controller, slots=3, capacity=CAPACITY)
    with caplog.at_level(logging.ERROR, logger="autospec"):
        outputs = decoder.generate([GenerationRequest(p, max_tokens=40) for p in PROMPTS])
    assert [list(output.token_ids) for output in outputs] == expected
    failures = [record for record in caplog.records if "is left out" in record.message]
    assert len(failures) == 1
    after = controller.results[-5:]
    assert sum(int(result.verified[plan.proposer == index].sum()) for plan, result in after) == 0
