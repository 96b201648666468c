"""Medusa heads in both published layouts against a slow forward; files that do not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from autospec.engine.decoder import Decoder
from autospec.engine.drafting import Kept, ModelProposer
from autospec.engine.model import CausalModel
from autospec.engine.request import GenerationRequest
from autospec.engine.sampling import SamplingParameters, SamplingRows, filtered_probabilities
from autospec.errors import ModelError
from autospec.proposers.base import History, LookupProposer
from autospec.proposers.medusa import MedusaProposer
from autospec.proposers.medusa_folder import MedusaBlocks, MedusaLayout, write_medusa
from autospec.proposers.suffix import SuffixProposer
from autospec.records import Int32Array
from tests.engine import test_distribution as distribution
from tests.engine.tiny_models import CAPACITY, SIZES, VOCAB, ScriptedController, greedy, tiny
from tests.proposers.head_folders import (
    MedusaSizes,
    Tensors,
    draft_task,
    hidden_and_history,
    medusa,
    slow_medusa,
    write_head,
)

torch.set_num_threads(1)

HIDDEN: int = SIZES["hidden_size"]
PROMPTS = [[1, 2, 3], [4, 4], [5, 6, 7, 8, 9]]
PLAIN = MedusaSizes(VOCAB, HIDDEN)


def config(sizes: MedusaSizes, **more: object) -> dict[str, Any]:
    """Keys as vLLM's ``configs/medusa.py`` has them."""
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": sizes.hidden_size,
        "vocab_size": sizes.vocab_size,
        "num_heads": sizes.num_heads,
        "num_hidden_layers": sizes.num_layers,
        "max_paths": 64,
        "topk": 10,
        **more,
    }


def original_folder(folder: Path, sizes: MedusaSizes, prefix: str) -> Path:
    """As FasterDecoding/Medusa saves: a PyTorch file, sizes of the target left out."""
    folder.mkdir(parents=True, exist_ok=True)
    keys = {"medusa_num_heads": sizes.num_heads, "medusa_num_layers": sizes.num_layers}
    (folder / "config.json").write_text(json.dumps({"version": "2", **keys}))
    tensors = medusa(sizes, sizes.vocab_size, original=True)
    named = {prefix + name: tensor for name, tensor in tensors.items()}
    torch.save(named, folder / "medusa_lm_head.pt")
    return folder


def attached(
    proposer: MedusaProposer, target: CausalModel, hidden: torch.Tensor, history: History
) -> MedusaProposer:
    slots: Int32Array = np.arange(len(hidden), dtype=np.int32)
    proposer.attach(target, target.new_cache(len(hidden), CAPACITY))
    kept = Kept(slots, history.lengths[slots] - 2, np.ones_like(slots), hidden[:, None])
    proposer.commit(kept, history)
    return proposer


def check_drafts(
    folder: Path,
    sizes: MedusaSizes,
    tensors: Tensors,
    *,
    original: bool = False,
    token_ids: list[int] | None = None,
) -> None:
    target = CausalModel(tiny("llama"))
    hidden, history = hidden_and_history(target, PROMPTS, CAPACITY)
    proposer = attached(MedusaProposer.load(folder), target, hidden, history)
    assert proposer.info.max_k == sizes.num_heads
    assert proposer.info.kind == "parallel"
    drafts = proposer.draft(draft_task(history, [3, 0, 2]))
    assert drafts.lengths.tolist() == [3, 0, 2]
    for slot, length in enumerate(drafts.lengths.tolist()):
        for depth in range(length):
            row = slow_medusa(sizes, tensors, hidden[slot], depth, original)
            best = int(row.argmax())
            assert int(drafts.tokens[slot, depth]) == (token_ids[best] if token_ids else best)
            expected = float(row.softmax(0).max())
            assert float(drafts.confidence[slot, depth]) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("prefix", ["", "medusa_heads."])
