"""MLP speculators, published and AutoSpec's own, against slow forwards; files that do not fit."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from autospec.engine.decoder import Decoder
from autospec.engine.drafting import DraftTask, Kept, ModelDrafts, ModelProposer
from autospec.engine.model import CausalModel
from autospec.engine.request import GenerationRequest
from autospec.engine.sampling import SamplingParameters, SamplingRows, filtered_probabilities
from autospec.errors import ModelError
from autospec.proposers.base import History, LookupProposer
from autospec.proposers.mlp_folder import write_shared
from autospec.proposers.mlp_network import SharedLayout, SharedNetwork
from autospec.proposers.mlp_speculator import MlpSpeculatorProposer
from autospec.proposers.ngram import NgramProposer
from autospec.records import Int32Array, Plan
from tests.engine import test_distribution as distribution
from tests.engine.tiny_models import CAPACITY, SIZES, VOCAB, ScriptedController, greedy, tiny
from tests.proposers.head_folders import (
    MlpSizes,
    draft_task,
    hidden_and_history,
    published_mlp,
    slow_published_mlp,
    write_head,
)

torch.set_num_threads(1)

HIDDEN: int = SIZES["hidden_size"]
PUBLISHED = MlpSizes(VOCAB, HIDDEN)
PROMPTS = [[1, 2, 3], [4, 4], [5, 6, 7, 8, 9]]


def published_config(sizes: MlpSizes) -> dict[str, Any]:
    return {
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "model_type": "mlp_speculator",
        "n_candidates": 5,
        "top_k_tokens_per_head": [5, 4, 3],
        **asdict(sizes),
    }


def write_published(folder: Path, sizes: MlpSizes = PUBLISHED) -> Path:
    return write_head(folder, published_config(sizes), published_mlp(sizes))


def shared_network(target: CausalModel, inner: int = 20) -> SharedNetwork:
    torch.manual_seed(4)
    network = SharedNetwork(SharedLayout(target.hidden_size, inner)).to(target.dtype)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.5)
    # What a folder keeps is bfloat16: such weights come back as they were.
    return network.to(torch.bfloat16).to(target.dtype)


def write_own(folder: Path, target: CausalModel, tokens: list[int]) -> Path:
    write_shared(folder, shared_network(target), torch.tensor(tokens), target, 5, {"seed": 1})
    return folder


def attached(
    proposer: MlpSpeculatorProposer, target: CausalModel, hidden: torch.Tensor, history: History
) -> MlpSpeculatorProposer:
    """Attached, and told of every slot's prompt but for the last token."""
    slots: Int32Array = np.arange(len(hidden), dtype=np.int32)
    proposer.attach(target, target.new_cache(len(hidden), CAPACITY))
    kept = Kept(slots, history.lengths[slots] - 2, np.ones_like(slots), hidden[:, None])
    proposer.commit(kept, history)
    return proposer


@pytest.mark.parametrize("tie_weights", [False, True])
@pytest.mark.parametrize("scale_input", [False, True])
@pytest.mark.parametrize("inner_dim", [0, 48])
def test_published_heads_draft_as_published(
    tmp_path: Path, tie_weights: bool, scale_input: bool, inner_dim: int
) -> None:
    sizes = MlpSizes(VOCAB, HIDDEN, inner_dim, 3, tie_weights, scale_input)
    target = CausalModel(tiny("llama"))
    hidden, history = hidden_and_history(target, PROMPTS, CAPACITY)
    proposer = MlpSpeculatorProposer.load(write_published(tmp_path, sizes))
    assert proposer.info.max_k == 3
    drafts = attached(proposer, target, hidden, history).draft(draft_task(history, [3, 0, 2]))
    assert drafts.lengths.tolist() == [3, 0, 2]
    for slot, length in enumerate(drafts.lengths.tolist()):
        rows = slow_published_mlp(
            sizes, published_mlp(sizes), hidden[slot], PROMPTS[slot][-1], length
        )
        assert drafts.tokens[slot, :length].tolist() == [int(row.argmax()) for row in rows]
        expected = [float(row.softmax(0).max()) for row in rows]
        np.testing.assert_allclose(drafts.confidence[slot, :length], expected, rtol=1e-5)


