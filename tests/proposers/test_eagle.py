"""EAGLE heads: published layouts against slow forwards, catching up, and wrong folders."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.nn.functional import linear
from transformers import LlamaConfig

from autospec.engine.cache import SlotCache
from autospec.engine.decoder import Decoder
from autospec.engine.drafting import Kept
from autospec.engine.model import CausalModel
from autospec.engine.request import GenerationRequest
from autospec.engine.sampling import SamplingParameters, SamplingRows, filtered_probabilities
from autospec.errors import ModelError
from autospec.proposers import eagle
from autospec.proposers.base import History
from autospec.proposers.eagle import EagleProposer
from autospec.proposers.eagle_files import load_eagle, read_eagle_layout, save_eagle
from autospec.proposers.eagle_head import CausalSequences, EagleHead, EagleLayout
from autospec.records import BatchState, Int32Array, Plan
from tests.engine.tiny_models import CAPACITY, VOCAB, ScriptedController, greedy
from tests.proposers.eagle_folders import (
    HIDDEN,
    Published,
    draft_vocab,
    eagle_1,
    eagle_3,
    eagle_3_of_speculators,
    layer_settings,
    slow_drafts,
    target_model,
)
from tests.proposers.head_folders import draft_task

torch.set_num_threads(1)

LAYOUTS: dict[str, Callable[[Path], Published]] = {
    "eagle": eagle_1,
    "eagle, biases": lambda folder: eagle_1(folder, biases=True),
    "eagle, two layers, few tokens": lambda folder: eagle_1(folder, layers=2, d2t=True),
    "eagle3": eagle_3,
    "eagle3, narrower": lambda folder: eagle_3(folder, hidden=24),
    "eagle3, speculators": eagle_3_of_speculators,
    "eagle3, speculators, two layers": lambda folder: eagle_3_of_speculators(
        folder, layers=2, norm_before_residual=False
    ),
}


class Driver:
    """Feeds a proposer what a decoder would: the target's states and the tokens it keeps."""

    def __init__(self, proposer: EagleProposer, target: CausalModel, slots: int) -> None:
        self.proposer, self.target = proposer, target
        self.history = History(np.zeros((slots, CAPACITY), np.int32), np.zeros(slots, np.int32))
        self.cache: SlotCache = target.new_cache(slots, CAPACITY)
        proposer.attach(target, self.cache)

    def keep(self, slot: int, tokens: list[int]) -> None:
        """Make ``tokens`` the slot's text; the target sees all but the last."""
        start = int(self.cache.lengths[slot])
        self.history.tokens[slot, : len(tokens)] = tokens
        self.history.lengths[slot] = len(tokens)
        slots: Int32Array = np.array([slot], np.int32)
        starts: Int32Array = np.array([start], np.int32)
        counts: Int32Array = np.array([len(tokens) - 1 - start], np.int32)
        step = self.target.new_step(self.cache, slots, starts, counts)
        result = self.target.forward(
            torch.tensor(tokens[start:-1]), step, torch.tensor([0]), self.proposer.hidden_layers
        )
        self.cache.lengths[slot] = len(tokens) - 1
        self.proposer.commit(Kept(slots, starts, counts, result.hidden), self.history)


