"""The decoder against plain greedy decoding by transformers, on tiny random models in float64."""

from __future__ import annotations

import copy
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from autospec.config import load_settings
from autospec.controller import Controller
from autospec.engine.cache import SlotCache
from autospec.engine.decoder import Decoder
from autospec.engine.drafting import DraftTask, Kept, ModelDrafts
from autospec.engine.model import CausalModel
from autospec.engine.request import GenerationRequest
from autospec.engine.sampling import SamplingParameters
from autospec.errors import EngineError, InputError
from autospec.proposers.base import History
from autospec.proposers.draft_model import DraftModelProposer
from autospec.proposers.ngram import NgramProposer
from autospec.records import BatchState, EngineInfo, Int32Array, Plan, ProposerInfo
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
    expected = [greedy(model, prompt, 32) for prompt in prompts]
    proposers = proposers_for(model, slots=4)
    controller = ScriptedController(len(proposers), 8, rng)
    decoder = Decoder(
        CausalModel(model), proposers, controller, slots=4, capacity=CAPACITY, prefill_tokens=11
    )
    ids = [decoder.submit(GenerationRequest(prompt, max_tokens=32)) for prompt in prompts]
    streamed: dict[str, list[int]] = {request_id: [] for request_id in ids}
    outputs = {}
    steps = 0
    while decoder.has_work:
        for event in decoder.step():
            streamed[event.request_id].extend(event.token_ids)
            if event.output is not None:
                outputs[event.request_id] = event.output
        steps += 1
        if steps == 14:
            decoder.cancel(ids[1])
            decoder.cancel(ids[7])
    for request_id, reference in zip(ids, expected, strict=True):
        tokens = list(outputs[request_id].token_ids)
        assert streamed[request_id] == tokens
        if outputs[request_id].finish_reason == "cancelled":
            assert request_id in (ids[1], ids[7])
            assert tokens == reference[: len(tokens)]
        else:
            assert outputs[request_id].finish_reason == "length"
            assert tokens == reference
    assert not controller.running
    reported = controller.results
    for is_lookup in (True, False):  # drafts were both right and wrong
        rows = [(plan.proposer >= 0) & ((plan.proposer < 2) == is_lookup) for plan, _ in reported]
        pairs = list(zip(rows, (result for _, result in reported), strict=True))
        assert sum(int(result.accepted[row].sum()) for row, result in pairs) > 0
        assert sum(int((result.verified - result.accepted)[row].sum()) for row, result in pairs) > 0


def plain_decoder(
    seed: int = 0, *, slots: int = 2, capacity: int = CAPACITY, prefill_tokens: int = 64
) -> Decoder:
    return Decoder(
        CausalModel(tiny("llama", seed)),
        slots=slots,
        capacity=capacity,
        prefill_tokens=prefill_tokens,
        seed=seed,
    )


def test_more_requests_than_slots_wait_for_one() -> None:
    decoder = plain_decoder()
    ids = [decoder.submit(GenerationRequest([1 + number], max_tokens=4)) for number in range(5)]
    decoder.step()
    assert (decoder.running_requests, decoder.waiting_requests) == (2, 3)
    outputs = decoder.run_until_idle()
    assert sorted(output.id for output in outputs) == sorted(ids)
    assert all(len(output.token_ids) == 4 for output in outputs)
    assert not decoder.has_work
    assert decoder.step() == []


def test_prompt_chunks_keep_to_the_token_budget_while_others_decode() -> None:
    decoder = plain_decoder(prefill_tokens=10)
    first = decoder.submit(GenerationRequest([1, 2], max_tokens=20))
    decoder.step()
    second = decoder.submit(GenerationRequest(list(range(20)) + [1] * 15, max_tokens=2))
    seen = [{event.request_id for event in decoder.step()} for _ in range(4)]
    assert seen == [{first}, {first}, {first}, {first, second}]


def test_end_tokens_end_a_request_and_belong_to_it() -> None:
    model = tiny("llama")
    free = greedy(model, [5, 6, 7], 30)
    end = free[12]
    expected = free[: free.index(end) + 1]
    assert model.generation_config is not None
    model.generation_config.eos_token_id = [end, VOCAB - 1 if end != VOCAB - 1 else 0]
    if model.generation_config.eos_token_id[1] in expected:
        expected = expected[: expected.index(model.generation_config.eos_token_id[1]) + 1]
    decoder = Decoder(CausalModel(model), slots=2, capacity=CAPACITY)
    ended, ignored, stopped = decoder.generate(
        [
            GenerationRequest([5, 6, 7], max_tokens=30),
            GenerationRequest([5, 6, 7], max_tokens=30, ignore_eos=True),
            GenerationRequest([5, 6, 7], 30, ignore_eos=True, stop_token_ids=(free[4],)),
        ]
    )
    assert (ended.token_ids, ended.finish_reason) == (tuple(expected), "stop")
    assert (ignored.token_ids, ignored.finish_reason) == (tuple(free), "length")
    assert stopped.token_ids == tuple(free[: free.index(free[4]) + 1])


