"""Drafting with a smaller model: what it drafts, how it catches up, and which models fit."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from autospec.engine.decoder import Decoder
from autospec.engine.drafting import DraftTask, Kept
from autospec.engine.model import CausalModel
from autospec.engine.request import GenerationRequest
from autospec.engine.sampling import SamplingParameters, SamplingRows, filtered_probabilities
from autospec.errors import ModelError
from autospec.proposers.base import History
from autospec.proposers.draft_model import DraftModelProposer
from autospec.records import Int16Array, Int32Array
from tests.engine.tiny_models import CAPACITY, SIZES, VOCAB, ScriptedController, greedy, tiny

torch.set_num_threads(1)


def attached(
    slots: int = 3, *, max_k: int = 8, min_confidence: float = 0.0
) -> tuple[DraftModelProposer, History]:
    """A proposer with the target's own weights, and an empty history."""
    proposer = DraftModelProposer(
        CausalModel(tiny("llama")), max_k=max_k, min_confidence=min_confidence
    )
    target = CausalModel(tiny("llama"))
    proposer.attach(target, target.new_cache(slots, CAPACITY))
    history = History(np.zeros((slots, CAPACITY), np.int32), np.zeros(slots, np.int32))
    return proposer, history


def write(history: History, slot: int, tokens: list[int]) -> None:
    history.tokens[slot, : len(tokens)] = tokens
    history.lengths[slot] = len(tokens)


def task(history: History, k: list[int], settings: SamplingParameters | None = None) -> DraftTask:
    slots: Int32Array = np.arange(len(k), dtype=np.int32)
    wanted: Int16Array = np.array(k, dtype=np.int16)
    sampling = SamplingRows.of([settings or SamplingParameters()] * len(k))
    return DraftTask(history, slots, wanted, sampling)


def test_rows_get_what_the_draft_would_say_greedily() -> None:
    proposer, history = attached()
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9]]
    for slot, prompt in enumerate(prompts):
        write(history, slot, prompt)
    drafts = proposer.draft(task(history, [4, 0, 7]))
    assert drafts.lengths.tolist() == [4, 0, 7]
    assert drafts.probs is None
    for slot, length in enumerate(drafts.lengths.tolist()):
        expected = greedy(tiny("llama"), prompts[slot], length)
        assert drafts.tokens[slot, :length].tolist() == expected
    assert ((drafts.confidence[0, :4] > 0) & (drafts.confidence[0, :4] <= 1)).all()


def test_confidence_is_the_probability_of_the_drafted_token() -> None:
    proposer, history = attached(1)
    write(history, 0, [1, 2, 3])
    drafts = proposer.draft(task(history, [2]))
    tokens = [1, 2, 3, *drafts.tokens[0].tolist()]
    with torch.inference_mode():
        probs = tiny("llama")(torch.tensor([tokens]), use_cache=False).logits[0].softmax(dim=-1)
    expected = [float(probs[2 + depth, tokens[3 + depth]]) for depth in range(2)]
    np.testing.assert_allclose(drafts.confidence[0], expected, rtol=1e-5)


def test_sampled_rows_report_the_distribution_they_were_drawn_from() -> None:
    """Under the target's filters, and with a confidence that does not tell the token drawn."""
    proposer, history = attached(1)
    write(history, 0, [1, 2, 3])
    settings = SamplingParameters(temperature=0.8, top_k=6, seed=4)
    drafts = proposer.draft(task(history, [3], settings))
    assert drafts.probs is not None
    assert drafts.probs_row.tolist() == [[0, 0, 0]]
    tokens = [1, 2, 3, *drafts.tokens[0].tolist()]
    with torch.inference_mode():
        logits = tiny("llama")(torch.tensor([tokens]), use_cache=False).logits[0, 2:5]
    expected = filtered_probabilities(logits, SamplingRows.of([settings] * 3))
    torch.testing.assert_close(drafts.probs[0], expected)
    np.testing.assert_allclose(
        drafts.confidence[0], expected.square().sum(dim=-1).numpy(), rtol=1e-5
    )
    assert all(expected[depth, tokens[3 + depth]] > 0 for depth in range(3))


def test_a_row_stops_before_a_doubtful_token() -> None:
    free, history = attached(1)
    write(history, 0, [1, 2, 3])
    confidence = free.draft(task(history, [8])).confidence[0]
    threshold = float(np.sort(confidence)[2])
    first_below = int(np.flatnonzero(confidence < threshold)[0])
    careful, _ = attached(1, min_confidence=threshold)
    drafts = careful.draft(task(history, [8]))
    assert drafts.lengths.tolist() == [first_below]
    assert drafts.confidence[0, :first_below].tolist() == confidence[:first_below].tolist()