def test_heads_as_vllm_reads_them(tmp_path: Path, prefix: str, has_bias: bool) -> None:
    sizes = MedusaSizes(VOCAB, HIDDEN, has_bias=has_bias)
    tensors = medusa(sizes, VOCAB, original=False)
    named = {prefix + name: tensor for name, tensor in tensors.items()}
    check_drafts(write_head(tmp_path, config(sizes), named), sizes, tensors)


@pytest.mark.parametrize("prefix", ["", "medusa_head."])
def test_heads_as_fasterdecoding_saves_them(tmp_path: Path, prefix: str) -> None:
    sizes = MedusaSizes(VOCAB, HIDDEN, num_layers=1, has_bias=True)
    tensors = medusa(sizes, VOCAB, original=True)
    check_drafts(original_folder(tmp_path, sizes, prefix), sizes, tensors, original=True)


@pytest.mark.parametrize("rows", [4, VOCAB])
def test_heads_with_a_token_map(tmp_path: Path, rows: int) -> None:
    """Output rows may have been cut to the mapped tokens, or not yet."""
    token_ids = [9, 2, 17, 5]
    tensors = medusa(PLAIN, rows, original=False)
    named = tensors | {"token_map": torch.tensor(token_ids)}
    folder = write_head(tmp_path, config(PLAIN, truncated_vocab_size=4), named)
    cut = {
        name: tensor[token_ids] if rows == VOCAB and name.startswith("lm_heads") else tensor
        for name, tensor in tensors.items()
    }
    check_drafts(folder, PLAIN, cut, token_ids=token_ids)


def test_heads_that_share_their_output_rows(tmp_path: Path) -> None:
    tensors = medusa(PLAIN, VOCAB, original=False)
    kept = {name: tensor for name, tensor in tensors.items() if name[:10] != "lm_heads.1"}
    kept = {name: tensor for name, tensor in kept.items() if name[:10] != "lm_heads.2"}
    folder = write_head(tmp_path, config(PLAIN, original_lm_head=True), kept)
    same = {f"lm_heads.{head}.weight": tensors["lm_heads.0.weight"] for head in range(3)}
    check_drafts(folder, PLAIN, tensors | same)


def own_blocks() -> MedusaBlocks:
    torch.manual_seed(2)
    blocks = MedusaBlocks(MedusaLayout(HIDDEN, 3, 2, has_bias=True)).double()
    return blocks.to(torch.bfloat16).double()  # as a folder keeps it


def test_own_heads_draft_through_the_rows_of_the_target(tmp_path: Path) -> None:
    target = CausalModel(tiny("llama"))
    token_ids = [3, 1, 20, 9, 14]
    blocks = own_blocks()
    write_medusa(tmp_path, blocks, torch.tensor(token_ids), target, {"seed": 3})
    tensors: Tensors = {}
    for name, value in blocks.state_dict().items():
        _, head, layer, kind = name.split(".")
        tensors[f"blocks.{head}.layers.{layer}.{kind}"] = value
    rows = target.model.state_dict()["lm_head.weight"][token_ids]
    tensors |= {f"lm_heads.{head}.weight": rows for head in range(3)}
    sizes = MedusaSizes(VOCAB, HIDDEN, has_bias=True)
    check_drafts(tmp_path, sizes, tensors, token_ids=token_ids)


def test_sampled_rows_report_what_they_were_drawn_from(tmp_path: Path) -> None:
    tensors = medusa(PLAIN, VOCAB, original=False)
    target = CausalModel(tiny("llama"))
    hidden, history = hidden_and_history(target, PROMPTS[:1], CAPACITY)
    folder = write_head(tmp_path, config(PLAIN), tensors)
    proposer = attached(MedusaProposer.load(folder), target, hidden, history)
    settings = SamplingParameters(temperature=0.7, top_p=0.9, seed=3)
    drafts = proposer.draft(draft_task(history, [3], settings))
    assert drafts.probs is not None
    for depth in range(3):
        logits = slow_medusa(PLAIN, tensors, hidden[0], depth, original=False)
        expected = filtered_probabilities(logits[None], SamplingRows.of([settings]))[0]
        torch.testing.assert_close(drafts.probs[0, depth], expected)
        assert expected[drafts.tokens[0, depth]] > 0