def test_an_end_inside_accepted_drafts_cuts_the_rest() -> None:
    """A draft that is always right commits several tokens at once; none may follow the end."""
    model = tiny("llama")
    free = greedy(model, [5, 6, 7], 40)
    for stop_at in range(1, 12):
        controller = ScriptedController(1, 8, np.random.default_rng(stop_at), fixed_k=8)
        decoder = Decoder(
            CausalModel(copy.deepcopy(model)),
            [DraftModelProposer(CausalModel(copy.deepcopy(model)), max_k=8)],
            controller,
            slots=1,
            capacity=CAPACITY,
        )
        request = GenerationRequest([5, 6, 7], max_tokens=40, stop_token_ids=(free[stop_at],))
        (output,) = decoder.generate([request])
        assert list(output.token_ids) == free[: free.index(free[stop_at]) + 1]
        assert sum(result.committed.sum() for _, result in controller.results) >= free.index(
            free[stop_at]
        )


def test_generation_ends_where_the_context_ends() -> None:
    decoder = plain_decoder(capacity=12)
    (output,) = decoder.generate([GenerationRequest([1] * 9, max_tokens=100)])
    assert len(output.token_ids) == 3
    assert output.finish_reason == "length"


def test_a_running_and_a_waiting_request_can_be_cancelled() -> None:
    decoder = plain_decoder(slots=1)
    running = decoder.submit(GenerationRequest([1, 2], max_tokens=50))
    waiting = decoder.submit(GenerationRequest([3, 4], max_tokens=50))
    after = decoder.submit(GenerationRequest([5, 6], max_tokens=3))
    decoder.step()
    decoder.step()
    decoder.cancel(running)
    decoder.cancel(waiting)
    decoder.cancel("never heard of")
    outputs = {output.id: output for output in decoder.run_until_idle()}
    assert outputs[running].finish_reason == "cancelled"
    assert len(outputs[running].token_ids) == 2
    assert outputs[waiting].finish_reason == "cancelled"
    assert outputs[waiting].token_ids == ()
    assert outputs[waiting].first_token_seconds is None
    assert len(outputs[after].token_ids) == 3


@pytest.mark.parametrize(
    "request_, message",
    [
        (GenerationRequest([]), "the prompt is empty"),
        (GenerationRequest([1] * 12), r"the prompt has 12 tokens; at most 11 fit"),
        (GenerationRequest([1, VOCAB]), rf"token {VOCAB}; allowed are 0 to {VOCAB - 1}"),
        (GenerationRequest([-1]), "token -1"),
        (GenerationRequest([1], max_tokens=0), "max_tokens is 0"),
        (GenerationRequest([1], stop=("x",)), "need a tokenizer"),
        (GenerationRequest([1], id="taken"), "'taken': a request with this id"),
    ],
)
def test_a_bad_request_is_refused_and_the_others_go_on(
    request_: GenerationRequest, message: str
) -> None:
    decoder = plain_decoder(capacity=12)
    good = decoder.submit(GenerationRequest([1, 2], max_tokens=3, id="taken"))
    decoder.step()
    with pytest.raises(InputError, match=message):
        decoder.submit(request_)
    (output,) = decoder.run_until_idle()
    assert output.id == good
    assert len(output.token_ids) == 3


def test_the_same_seed_gives_the_same_tokens_in_any_batch() -> None:
    sampling = SamplingParameters(temperature=1.0, top_p=0.9, seed=11)
    alone = plain_decoder(slots=1).generate([GenerationRequest([1, 2], 20, sampling)])[0]
    others = [
        GenerationRequest([3], 9, SamplingParameters(temperature=1.0)),
        GenerationRequest([1, 2], 20, replace(sampling, seed=12)),
        GenerationRequest([4, 5], 9),
    ]
    beside = plain_decoder(slots=3).generate([*others, GenerationRequest([1, 2], 20, sampling)])
    assert beside[3].token_ids == alone.token_ids
    assert beside[1].token_ids != alone.token_ids


def test_rows_that_do_not_draft_sample_as_if_nobody_did() -> None:
    """The random numbers of a request do not depend on how deep its neighbors draft."""
    request = GenerationRequest([1, 2], 20, SamplingParameters(temperature=1.0, seed=3), max_k=0)
    alone = plain_decoder(slots=1).generate([request])[0]
    decoder = Decoder(
        CausalModel(tiny("llama")),
        [NgramProposer(2, CAPACITY, max_k=8, min_match=1)],
        FirstRowPlain(1, 8, np.random.default_rng(0)),
        slots=2,
        capacity=CAPACITY,
    )
    beside = decoder.generate([request, GenerationRequest([1, 2, 1, 2, 1, 2], 20)])
    assert beside[0].token_ids == alone.token_ids


