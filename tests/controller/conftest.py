from __future__ import annotations

import logging
from collections.abc import Callable

import pytest


@pytest.fixture
def faults(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Messages of faults of AutoSpec's own, logged so far."""
    return lambda: [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR]
