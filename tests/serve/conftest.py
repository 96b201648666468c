from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from autospec.serve.server import ServeOptions
from tests.serve.running import Running, running, save_tiny_model


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("served") / "tiny"
    save_tiny_model(path)
    return path


@pytest.fixture(scope="session")
def server(folder: Path) -> Iterator[Running]:
    with running(ServeOptions(folder, slots=4, max_waiting=6)) as one:
        yield one


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url, api_key="none", max_retries=0) as one:
        yield one
