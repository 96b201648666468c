"""A stopped server waits for an engine core that AutoSpec steers, and for no other."""

from __future__ import annotations

import threading
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from autospec.adapters.vllm.grace import GRACE_SECONDS, grant_grace
from tests.adapters.vllm_engines import SCHEDULER

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Stops a manager that was made with some configuration; returns the time it allowed."""
    from vllm.v1.engine import utils

    manager = utils.CoreEngineProcManager
    monkeypatch.setattr(manager, "__init__", _start)
    own = getattr(manager.shutdown, "autospec_original", manager.shutdown)
    monkeypatch.setattr(manager, "shutdown", own)
    allowed: list[float | None] = []
    monkeypatch.setattr(utils, "shutdown", lambda _, timeout: allowed.append(timeout))
    grant_grace()

    def stop(scheduler: str | None, options: dict[str, Any], drains: int) -> float | None:
        config = SimpleNamespace(
            scheduler_config=SimpleNamespace(scheduler_cls=scheduler),
            additional_config=options,
            shutdown_timeout=drains,
        )
        made: Any = manager
        made(1, 0, 0, config).shutdown(timeout=drains)
        return allowed.pop()

    return stop


def _start(self: Any, count: int, start: int, local_start: int, vllm_config: Any) -> None:
    self._request_shutdown_timeout = vllm_config.shutdown_timeout
    self._finalizer = weakref.finalize(self, list)
    self.manager_stopped = threading.Event()
    self.processes = []


@pytest.mark.parametrize(
    "scheduler,options,drains,allowed",
    [
        (SCHEDULER, {}, 0, GRACE_SECONDS),
        ("mine.Subclass", {"autospec": {}}, 0, GRACE_SECONDS),
        (SCHEDULER, {}, 4, 4),  # this deadline is what ends the draining of requests
        (None, {"autospec": {}}, 0, 0),
        ("mine.Scheduler", {}, 0, 0),
    ],
)
def test_only_a_steered_engine_core_gets_time(
    stopped: Any, scheduler: str | None, options: dict[str, Any], drains: int, allowed: float
) -> None:
    assert stopped(scheduler, options, drains) == allowed
