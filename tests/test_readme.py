"""The README's code runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from autospec.config import parse_settings
from autospec.controller import Controller
from autospec.records import Float32Array, Int16Array, Int32Array, Int64Array

README = Path(__file__).parent.parent / "README.md"


def block(language: str) -> str:
    found = re.findall(rf"^```{language}\n(.*?)^```", README.read_text("utf-8"), re.M | re.S)
    assert len(found) == 1, f"the README has {len(found)} blocks of {language}"
    return str(found[0])


class Server:
    """A server of one request whose lookup is always right and whose model never is."""

    def __init__(self) -> None:
        self.steps = 0
        self.tokens = 0
        self.proposer: Int16Array = np.zeros(0, dtype=np.int16)

    def is_running(self, handle: int) -> bool:
        self.handle = handle
        return self.steps < 200

    def batch(self) -> tuple[Int64Array, Int32Array]:
        return np.array([self.handle]), np.array([10 + self.tokens], dtype=np.int32)

    def offers(self, wanted: NDArray[np.bool_]) -> tuple[Int16Array, Float32Array]:
        assert not wanted[1]  # a model
        lengths = np.array([[16], [0]], dtype=np.int16)
        return lengths, np.full((2, 1, 16), 0.9, dtype=np.float32)

    def draft(
        self, proposer: Int16Array, k: Int16Array
    ) -> tuple[Int16Array, NDArray[np.float32] | None]:
        self.proposer = proposer
        return k, None

    def verify(self, verify: Int16Array) -> tuple[Int16Array, Int16Array, float]:
        self.steps += 1
        accepted = np.where(self.proposer == 0, verify, 0).astype(np.int16)
        committed = (accepted + 1).astype(np.int16)
        self.tokens += int(committed.sum())
        return accepted, committed, 0.02 + 0.0002 * float(verify.sum())


def test_the_loop_in_the_readme(tmp_path: Path) -> None:
    profile = tmp_path / "my-service.json"
    code = block("python").replace("profiles/my-service.json", str(profile))
    for is_warm in (False, True):
        server = Server()
        names = {"server": server, "prompt_token_ids": np.arange(10, dtype=np.int32)}
        exec(compile(code, str(README), "exec"), names)
        assert server.tokens > 10 * server.steps
        assert profile.exists()
        controller = names["controller"]
        assert isinstance(controller, Controller)
        assert controller.is_warm == is_warm
        assert not controller.faults


def test_the_policy_in_the_readme() -> None:
    assert parse_settings(block("yaml"), "README.md").guard.margin == 0.02
