"""AutoSpec's metrics on vLLM's own ``/metrics``.

The scheduler lives in the engine core's process, ``/metrics`` in the API server's. The plugin that
vLLM loads into both makes a folder and names it in the environment that the engine core inherits;
the scheduler keeps a file of samples in it up to date, and a collector in the API server's registry
reads it when it is scraped.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

log = logging.getLogger("autospec")

FOLDER_VARIABLE = "AUTOSPEC_VLLM_METRICS"
_SUFFIX = ".prom"
_INTERVAL_SECONDS = 0.5


class Exposition:
    """Writes a registry's samples for the API server, from a thread, until ``close``."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._path: Path | None = None
        self._ended = threading.Event()
        self._written = b""
        folder = os.environ.get(FOLDER_VARIABLE)
        if folder is None:
            return
        self._path = Path(folder) / f"{os.getpid()}-{id(self)}{_SUFFIX}"
        self._thread = threading.Thread(target=self._run, name="autospec-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Write once more and stop. The samples stay readable while the API server lives."""
        if self._path is not None and not self._ended.is_set():
            self._ended.set()
            self._thread.join()
            self._write()

    def _run(self) -> None:
        while True:
            self._write()
            if self._ended.wait(_INTERVAL_SECONDS):
                return

    def _write(self) -> None:
        assert self._path is not None
        try:
            samples = generate_latest(self._registry)
            if samples != self._written:
                fresh = self._path.with_suffix(".tmp")
                fresh.write_bytes(samples)
                fresh.replace(self._path)
                self._written = samples
        except Exception as error:  # a full disk must not end the engine
            if not self._ended.is_set():
                log.warning("metrics cannot be written to %s: %s", self._path, error)
            self._ended.set()


class ExpositionCollector(Collector):
    """Reads what Expositions of this server's engine core wrote."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def describe(self) -> Iterator[Metric]:
        """Nothing is known before the engine core runs."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """The engine core's families; an engine that is gone leaves its last ones."""
        newest = max(
            self._folder.glob(f"*{_SUFFIX}"), key=lambda path: path.stat().st_mtime, default=None
        )
        if newest is None:
            return
        for family in text_string_to_metric_families(newest.read_text(encoding="utf-8")):
            if family.name.startswith("autospec_"):
                yield family


def serve_metrics() -> None:
    """Show the engine core's samples in this process's registry.

    A server's first process makes the folder; its children find it in the environment. A server
    that is started from another one's process makes its own.
    """
    if _KEPT:
        return
    if FOLDER_VARIABLE in os.environ and multiprocessing.parent_process() is not None:
        _KEPT.append(None)
    else:
        folder = tempfile.TemporaryDirectory(prefix="autospec-vllm-")
        os.environ[FOLDER_VARIABLE] = folder.name
        _KEPT.append(folder)
    add_to(REGISTRY)


def add_to(registry: CollectorRegistry) -> None:
    """Show the engine core's samples in a registry too."""
    registry.register(ExpositionCollector(Path(os.environ[FOLDER_VARIABLE])))


_KEPT: list[tempfile.TemporaryDirectory[str] | None] = []  # removed when the first process ends
