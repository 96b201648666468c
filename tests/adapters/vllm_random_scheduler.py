"""A scheduler that decides at random, for engine cores in processes of their own."""

from __future__ import annotations

from typing import Any

from autospec.adapters.vllm import AutoSpecScheduler
from tests.adapters.vllm_engines import random_decisions


class RandomScheduler(AutoSpecScheduler):
    """A random proposer, or none, and a random k for every request and step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        random_decisions(self.steering.pilot)