@pytest.fixture(scope="module")
def target() -> CausalModel:
    return CausalModel(target_model(), name="tiny")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_drafts_equal_the_published_forward(
    layout: str, target: CausalModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch of different lengths, with a pause and a rejection, caught up in small portions."""
    monkeypatch.setattr(eagle, "CATCH_UP_TOKENS", 7)
    head = LAYOUTS[layout](tmp_path)
    driver = Driver(EagleProposer.load(tmp_path, target), target, slots=3)
    model = target_model()
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, VOCAB, size).tolist() for size in (2, 11, 30)]
    for round_ in range(3):
        for slot, text in enumerate(texts):
            driver.keep(slot, text)
        wanted = [4, 5, 0 if round_ == 1 else 3]
        drafts = driver.proposer.draft(draft_task(driver.history, wanted))
        assert drafts.lengths.tolist() == wanted
        assert drafts.probs is None
        for slot, (text, k) in enumerate(zip(texts, wanted, strict=True)):
            tokens, distributions = slow_drafts(head, model, text, k)
            assert drafts.tokens[slot, :k].tolist() == tokens
            expected = [float(probs.max()) for probs in distributions]
            np.testing.assert_allclose(drafts.confidence[slot, :k], expected, rtol=1e-4)
            text += [*drafts.tokens[slot, : max(k - 3, 0)].tolist(), int(rng.integers(VOCAB))]


def test_sampled_rows_report_the_distribution_they_were_drawn_from(
    target: CausalModel, tmp_path: Path
) -> None:
    """Over the target's vocabulary, under its filters."""
    head = eagle_3(tmp_path)
    driver = Driver(EagleProposer.load(tmp_path, target), target, slots=1)
    driver.keep(0, [1, 2, 3, 4])
    settings = SamplingParameters(temperature=0.8, top_k=6, seed=4)
    drafts = driver.proposer.draft(draft_task(driver.history, [1], settings))
    assert drafts.probs is not None
    assert drafts.probs.shape == (1, 1, VOCAB)
    (plain,) = slow_drafts(head, target_model(), [1, 2, 3, 4], 1)[1]
    expected = filtered_probabilities(plain.log()[None], SamplingRows.of([settings]))
    torch.testing.assert_close(drafts.probs[0], expected, rtol=1e-4, atol=1e-6)
    assert int((drafts.probs[0, 0] > 0).sum()) == 6
    assert drafts.probs[0, 0, drafts.tokens[0, 0]] > 0


class Pausing(ScriptedController):
    """Drafts in every step, but for a stretch in which only the ``others`` do."""

    pause: range = range(0)

    def plan(self, state: BatchState) -> Plan:
        plan = super().plan(state)
        if len(self.states) in self.pause:
            plan.k[:], plan.proposer[:] = 0, -1
        return plan


def test_a_pause_costs_no_acceptance(target: CausalModel, tmp_path: Path) -> None:
    """After 20 steps of plain decoding the drafts are those of a head that was never off."""
    eagle_1(tmp_path)
    runs = []
    for pause in (range(0), range(5, 25)):
        controller = Pausing(1, 4, np.random.default_rng(0), fixed_k=4)
        controller.pause = pause
        decoder = Decoder(
            CausalModel(target_model()),
            [EagleProposer.load(tmp_path, target)],
            controller,
            slots=2,
            capacity=CAPACITY,
        )
        decoder.generate([GenerationRequest([1, 2, 3], 60), GenerationRequest([4] * 9, 60)])
        runs.append(controller)
    always: dict[tuple[int, int], int] = {}
    paused: dict[tuple[int, int], int] = {}
    for run, by_place in zip(runs, (always, paused), strict=True):
        for state, (_, result) in zip(run.states, run.results, strict=True):
            for row, handle in enumerate(state.handles.tolist()):
                if result.verified[row] == 4:
                    place = (handle, int(state.context_tokens[row]))
                    by_place[place] = int(result.accepted[row])
    shared = [place for place in always if place in paused and place[1] > 30]
    assert len(shared) > 10
    assert [paused[place] for place in shared] == [always[place] for place in shared]
    stale = [state.stale_tokens for state in runs[1].states]
    assert stale[24] is not None
    assert stale[24].min() >= 18
    assert stale[26] is not None
    assert stale[26].max() == 0
    for state in runs[0].states[1:]:
        assert state.stale_tokens is not None
        assert state.stale_tokens.max() == 0


def test_a_head_of_the_target_itself_is_always_right(tmp_path: Path) -> None:
    """A head made to copy tokens drafts what a target that repeats its token says next."""
    model = target_model()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                parameter.zero_()  # the state is the token's embedding, normed
    target = CausalModel(copy.deepcopy(model))
    layout = EagleLayout(LlamaConfig.from_dict(layer_settings()), HIDDEN)
    head = EagleHead(layout).double()
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.zero_()
        head.fc.weight[:, :HIDDEN] = torch.eye(HIDDEN, dtype=torch.float64)
    save_eagle(head, tmp_path, target)
    controller = ScriptedController(1, 4, np.random.default_rng(0), fixed_k=4)
    proposer = EagleProposer.load(tmp_path, target)
    decoder = Decoder(target, [proposer], controller, slots=2, capacity=CAPACITY)
    (output,) = decoder.generate([GenerationRequest([1, 2, 3], max_tokens=41)])
    assert list(output.token_ids) == greedy(model, [1, 2, 3], 41)
    verified = sum(int(result.verified.sum()) for _, result in controller.results)
    accepted = sum(int(result.accepted.sum()) for _, result in controller.results)
    assert verified > 20
    assert accepted >= 0.9 * verified


def test_training_over_whole_sequences_is_what_drafting_does(
    target: CausalModel, tmp_path: Path
) -> None:
    """Teacher-forced states and their gradients, two sequences in one forward."""
    eagle_1(tmp_path, d2t=True)
    model = target_model()
    head = load_eagle(tmp_path, target)
    assert isinstance(head, EagleHead)
    assert head.draft_tokens is not None
    sequences = [[1, 2, 3, 4, 5], [6, 7, 8]]
    with torch.no_grad():
        states = torch.cat(
            [
                model(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states[-1][0]
                for text in sequences
            ]
        )
    following = torch.tensor([token for text in sequences for token in text[1:]])
    result = head(target.embed(following), head.fuse(states[:, None]), CausalSequences([4, 2]))
    logits = linear(result, target.output_rows(head.draft_tokens))
    logits.logsumexp(dim=-1).sum().backward()
    assert all(parameter.grad is not None for parameter in head.parameters())
    driver = Driver(EagleProposer.load(tmp_path, target), target, slots=2)
    for slot, text in enumerate(sequences):
        driver.keep(slot, text)
    drafts = driver.proposer.draft(draft_task(driver.history, [1, 1]))
    best, index = logits[[3, 5]].softmax(dim=-1).max(dim=-1)
    assert drafts.tokens[:, 0].tolist() == head.draft_tokens[index].tolist()
    np.testing.assert_allclose(drafts.confidence[:, 0], best.detach().numpy(), rtol=1e-5)


def test_a_prompt_of_one_token_has_no_state_yet(target: CausalModel, tmp_path: Path) -> None:
    eagle_1(tmp_path)
    controller = ScriptedController(1, 3, np.random.default_rng(0), fixed_k=3)
    decoder = Decoder(
        target, [EagleProposer.load(tmp_path, target)], controller, slots=1, capacity=CAPACITY
    )
    (output,) = decoder.generate([GenerationRequest([5], max_tokens=12)])
    assert list(output.token_ids) == greedy(target_model(), [5], 12)
    assert controller.results[0][1].verified.tolist() == [0]
    assert controller.results[1][1].verified.tolist() == [3]


@pytest.mark.parametrize("layout", ["eagle", "eagle3"])
def test_memory_is_known_before_loading(layout: str, target: CausalModel, tmp_path: Path) -> None:
    LAYOUTS[layout](tmp_path)
    stated = read_eagle_layout(tmp_path, target).state_bytes(3, 50, target.dtype)
    proposer = EagleProposer.load(tmp_path, target)
    proposer.attach(target, target.new_cache(3, 50))
    assert stated == proposer.memory_bytes()
    assert stated == proposer._cache.memory_bytes() + proposer._features.nbytes


# Wrong folders ---------------------------------------------------------------------------------


def changed(head: Published, **settings: object) -> None:
    (head.folder / "config.json").write_text(json.dumps(head.config | settings))


def without(head: Published, name: str, instead: torch.Tensor | None = None) -> None:
    tensors = {key: value.contiguous() for key, value in head.tensors.items() if key != name}
    if instead is not None:
        tensors[name] = instead
    save_file(tensors, head.folder / "m.safetensors")


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"hidden_size": 48}, r"hidden_size is 48, but tiny has 32"),
        ({"vocab_size": 99}, r"vocab_size is 99, but tiny has 24"),
        ({"model_type": "gpt2"}, r"model_type is 'gpt2'; it must be 'llama' or 'qwen2'"),
        (
            {"num_attention_heads": "two"},
            r"num_attention_heads is 'two'; it must be a whole number",
        ),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, r"rope_type is 'dynamic'"),
        ({"speculators_model_type": "medusa"}, r"'medusa'; it must be 'eagle3'"),
        (
            {"speculators_model_type": "eagle3", "speculators_version": "3.1"},
            r"speculators_version is '3.1'; only versions 0.x are known",
        ),
    ],
)
def test_a_configuration_that_does_not_fit(
    settings: dict[str, object], message: str, target: CausalModel, tmp_path: Path
) -> None:
    changed(eagle_1(tmp_path), **settings)
    with pytest.raises(ModelError, match=message):
        load_eagle(tmp_path, target)


