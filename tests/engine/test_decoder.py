"""The decoder against plain greedy decoding by transformers, on tiny random models in float64."""

from __future__ import annotations

import numpy as np
import pytest

from autospec.engine.decoder import Decoder
from autospec.engine.model import CausalModel
from autospec.engine.request import GenerationRequest
from tests.engine.tiny_models import (
    CAPACITY,
    FAMILIES,
    VOCAB,
    ScriptedController,
    greedy,
    proposers_for,
    tiny,
)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_plain_decoding(family: str) -> None:
    """Any proposer, k from 0 to 8 per request and step, chunked prefill, cancellation."""
    rng = np.random.default_rng(5)
    model = tiny(family)
    prompts = [
        rng.integers(0, VOCAB, size).tolist() for size in (1, 3, 40, 17, 9, 2, 64, 25, 30, 5)
    ]
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