def test_greedy_output_is_that_of_plain_decoding(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    target = CausalModel(tiny("qwen2"))
    tensors = medusa(PLAIN, VOCAB, original=False)
    proposers: list[LookupProposer | ModelProposer] = [
        MedusaProposer.load(write_head(tmp_path, config(PLAIN), tensors)),
        SuffixProposer(4, CAPACITY, max_k=5),
    ]
    controller = ScriptedController(2, 5, rng)
    decoder = Decoder(target, proposers, controller, slots=4, capacity=CAPACITY, prefill_tokens=11)
    prompts = [rng.integers(0, VOCAB, size).tolist() for size in (1, 3, 40, 17, 9, 2)]
    outputs = decoder.generate([GenerationRequest(each, max_tokens=32) for each in prompts])
    for prompt, output in zip(prompts, outputs, strict=True):
        assert list(output.token_ids) == greedy(tiny("qwen2"), prompt, 32)
    drafted = sum(
        int(result.verified[plan.proposer == 0].sum()) for plan, result in controller.results
    )
    assert drafted > 20


def test_sampling_keeps_the_distribution(tmp_path: Path) -> None:
    model = distribution.tiny_target()
    expected = distribution.pairs_of(model)
    sizes = MedusaSizes(distribution.VOCAB, model.config.hidden_size, num_heads=2)
    tensors = medusa(sizes, distribution.VOCAB, original=False)
    head = MedusaProposer.load(write_head(tmp_path, config(sizes), tensors))
    counts, (_, by_head) = distribution.drafted_pairs(CausalModel(model), head, 20_000)
    assert by_head > 2000
    assert distribution.deviation(counts, expected) < distribution.FITS


# Files that do not fit -------------------------------------------------------------------------


def attach(folder: Path) -> None:
    target = CausalModel(tiny("llama"), name="the-target")
    MedusaProposer.load(folder).attach(target, target.new_cache(1, 16))


def test_heads_of_another_target(tmp_path: Path) -> None:
    for key, sizes in (
        ("hidden_size is 16, but the-target has 32", MedusaSizes(VOCAB, 16)),
        ("vocab_size is 30, but the-target has 24", MedusaSizes(30, HIDDEN)),
    ):
        folder = write_head(
            tmp_path, config(sizes), medusa(sizes, sizes.vocab_size, original=False)
        )
        with pytest.raises(ModelError, match=key):
            attach(folder)
    sizes = MedusaSizes(VOCAB, 16)  # a folder that does not tell
    with pytest.raises(
        ModelError, match=r"tensor 0\.0\.linear\.weight has shape \[16, 16\], expected \[32, 32\]"
    ):
        attach(original_folder(tmp_path / "original", sizes, ""))


def test_missing_tensors_and_bad_settings(tmp_path: Path) -> None:
    tensors = medusa(PLAIN, VOCAB, original=False)
    del tensors["lm_heads.2.weight"]
    folder = write_head(tmp_path, config(PLAIN), tensors)
    with pytest.raises(ModelError, match=r"tensor lm_heads\.2\.weight is missing"):
        attach(folder)
    with pytest.raises(ModelError, match="tensor token_map is missing"):
        attach(write_head(tmp_path, config(PLAIN, truncated_vocab_size=4), tensors))
    tensors = medusa(PLAIN, 4, original=False) | {"token_map": torch.tensor([1, 2, 3, 40])}
    with pytest.raises(ModelError, match="token_map holds tokens 1 to 40; allowed are 0 to 23"):
        attach(write_head(tmp_path, config(PLAIN, truncated_vocab_size=4), tensors))
    with pytest.raises(ModelError, match=r"max_k is 4; .* drafts from 1 to 3 tokens"):
        MedusaProposer.load(folder, max_k=4)
    with pytest.raises(ModelError, match="min_confidence is -1"):
        MedusaProposer.load(folder, min_confidence=-1)
    with pytest.raises(ModelError, match="before it was attached"):
        MedusaProposer.load(folder).reset(0)