@pytest.mark.parametrize(
    "name, instead, message",
    [
        ("fc.weight", None, r"tensor fc.weight is missing"),
        (
            "fc.weight",
            torch.zeros(HIDDEN, 2 * HIDDEN),
            rf"tensor fc.weight has shape \[{HIDDEN}, {2 * HIDDEN}\], expected \[{HIDDEN}, "
            rf"{3 * HIDDEN}\]",
        ),
        (
            "midlayer.self_attn.q_proj.weight",
            torch.zeros(24, HIDDEN),
            rf"midlayer.self_attn.q_proj.weight has shape \[24, {HIDDEN}\], expected \[24, "
            rf"{2 * HIDDEN}\]",
        ),
        ("lm_head.weight", torch.zeros(5, HIDDEN), r"lm_head.weight has shape \[5, 32\]"),
        ("d2t", None, "tensor d2t is missing"),
        (
            "d2t",
            torch.full((draft_vocab(VOCAB),), VOCAB),
            rf"tensor d2t maps 18 tokens to 18 from {VOCAB} to {VOCAB + 17}; allowed are different "
            rf"ones from 0 to {VOCAB - 1}",
        ),
        ("t2d", torch.ones(VOCAB, dtype=torch.bool), f"t2d marks {VOCAB} tokens, which are not"),
    ],
)
def test_tensors_that_do_not_fit(
    name: str, instead: torch.Tensor | None, message: str, target: CausalModel, tmp_path: Path
) -> None:
    without(eagle_3(tmp_path), name, instead)
    with pytest.raises(ModelError, match=message):
        load_eagle(tmp_path, target)