class FirstRowPlain(ScriptedController):
    """Lets the request in the first slot alone."""

    def plan(self, state: BatchState) -> Plan:
        plan = super().plan(state)
        k = np.where(plan.handles == 1, 0, 8).astype(np.int16)
        return plan._replace(proposer=np.where(k > 0, 0, -1).astype(np.int16), k=k, verify=k)


@pytest.mark.parametrize("seed", range(4))
def test_what_lookups_draft_does_not_change_what_a_seed_gives(seed: int) -> None:
    sampling = SamplingParameters(
        temperature=0.7, top_k=3, seed=seed
    )  # so few that drafts are kept
    requests = [GenerationRequest([1, 2, 1, 2, 1], 40, sampling), GenerationRequest([5, 5], 30)]
    plain = plain_decoder(slots=2).generate(requests)
    controller = ScriptedController(1, 8, np.random.default_rng(seed))
    decoder = Decoder(
        CausalModel(tiny("llama")),
        [NgramProposer(2, CAPACITY, max_k=8, min_match=1)],
        controller,
        slots=2,
        capacity=CAPACITY,
    )
    drafted = decoder.generate(requests)
    assert [each.token_ids for each in drafted] == [each.token_ids for each in plain]
    assert sum(int(result.accepted.sum()) for _, result in controller.results) > 0


def test_requests_without_a_seed_differ_from_each_other() -> None:
    request = GenerationRequest([1, 2], 20, SamplingParameters(temperature=1.0))
    first, second = plain_decoder().generate([request, request])
    assert first.token_ids != second.token_ids


def test_submit_and_cancel_from_other_threads() -> None:
    decoder = plain_decoder(slots=4)
    ids: list[str] = []

    def client(number: int) -> None:
        for token in range(8):
            request_id = decoder.submit(GenerationRequest([token, number], max_tokens=6))
            ids.append(request_id)
            if token % 3 == 0:
                decoder.cancel(request_id)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    outputs = []
    while any(thread.is_alive() for thread in threads) or decoder.has_work:
        outputs += [event.output for event in decoder.step() if event.output is not None]
    assert sorted(output.id for output in outputs) == sorted(ids)
    assert all(
        len(output.token_ids) == 6 for output in outputs if output.finish_reason != "cancelled"
    )


def test_what_is_reported_agrees_with_what_was_generated() -> None:
    """Offers, matches, room, stale tokens, prefill and timings, step by step."""
    rng = np.random.default_rng(3)
    model = tiny("qwen3")
    proposers = proposers_for(model, slots=3)
    controller = ScriptedController(3, 8, rng)
    decoder = Decoder(CausalModel(model), proposers, controller, slots=3, capacity=CAPACITY)
    prompts = [rng.integers(0, VOCAB, 30).tolist() for _ in range(3)]
    outputs = decoder.generate([GenerationRequest(prompt, max_tokens=40) for prompt in prompts])
    text = {
        handle: prompt + list(output.token_ids)
        for handle, prompt, output in zip((1, 2, 3), prompts, outputs, strict=True)
    }
    some_match = 0
    for state, (plan, result) in zip(controller.states, controller.results, strict=True):
        assert state.offer_lengths is not None
        assert state.room is not None
        assert state.last_tokens is not None
        assert result.matched is not None
        assert result.draft_seconds is not None
        assert result.step_seconds >= result.draft_seconds.sum() > 0
        assert result.prefill_tokens == state.prefill_tokens
        assert (result.verified <= np.minimum(plan.k, state.room)).all()
        for row, handle in enumerate(state.handles.tolist()):
            length = int(state.context_tokens[row])
            assert state.last_tokens[row] == text[handle][length - 1]
            assert state.room[row] == 70 - length - 1
            for lookup in (0, 1):
                offered, matched = state.offer_lengths[lookup, row], result.matched[lookup, row]
                assert (matched == -1) == (offered == 0)
                assert matched <= min(offered, result.committed[row])
                some_match += matched > 0
            assert result.matched[2, row] == -1
            if plan.proposer[row] in (0, 1) and result.verified[row]:
                matched = result.matched[plan.proposer[row], row]
                assert min(matched, result.verified[row]) == result.accepted[row]
    assert some_match > 10
    assert sum(result.committed.sum() for _, result in controller.results) == 3 * 39


