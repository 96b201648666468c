"""Folders of heads: what is read from them, and what is said of those that are wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from autospec.errors import ModelError
from autospec.proposers.checkpoint import Checkpoint


def write(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_tensors_of_several_safetensors_files(tmp_path: Path) -> None:
    first, second = torch.arange(6.0).view(2, 3), torch.ones(4, dtype=torch.bfloat16)
    write(tmp_path, {}, {"a": first})
    save_file({"b": second}, tmp_path / "other.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    assert set(checkpoint.names) == {"a", "b"}
    assert checkpoint.memory_bytes() == 6 * 4 + 4 * 2
    assert checkpoint.shape("a") == (2, 3)
    assert torch.equal(checkpoint.tensor("a", (2, 3)), first)
    assert checkpoint.tensor("b", (4,)).dtype == torch.bfloat16
    assert checkpoint.tensor("b", (4,), dtype=torch.float64).dtype == torch.float64


@pytest.mark.parametrize("name", ["pytorch_model.bin", "medusa_lm_head.pt"])
def test_tensors_of_a_pytorch_file(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    torch.save({"a": torch.ones(2, 3)}, tmp_path / name)
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.memory_bytes() == 24
    assert torch.equal(checkpoint.tensor("a", (2, 3)), torch.ones(2, 3))


class Anything:
    """An object that a pickle would have to run code for."""


def test_code_in_a_pytorch_file_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    torch.save({"a": Anything()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin: is not a readable PyTorch weights"):
        Checkpoint.open(tmp_path)


def test_a_wrong_or_missing_tensor_is_named_with_its_shapes(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write(tmp_path, {}, {"fc.weight": torch.ones(2, 3)}))
    with pytest.raises(
        ModelError,
        match=r"model\.safetensors: tensor fc\.weight has shape \[2, 3\], expected \[2, 4\]",
    ):
        checkpoint.tensor("fc.weight", (2, 4))
    with pytest.raises(ModelError, match=r"tensor fc\.bias is missing; there are fc\.weight"):
        checkpoint.tensor("fc.bias", (2,))


def test_settings_are_checked(tmp_path: Path) -> None:
    config = {"size": 3, "part": {"size": 4, "share": 0.5}, "on": True, "kind": "x", "bad": -1}
    checkpoint = Checkpoint.open(write(tmp_path, config, {"a": torch.ones(1)}))
    assert (checkpoint.integer("size"), checkpoint.integer("part.size")) == (3, 4)
    assert checkpoint.integer("none", 7) == 7
    assert (checkpoint.number("part.share"), checkpoint.flag("on"), checkpoint.text("kind")) == (
        0.5,
        True,
        "x",
    )
    for call, message in (
        (lambda: checkpoint.integer("bad"), "bad is -1; it must be a whole number from 1 on"),
        (lambda: checkpoint.integer("on"), "on is True; it must be a whole number"),
        (lambda: checkpoint.integer("part.none"), r"config\.json: part\.none is missing"),
        (lambda: checkpoint.number("kind"), "kind is 'x'; it must be a number"),
        (lambda: checkpoint.flag("size"), "size is 3; it must be true or false"),
        (lambda: checkpoint.text("size"), "size is 3; it must be a text"),
        (lambda: checkpoint.require("size", 3, (1, 2)), "size is 3; it must be 1 or 2"),
        (lambda: checkpoint.fits("size", 3, 4, "m"), "size is 3, but m has 4"),
    ):
        with pytest.raises(ModelError, match=message):
            call()


def test_folders_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="there is no such folder"):
        Checkpoint.open(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"config\.json: cannot be read"):
        Checkpoint.open(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="is not JSON"):
        Checkpoint.open(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="must be a JSON object, found list"):
        Checkpoint.open(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="holds no weights"):
        Checkpoint.open(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"x" * 100)
    with pytest.raises(ModelError, match="is not a readable safetensors file"):
        Checkpoint.open(tmp_path)
