"""Model folders: what loads, and what is said of those that do not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import WordPiece
from tokenizers.models import WordLevel
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from autospec.engine.decoder import Decoder
from autospec.engine.model import CausalModel
from autospec.engine.packing import can_pack
from autospec.engine.request import GenerationRequest
from autospec.errors import InputError, ModelError
from tests.engine.tiny_models import FAMILIES, SIZES, VOCAB, greedy, tiny


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A complete model folder with a tokenizer whose token i reads ``w<i>``."""
    path = tmp_path / "tiny-model"
    model = tiny("llama")
    model.generation_config = GenerationConfig(eos_token_id=[VOCAB - 1, VOCAB - 2])
    model.save_pretrained(path)
    words = {f"w{number}": number for number in range(VOCAB)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.decoder = WordPiece(prefix="##")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(path)
    return path


def test_a_folder_loads_with_its_tokenizer_and_end_tokens(folder: Path) -> None:
    model = CausalModel.load(folder)
    assert model.name == "tiny-model"
    assert model.dtype == torch.float64
    assert model.vocab_size == VOCAB
    assert model.context_tokens == SIZES["max_position_embeddings"]
    assert model.eos_token_ids == (VOCAB - 1, VOCAB - 2)
    assert model.decode([1, 2]) == "w1 w2"
    assert CausalModel.load(folder, dtype="float32").dtype == torch.float32


def test_stop_strings_cut_text_and_tokens(folder: Path) -> None:
    expected = greedy(tiny("llama"), [5, 6, 7], 20)
    target = CausalModel.load(folder)
    decoder = Decoder(target, slots=2, capacity=64)
    stop = f"w{expected[6]}"
    request = GenerationRequest(
        [5, 6, 7], max_tokens=20, stop=(stop,), ignore_eos=True, stream_text=True
    )
    decoder.submit(request)
    events = list(decoder.events())
    output = events[-1].output
    assert output is not None
    assert output.finish_reason == "stop"
    text = output.text
    assert text is not None
    assert stop not in text
    kept = list(output.token_ids)
    assert kept == expected[: len(kept)]
    assert text == target.decode(kept)[: len(text)]
    assert "".join(event.text for event in events) == text
    with pytest.raises(InputError, match="a stop string is empty"):
        decoder.submit(GenerationRequest([5], stop=("",)))


def test_text_comes_at_the_end_where_it_was_not_streamed(folder: Path) -> None:
    target = CausalModel.load(folder)
    decoder = Decoder(target, slots=1, capacity=64)
    decoder.submit(GenerationRequest([5, 6, 7], max_tokens=5, ignore_eos=True))
    events = list(decoder.events())
    assert all(event.text == "" for event in events)
    assert events[-1].output is not None
    assert events[-1].output.text == target.decode(events[-1].output.token_ids)


def test_a_path_that_is_no_model_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="expected a model folder, found nothing"):
        CausalModel.load(tmp_path / "nowhere")
    (tmp_path / "file").write_text("x")
    with pytest.raises(ModelError, match="expected a model folder, found a file"):
        CausalModel.load(tmp_path / "file")
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        CausalModel.load(tmp_path)
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ModelError, match=r"config\.json: not readable as JSON"):
        CausalModel.load(tmp_path)
    (tmp_path / "config.json").write_text("[]", encoding="utf-8")
    with pytest.raises(ModelError, match="model_type is None; supported are llama"):
        CausalModel.load(tmp_path)


def test_an_unsupported_family_is_named(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "t5"}))
    with pytest.raises(ModelError, match="model_type is 't5'; supported are llama"):
        CausalModel.load(folder)


def test_missing_and_broken_weights(folder: Path) -> None:
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[: len(content) // 2])
    with pytest.raises(ModelError, match="tiny-model: the model cannot be loaded"):
        CausalModel.load(folder)
    weights.unlink()
    with pytest.raises(ModelError, match=r"no \*\.safetensors file"):
        CausalModel.load(folder)


def test_a_checkpoint_without_some_weights_is_refused(folder: Path) -> None:
    """transformers alone would make them random and go on."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(ModelError, match=r"9 weights are missing.*model\.layers\.2"):
        CausalModel.load(folder)


def test_an_unknown_dtype_is_named(folder: Path) -> None:
    with pytest.raises(ModelError, match="dtype is 'int4'; it must be auto or one of"):
        CausalModel.load(folder, dtype="int4")


def test_a_broken_tokenizer_is_named(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{", encoding="utf-8")
    with pytest.raises(ModelError, match="the tokenizer cannot be loaded"):
        CausalModel.load(folder)


def test_rotations_that_depend_on_the_batch_are_refused() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    model = LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=rope))
    with pytest.raises(ModelError, match="rope_type is 'dynamic'"):
        CausalModel(model)


@pytest.mark.parametrize("family", FAMILIES)
def test_repacked_weights_give_the_same_logits(family: str) -> None:
    """bfloat16 on CPU, against the model as transformers runs it."""
    reference = tiny(family)
    cast(torch.nn.Module, reference).to(torch.bfloat16)
    tokens = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])
    with torch.inference_mode():
        expected = reference(tokens[None], use_cache=False).logits[0].float()
    model = CausalModel(reference)
    cache = model.new_cache(1, 16)
    step = model.new_step(cache, *(torch.tensor([value]).int().numpy() for value in (0, 0, 8)))
    logits = model.forward(tokens, step, torch.arange(8)).logits.float()
    scale = expected.abs().max()
    assert ((logits - expected).abs() / scale).max() < 0.03
    packed = can_pack(torch.device("cpu"), torch.bfloat16)
    assert (
        any(type(module).__name__ == "PackedLinear" for module in model.model.modules()) == packed
    )


def test_hidden_states_of_the_layers_asked_for() -> None:
    reference = tiny("llama")
    tokens = torch.tensor([3, 1, 4, 1, 5])
    with torch.inference_mode():
        expected = reference(tokens[None], use_cache=False, output_hidden_states=True).hidden_states
    model = CausalModel(reference)
    step = model.new_step(
        model.new_cache(1, 8), *(torch.tensor([value]).int().numpy() for value in (0, 0, 5))
    )
    result = model.forward(tokens, step, torch.arange(5), hidden_layers=(-1, 1))
    assert result.hidden is not None
    torch.testing.assert_close(result.hidden[:, 0], expected[-1][0])
    torch.testing.assert_close(result.hidden[:, 1], expected[1][0])
    assert model.forward(tokens, step, torch.arange(5)).hidden is None