def test_layers_that_the_target_does_not_have(target: CausalModel, tmp_path: Path) -> None:
    head = eagle_3_of_speculators(tmp_path)
    changed(head, eagle_aux_hidden_state_layer_ids=[1, 2, 40])
    with pytest.raises(ModelError, match=r"\[1, 2, 40\]; it must be a list of layers from 0 to 6"):
        load_eagle(tmp_path, target)


def test_a_narrower_head_needs_its_own_embedding(target: CausalModel, tmp_path: Path) -> None:
    without(eagle_3(tmp_path, hidden=24), "embed_tokens.weight")
    with pytest.raises(ModelError, match=r"embed_tokens.weight is missing; the head is 24 wide"):
        load_eagle(tmp_path, target)


def test_use_before_attaching_and_another_target(target: CausalModel, tmp_path: Path) -> None:
    eagle_1(tmp_path)
    proposer = EagleProposer.load(tmp_path, target)
    with pytest.raises(ModelError, match="before it was attached"):
        proposer.reset(0)
    with pytest.raises(ModelError, match="max_k is 0"):
        EagleProposer.load(tmp_path, target, max_k=0)
    other = CausalModel(target_model(layers=1), name="other")
    other.hidden_size = 40
    with pytest.raises(ModelError, match="takes states of 32 numbers, but those of other have 40"):
        proposer.attach(other, other.new_cache(1, 16))
