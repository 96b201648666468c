from __future__ import annotations

from pathlib import Path

import pytest

from tests.serve.running import save_tiny_model


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checked") / "tiny"
    save_tiny_model(path)
    return path
