"""Saying that something long is still at work."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeAlias

Progress: TypeAlias = Callable[[str], None]
"""Receives one line of text at a time."""

HEARTBEAT_SECONDS = 4.0


@contextlib.contextmanager
def heartbeat(
    message: str, progress: Progress, every_seconds: float = HEARTBEAT_SECONDS
) -> Iterator[None]:
    """Say ``message`` now and, until the block ends, every few seconds with the time spent."""
    progress(f"{message} …")
    began = time.monotonic()
    done = threading.Event()

    def beat() -> None:
        while not done.wait(every_seconds):
            progress(f"{message} … {time.monotonic() - began:.0f} s")

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
