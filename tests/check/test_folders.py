from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from autospec.check.folders import folder_facts, model_size
from autospec.check.tokens import load_tokenizer
from autospec.errors import ModelError


def test_sizes_come_from_headers(folder: Path) -> None:
    size = model_size(folder)
    hidden, inner, layers, words = 32, 64, 2, 96
    per_layer = 2 * hidden * hidden + 2 * hidden * hidden // 2 + 3 * hidden * inner + 2 * hidden
    assert size.parameters == layers * per_layer + 2 * words * hidden + hidden
    assert size.weight_bytes == 8 * size.parameters
    assert size.cache_bytes_per_token == 2 * layers * 2 * 8 * 8
    assert (size.vocab_size, size.context_tokens, size.is_mixture) == (words, 2048, False)


def test_a_model_agrees_with_itself_and_memory_adds_up(folder: Path) -> None:
    facts = folder_facts(folder, folder, batch=4, context=100, device="d", available=1e6)
    assert facts.agreement is not None
    assert facts.agreement.is_compatible
    assert facts.agreement.special_tokens_differ == ()
    assert facts.agreement.same_chat_template is True
    memory = facts.memory
    assert memory.target_cache == 400 * facts.target.cache_bytes_per_token
    assert memory.needed == 2 * (facts.target.weight_bytes + memory.target_cache)
    assert memory.fits is True
    small = folder_facts(folder, None, batch=4, context=100, device="d", available=1e3)
    assert small.memory.fits is False
    assert small.agreement is None
    nowhere = folder_facts(folder, None, batch=1, context=1, device=None, available=None)
    assert nowhere.memory.fits is None


def test_differences_are_counted_and_shown(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    path = other / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    words = tokenizer["model"]["vocab"]
    words["w8"], words["w9"] = 9, 8
    del words["w95"]
    path.write_text(json.dumps(tokenizer))
    config = json.loads((other / "tokenizer_config.json").read_text())
    config["eos_token"] = "w3"
    (other / "tokenizer_config.json").write_text(json.dumps(config))
    for template in other.glob("*.jinja"):
        template.write_text("{% for m in messages %}x{% endfor %}")
    agreement = folder_facts(
        folder, other, batch=1, context=1, device=None, available=None
    ).agreement
    assert agreement is not None
    assert not agreement.is_compatible
    assert agreement.differing == 3
    assert agreement.examples[0] == "8: 'w8' in the target, 'w9' in the draft"
    assert agreement.examples[2] == "95: 'w95' in the target, None in the draft"
    assert agreement.special_tokens_differ == ("eos_token: None in the target, 'w3' in the draft",)
    assert agreement.same_chat_template is False


def test_broken_folders_are_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        model_size(tmp_path)
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    (broken / "model.safetensors").write_bytes(b"\x05")
    with pytest.raises(ModelError, match="not a readable safetensors file"):
        model_size(broken)
    (broken / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="no weights in"):
        model_size(broken)
    config = json.loads((broken / "config.json").read_text()) | {"num_hidden_layers": 0}
    shutil.copy(folder / "model.safetensors", broken)
    (broken / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="num_hidden_layers is 0; it must be a number >= 1"):
        model_size(broken)
    with pytest.raises(ModelError, match="no tokenizer here"):
        load_tokenizer(tmp_path)
    with pytest.raises(ModelError, match="expected a model folder"):
        load_tokenizer(tmp_path / "none")