def test_offers_are_made_only_when_the_controller_wants_them() -> None:
    controller = ScriptedController(1, 8, np.random.default_rng(0), wants=False)
    decoder = Decoder(
        CausalModel(tiny("llama")),
        [NgramProposer(1, CAPACITY, max_k=8, min_match=1)],
        controller,
        slots=1,
        capacity=CAPACITY,
    )
    decoder.generate([GenerationRequest([1, 2, 1, 2, 1, 2], max_tokens=12)])
    assert all(state.offer_lengths is not None for state in controller.states)
    assert not any(state.offer_lengths.any() for state in controller.states)  # type: ignore[union-attr]
    assert not any(result.verified.any() for _, result in controller.results)


def test_bad_sizes_are_refused() -> None:
    with pytest.raises(EngineError, match="slots is 0"):
        plain_decoder(slots=0)


class Watcher:
    """Drafts nothing; keeps the hidden states of everything that was committed."""

    hidden_layers: tuple[int, ...] = (-1, 1)
    info = ProposerInfo("watcher", "parallel", 4, needs_state=True)

    def __init__(self) -> None:
        self.seen: dict[int, list[tuple[int, torch.Tensor]]] = {}
        self.target_layers = 0

    def attach(self, target: CausalModel, cache: SlotCache) -> None:
        self.target_layers = len(cache.keys)

    def reset(self, slot: int) -> None:
        self.seen[slot] = []

    def stale_tokens(self, history: History, slots: Int32Array) -> Int32Array:
        return np.zeros(len(slots), dtype=np.int32)

    def memory_bytes(self) -> int:
        return 0

    def draft(self, task: DraftTask) -> ModelDrafts:
        num_rows = len(task.slots)
        return ModelDrafts(
            np.zeros((num_rows, 0), np.int64),
            np.zeros(num_rows, np.int16),
            np.zeros((num_rows, 0), np.float32),
            None,
            np.full((num_rows, 0), -1, np.int64),
        )

    def commit(self, kept: Kept, history: History) -> None:
        assert kept.hidden is not None
        assert len(kept.hidden) == kept.counts.sum()
        begin = 0
        for slot, start, count in zip(kept.slots, kept.starts, kept.counts, strict=True):
            for offset in range(int(count)):
                self.seen[int(slot)].append((int(start) + offset, kept.hidden[begin + offset]))
            begin += int(count)


def test_proposers_on_hidden_states_see_every_kept_position_once() -> None:
    """Prompt chunks and accepted drafts of another proposer included, rejected ones not."""
    model = tiny("llama")
    watcher = Watcher()
    prompts = [[1, 2, 1, 2, 1, 2, 1] * 3, [5, 6]]
    ngram = NgramProposer(2, CAPACITY, max_k=4, min_match=1)
    controller = ScriptedController(2, 4, np.random.default_rng(2))
    decoder = Decoder(
        CausalModel(copy.deepcopy(model)),
        [ngram, watcher],
        controller,
        slots=2,
        capacity=CAPACITY,
        prefill_tokens=8,
    )
    outputs = decoder.generate([GenerationRequest(prompt, max_tokens=30) for prompt in prompts])
    assert watcher.target_layers == 2
    assert sum(int(result.accepted.sum()) for _, result in controller.results) > 0
    for slot, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        tokens = prompt + list(output.token_ids)
        with torch.inference_mode():
            states = model(
                torch.tensor([tokens]), use_cache=False, output_hidden_states=True
            ).hidden_states
        positions = [position for position, _ in watcher.seen[slot]]
        assert positions == list(range(len(positions)))
        assert len(positions) >= len(tokens) - 1
        for position, hidden in watcher.seen[slot][: len(tokens)]:
            torch.testing.assert_close(hidden[0], states[-1][0, position])
            torch.testing.assert_close(hidden[1], states[1][0, position])


@pytest.mark.parametrize("policy", ["default", "static"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_under_the_real_controller(policy: str, temperature: float) -> None:
    """Decisions change speed only: greedy output is plain output, and sampling runs through."""
    model = tiny("qwen3")
    prompts = [[1, 2, 1, 2, 1, 2], [3, 4, 5], [6] * 20]
    target = CausalModel(copy.deepcopy(model))
    proposers = proposers_for(model, slots=2)
    controller = Controller(
        load_settings(policy),
        [proposer.info for proposer in proposers],
        EngineInfo("tiny", "embedded", "0", "cpu", "float64"),
    )
    decoder = Decoder(target, proposers, controller, slots=2, capacity=CAPACITY, prefill_tokens=8)
    sampling = SamplingParameters(temperature=temperature, top_p=0.9, seed=1)
    outputs = decoder.generate([GenerationRequest(prompt, 60, sampling) for prompt in prompts])
    assert all(len(output.token_ids) == 60 for output in outputs)
    if temperature == 0.0:
        for prompt, output in zip(prompts, outputs, strict=True):
            assert list(output.token_ids) == greedy(model, prompt, 60)
