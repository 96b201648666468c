"""Machine code of kernels that have changed is never read again."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, cast

import pytest

from autospec.kernel_cache import PACKAGE, kernel_cache, places, state_of_kernels
from autospec.policy.static import StaticOptions
from autospec.records import ProposerInfo
from autospec.step.kernels import look_ahead
from autospec.step.warmup import tell_compiling, warm_up
from tests.simulated_engine import ENGINE

KERNEL = "from autospec.parts import part\n\n@compiled\ndef kernel():\n    return part()\n"


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = tmp_path / "autospec"
    folder.mkdir()
    (folder / "kernel.py").write_text(KERNEL)
    (folder / "parts.py").write_text("def part():\n    return 1\n")
    (folder / "other.py").write_text("x = 1\n")
    return folder


@pytest.mark.parametrize("name,matters", [("kernel", True), ("parts", True), ("other", False)])
def test_the_state_is_that_of_kernels_and_what_they_import(
    package: Path, name: str, matters: bool
) -> None:
    before = state_of_kernels(package, "1")
    path = package / f"{name}.py"
    path.write_text(path.read_text() + "# changed\n")
    assert (state_of_kernels(package, "1") != before) == matters


def test_the_state_is_also_that_of_numba(package: Path) -> None:
    assert state_of_kernels(package, "1") != state_of_kernels(package, "2")


def test_a_moved_file_is_another_state(package: Path) -> None:
    before = state_of_kernels(package, "1")
    (package / "kernel.py").rename(package / "moved.py")
    assert state_of_kernels(package, "1") != before


def test_the_first_place_that_can_be_written_is_taken(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert kernel_cache("s", [blocked / "x", tmp_path / "b"]) == tmp_path / "b" / "kernels-s"
    assert kernel_cache("s", [blocked / "x"]) is None


def test_compiling_is_told_before_it_keeps_anybody_waiting(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    warm_up(StaticOptions(), [ProposerInfo("a", "lookup", 1)], ENGINE, 1)
    tell_compiling()
    assert not caplog.records  # it was called before

    def conclude() -> None: ...

    cast(Any, conclude).overloads = {}
    monkeypatch.setattr("autospec.step.warmup.conclude", conclude)
    for place, said in ((None, "let NUMBA_CACHE_DIR say where"), (tmp_path, f"kept in {tmp_path}")):
        monkeypatch.setattr("autospec.compiled.CACHE", place)
        monkeypatch.setattr("autospec.step.warmup.CACHE", place)
        caplog.clear()
        tell_compiling()
        assert "compiling kernels, once" in caplog.text
        assert said in caplog.text
    (tmp_path / "step").mkdir()
    (tmp_path / "step" / "kernels.conclude-341.py312.nbi").touch()
    caplog.clear()
    tell_compiling()
    assert not caplog.records


def test_the_latest_states_stay(tmp_path: Path) -> None:
    for number in range(6):
        folder = kernel_cache(str(number), [tmp_path])
        assert folder is not None
        os.utime(folder, (number, number))
    assert kernel_cache("5", [tmp_path]) is not None
    kept = sorted(path.name for path in tmp_path.iterdir())
    assert kept == ["kernels-2", "kernels-3", "kernels-4", "kernels-5"]


def test_where_the_user_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    assert list(places()) == [tmp_path]
    monkeypatch.delenv("NUMBA_CACHE_DIR")
    assert places()[0] == PACKAGE / "__pycache__"


def test_only_the_users_own_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Numba runs what it finds: nobody else may have put it there."""
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("AUTOSPEC_CACHE", str(tmp_path))
    assert list(places()) == [PACKAGE / "__pycache__", tmp_path]


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.delenv("AUTOSPEC_CACHE", raising=False)
    monkeypatch.setattr(Path, "home", nowhere)
    assert list(places()) == [PACKAGE / "__pycache__"]


def test_kernels_are_kept_there() -> None:
    import numba

    kept = Path(cast(Any, look_ahead).stats.cache_path)
    assert f"kernels-{state_of_kernels(PACKAGE, numba.__version__)}" in kept.parts