def test_the_cache_is_rewound_after_a_rejection_and_caught_up_after_a_pause() -> None:
    proposer, history = attached(1)
    write(history, 0, [1, 2, 3])
    slots = np.zeros(1, np.int32)
    assert proposer.stale_tokens(history, slots).tolist() == [2]
    first = proposer.draft(task(history, [4])).tokens[0]
    wrong = (int(first[1]) + 1) % VOCAB
    write(history, 0, [1, 2, 3, int(first[0]), wrong])  # one draft kept, then the target's own
    proposer.commit(Kept(slots, np.array([2], np.int32), np.array([2], np.int32), None), history)
    assert proposer.stale_tokens(history, slots).tolist() == [0]
    again = proposer.draft(task(history, [3])).tokens[0].tolist()
    assert again == greedy(tiny("llama"), [1, 2, 3, int(first[0]), wrong], 3)
    other = (again[0] + 1) % VOCAB
    tokens = [1, 2, 3, int(first[0]), wrong, other]  # nothing kept
    write(history, 0, tokens)
    proposer.commit(Kept(slots, np.array([4], np.int32), np.array([1], np.int32), None), history)
    tokens += range(10)  # by other proposers
    write(history, 0, tokens)
    proposer.commit(Kept(slots, np.array([5], np.int32), np.array([10], np.int32), None), history)
    assert proposer.stale_tokens(history, slots).tolist() == [10]
    assert proposer.draft(task(history, [5])).tokens[0].tolist() == greedy(tiny("llama"), tokens, 5)


def test_a_new_request_in_a_slot_starts_afresh() -> None:
    proposer, history = attached(1)
    write(history, 0, [1, 2, 3, 4])
    proposer.draft(task(history, [2]))
    proposer.reset(0)
    write(history, 0, [9, 8, 7])
    assert proposer.draft(task(history, [4])).tokens[0].tolist() == greedy(
        tiny("llama"), [9, 8, 7], 4
    )


def test_a_draft_with_the_same_weights_is_always_right() -> None:
    controller = ScriptedController(1, 4, np.random.default_rng(0), fixed_k=4)
    decoder = Decoder(
        CausalModel(tiny("llama")),
        [DraftModelProposer(CausalModel(tiny("llama")), max_k=4)],
        controller,
        slots=2,
        capacity=CAPACITY,
    )
    decoder.generate([GenerationRequest([1, 2, 3], max_tokens=41) for _ in range(2)])
    verified = sum(int(result.verified.sum()) for _, result in controller.results)
    accepted = sum(int(result.accepted.sum()) for _, result in controller.results)
    assert accepted == verified == 2 * 32
    for state in controller.states[1:]:
        assert state.stale_tokens is not None
        assert state.stale_tokens.max() <= 1  # the last draft of a wholly accepted row


def test_a_draft_with_a_short_context_stops_there() -> None:
    model = LlamaForCausalLM(LlamaConfig(**{**SIZES, "max_position_embeddings": 10}))
    proposer = DraftModelProposer(CausalModel(model), max_k=8)
    target = CausalModel(tiny("llama"))
    proposer.attach(target, target.new_cache(1, CAPACITY))
    history = History(np.zeros((1, CAPACITY), np.int32), np.zeros(1, np.int32))
    for length, drafted in ((3, 8), (8, 3), (10, 1), (11, 0), (50, 0)):
        proposer.reset(0)
        write(history, 0, [1] * length)
        assert proposer.draft(task(history, [8])).lengths.tolist() == [drafted]


# Which models fit ------------------------------------------------------------------------------


def model_with(vocab_size: int, words: list[str] | None, name: str) -> CausalModel:
    tokenizer = None
    if words is not None:
        vocabulary = {word: number for number, word in enumerate(words)}
        backend = Tokenizer(WordLevel(vocabulary, unk_token=words[0]))
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    config = LlamaConfig(**{**SIZES, "vocab_size": vocab_size})
    return CausalModel(LlamaForCausalLM(config), name=name, tokenizer=tokenizer)


def attach(target: CausalModel, draft: CausalModel) -> DraftModelProposer:
    proposer = DraftModelProposer(draft)
    proposer.attach(target, target.new_cache(1, 16))
    return proposer


def test_different_sizes_without_tokenizers() -> None:
    with pytest.raises(
        ModelError,
        match="big has 24 tokens and small has 20; the first differing token is 20",
    ):
        attach(model_with(24, None, "big"), model_with(20, None, "small"))


def test_different_tokens() -> None:
    words = [f"w{number}" for number in range(VOCAB)]
    other = [*words[:7], "x", *words[8:]]
    with pytest.raises(
        ModelError,
        match="big has 24 tokens and small has 24; the first differing token is 7, 'w7' in the "
        "target and 'x' in the draft",
    ):
        attach(model_with(VOCAB, words, "big"), model_with(VOCAB, other, "small"))


@pytest.mark.parametrize("target_size, draft_size", [(VOCAB + 8, VOCAB), (VOCAB, VOCAB + 8)])
def test_the_same_tokens_padded_to_different_sizes_fit(target_size: int, draft_size: int) -> None:
    words = [f"w{number}" for number in range(VOCAB)]
    proposer = attach(model_with(target_size, words, "big"), model_with(draft_size, words, "small"))
    history = History(np.ones((1, 16), np.int32), np.full(1, 3, np.int32))
    drafts = proposer.draft(task(history, [3], SamplingParameters(temperature=1.0)))
    assert drafts.probs is not None
    assert drafts.probs.shape == (1, 3, target_size)
    assert drafts.tokens.max() < min(target_size, draft_size)


def test_use_before_attaching_and_bad_settings() -> None:
    model = CausalModel(copy.deepcopy(tiny("llama")))
    with pytest.raises(ModelError, match="before it was attached"):
        DraftModelProposer(model).reset(0)
    with pytest.raises(ModelError, match="max_k is 0"):
        DraftModelProposer(model, max_k=0)
    with pytest.raises(ModelError, match="min_confidence is 2"):
        DraftModelProposer(model, min_confidence=2)