def slow_shared(
    network: SharedNetwork, target: CausalModel, tokens: list[int], state: torch.Tensor, token: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The next state, and logits over ``tokens``, of AutoSpec's own head."""

    def normed(values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return values / torch.sqrt((values**2).mean() + 1e-6) * weight

    weights = target.model.state_dict()
    embedded = weights["model.embed_tokens.weight"][token]
    joined = torch.cat((normed(state, network.state_norm), normed(embedded, network.token_norm)))
    gate = network.gate.weight @ joined
    inner = gate * torch.sigmoid(gate) * (network.up.weight @ joined)
    mixed = network.base.weight @ joined + network.down.weight @ inner
    state = normed(mixed, network.output_norm)
    return state, weights["lm_head.weight"][tokens] @ state


def test_own_heads_draft_frequent_tokens_through_the_rows_of_the_target(tmp_path: Path) -> None:
    target = CausalModel(tiny("llama"))
    hidden, history = hidden_and_history(target, PROMPTS, CAPACITY)
    tokens = [3, 1, 20, 9, 14, 2]
    network = shared_network(target)
    proposer = MlpSpeculatorProposer.load(write_own(tmp_path, target, tokens))
    assert proposer.info.max_k == 5
    drafts = attached(proposer, target, hidden, history).draft(draft_task(history, [5, 2, 1]))
    assert drafts.lengths.tolist() == [5, 2, 1]
    with torch.no_grad():
        for slot, length in enumerate(drafts.lengths.tolist()):
            state, token = hidden[slot], PROMPTS[slot][-1]
            for depth in range(length):
                state, logits = slow_shared(network, target, tokens, state, token)
                token = tokens[int(logits.argmax())]
                assert int(drafts.tokens[slot, depth]) == token
                expected = float(logits.softmax(0).max())
                assert float(drafts.confidence[slot, depth]) == pytest.approx(expected, rel=1e-5)


def test_sampled_rows_report_what_they_were_drawn_from(tmp_path: Path) -> None:
    target = CausalModel(tiny("llama"))
    hidden, history = hidden_and_history(target, PROMPTS[:1], CAPACITY)
    tokens = [3, 1, 20, 9, 14, 2]
    proposer = MlpSpeculatorProposer.load(write_own(tmp_path, target, tokens))
    settings = SamplingParameters(temperature=0.9, top_k=4, seed=6)
    drafts = attached(proposer, target, hidden, history).draft(draft_task(history, [2], settings))
    assert drafts.probs is not None
    with torch.no_grad():
        network = shared_network(target)
        _, logits = slow_shared(network, target, tokens, hidden[0], PROMPTS[0][-1])
    expected = torch.zeros(VOCAB, dtype=torch.float64)
    expected[tokens] = filtered_probabilities(logits[None], SamplingRows.of([settings]))[0]
    torch.testing.assert_close(drafts.probs[0, 0], expected)
    assert drafts.confidence[0, 0] == pytest.approx(float(expected.square().sum()), rel=1e-5)
    assert expected[drafts.tokens[0, 0]] > 0


def test_a_slot_without_its_state_is_not_drafted_for(tmp_path: Path) -> None:
    target = CausalModel(tiny("llama"))
    hidden, history = hidden_and_history(target, PROMPTS, CAPACITY)
    proposer = MlpSpeculatorProposer.load(write_published(tmp_path))
    attached(proposer, target, hidden, history)
    proposer.reset(0)  # a new request, not prefilled yet
    history.lengths[2] += 1  # a token that the target was not fed
    assert proposer.draft(draft_task(history, [3, 3, 3])).lengths.tolist() == [0, 3, 0]
    assert proposer.stale_tokens(history, np.arange(3, dtype=np.int32)).tolist() == [0, 0, 0]
    assert proposer.memory_bytes() == 3 * HIDDEN * 8


def test_a_row_stops_before_a_doubtful_token(tmp_path: Path) -> None:
    target = CausalModel(tiny("llama"))
    hidden, history = hidden_and_history(target, PROMPTS, CAPACITY)
    folder = write_published(tmp_path)
    free = attached(MlpSpeculatorProposer.load(folder), target, hidden, history)
    sure = free.draft(draft_task(history, [3, 3, 3]))
    limit = float(np.median(sure.confidence))
    careful = MlpSpeculatorProposer.load(folder, min_confidence=limit)
    drafts = attached(careful, target, hidden, history).draft(draft_task(history, [3, 3, 3]))
    going = np.logical_and.accumulate(sure.confidence >= limit, axis=1).sum(axis=1)
    assert drafts.lengths.tolist() == going.tolist()
    for row, length in enumerate(going.tolist()):
        assert drafts.tokens[row, :length].tolist() == sure.tokens[row, :length].tolist()


class Noted(MlpSpeculatorProposer):
    """Remembers what was drafted after how many tokens."""

    def draft(self, task: DraftTask) -> ModelDrafts:
        drafts = super().draft(task)
        for row, slot in enumerate(task.slots.tolist()):
            if task.k[row]:
                place = (slot, int(task.history.lengths[slot]))
                self.seen[place] = drafts.tokens[row, : drafts.lengths[row]].tolist()
        return drafts

    seen: dict[tuple[int, int], list[int]]


class Sometimes(ScriptedController):
    """Always drafts with the first proposer, or switches between all at random and off."""

    always = True

    def plan(self, state: Any) -> Plan:
        plan = super().plan(state)
        if self.always:
            plan.proposer[:], plan.k[:] = 0, 2
        return plan


def test_off_and_back_drafts_as_if_it_had_always_been_on(tmp_path: Path) -> None:
    model = tiny("llama")
    folder = write_published(tmp_path)
    seen = []
    for is_on in (True, False):
        proposer = Noted.load(folder)
        assert isinstance(proposer, Noted)
        proposer.seen = {}
        controller = Sometimes(2, 3, np.random.default_rng(3))
        controller.always = is_on
        lookup = NgramProposer(2, CAPACITY, max_k=3, min_match=1, max_match=3)
        decoder = Decoder(
            CausalModel(tiny("llama")), [proposer, lookup], controller, slots=2, capacity=CAPACITY
        )
        prompts = [[1, 2, 3], [4, 5, 6, 7]]
        outputs = decoder.generate([GenerationRequest(each, max_tokens=60) for each in prompts])
        assert [list(each.token_ids) for each in outputs] == [
            greedy(model, prompt, 60) for prompt in prompts
        ]
        seen.append(proposer.seen)
    both = seen[0].keys() & seen[1].keys()
    assert len(both) > 10
    assert len(seen[1]) < len(seen[0])
    for place in both:
        always, sometimes = seen[0][place], seen[1][place]
        common = min(len(always), len(sometimes))
        assert always[:common] == sometimes[:common]


def test_greedy_output_is_that_of_plain_decoding(tmp_path: Path) -> None:
    """Both kinds and a lookup in one batch, changing at random, with chunked prefill."""
    rng = np.random.default_rng(8)
    model = tiny("qwen3")
    target = CausalModel(tiny("qwen3"))
    proposers: list[LookupProposer | ModelProposer] = [
        MlpSpeculatorProposer.load(write_published(tmp_path / "published")),
        NgramProposer(4, CAPACITY, max_k=5, min_match=1, max_match=3),
        MlpSpeculatorProposer.load(write_own(tmp_path / "own", target, list(range(0, VOCAB, 2)))),
    ]
    controller = ScriptedController(3, 5, rng)
    decoder = Decoder(target, proposers, controller, slots=4, capacity=CAPACITY, prefill_tokens=11)
    prompts = [rng.integers(0, VOCAB, size).tolist() for size in (1, 3, 40, 17, 9, 2)]
    outputs = decoder.generate([GenerationRequest(each, max_tokens=32) for each in prompts])
    for prompt, output in zip(prompts, outputs, strict=True):
        assert list(output.token_ids) == greedy(model, prompt, 32)
    for index in (0, 2):
        drafted = [
            (int(result.verified[row].sum()), int(result.accepted[row].sum()))
            for plan, result in controller.results
            for row in [plan.proposer == index]
        ]
        verified, accepted = (sum(column) for column in zip(*drafted, strict=True))
        assert verified > accepted >= 0
        assert verified > 20


def test_sampling_keeps_the_distribution(tmp_path: Path) -> None:
    model = distribution.tiny_target()
    expected = distribution.pairs_of(model)
    target = CausalModel(model)
    head = MlpSpeculatorProposer.load(write_own(tmp_path, target, [1, 2, 3, 5, 7]))
    counts, (_, by_head) = distribution.drafted_pairs(target, head, 20_000)
    assert by_head > 2000
    assert distribution.deviation(counts, expected) < distribution.FITS


# Files that do not fit -------------------------------------------------------------------------


def attach(folder: Path) -> None:
    target = CausalModel(tiny("llama"), name="the-target")
    MlpSpeculatorProposer.load(folder).attach(target, target.new_cache(1, 16))


@pytest.mark.parametrize(
    "sizes,message",
    [
        (replace(PUBLISHED, emb_dim=16), "emb_dim is 16, but the-target's hidden state has 32"),
        (replace(PUBLISHED, vocab_size=30), "vocab_size is 30, but the-target's output has 24"),
    ],
)
def test_heads_of_another_target(tmp_path: Path, sizes: MlpSizes, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        attach(write_published(tmp_path, sizes))


def test_missing_and_misshapen_tensors(tmp_path: Path) -> None:
    tensors = published_mlp(PUBLISHED)
    del tensors["speculator.ln.2.bias"]
    with pytest.raises(ModelError, match=r"tensor speculator\.ln\.2\.bias is missing"):
        attach(write_head(tmp_path, published_config(PUBLISHED), tensors))
    tensors = published_mlp(PUBLISHED)
    tensors["speculator.proj.0.weight"] = torch.zeros(HIDDEN, 7, dtype=torch.float64)
    with pytest.raises(
        ModelError, match=r"speculator\.proj\.0\.weight has shape \[32, 7\], expected \[32, 32\]"
    ):
        attach(write_head(tmp_path, published_config(PUBLISHED), tensors))


def test_other_formats(tmp_path: Path) -> None:
    target = CausalModel(tiny("llama"))
    folder = write_own(tmp_path, target, [1, 2])
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(
        config.replace('"format_version": 1', '"format_version": 9')
    )
    with pytest.raises(ModelError, match="format_version is 9; it must be 1"):
        attach(folder)
    (folder / "config.json").write_text(config.replace("AutoSpecMlpSpeculator", "Something"))
    with pytest.raises(ModelError, match="architectures is 'Something'; it must be 'MLPSpec"):
        attach(folder)
    with pytest.raises(ModelError, match="holds tokens 1 to 99; allowed are 0 to 23"):
        attach(write_own(tmp_path / "large", target, [1, 99]))


def test_bad_settings_and_use_before_attaching(tmp_path: Path) -> None:
    folder = write_published(tmp_path)
    with pytest.raises(ModelError, match=r"max_k is 4; .* drafts from 1 to 3 tokens"):
        MlpSpeculatorProposer.load(folder, max_k=4)
    with pytest.raises(ModelError, match="min_confidence is 2"):
        MlpSpeculatorProposer.load(folder, min_confidence=2)
    with pytest.raises(ModelError, match="before it was attached"):
        MlpSpeculatorProposer.load(folder).reset(0)
