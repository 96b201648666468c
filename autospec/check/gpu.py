"""Use and memory of local GPUs through NVML, where there are any."""

from __future__ import annotations

import contextlib
import ipaddress
from collections.abc import Iterator
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import numpy as np

try:
    import pynvml
except ModuleNotFoundError:
    pynvml = None


@dataclass(frozen=True, slots=True)
class Gpu:
    """One local GPU."""

    name: str
    memory_bytes: float


@dataclass(slots=True)
class GpuWatch:
    """Readings of the mean use of all local GPUs, from 0 to 1."""

    readings: list[float] = field(default_factory=list)

    def read(self) -> None:
        """Take one, if there is a GPU."""
        use = _use()
        if use is not None:
            self.readings.append(use)

    def take(self) -> float | None:
        """The mean since the last call."""
        taken, self.readings = self.readings, []
        return float(np.mean(taken)) if taken else None


def is_local(url: str) -> bool:
    """Whether the server is on this machine, as far as the address tells."""
    host = urlsplit(url).hostname or ""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def local_gpus() -> tuple[Gpu, ...]:
    """All of them; none without NVML."""
    with _nvml() as there:
        if not there:
            return ()
        handles = [
            pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())
        ]
        return tuple(
            Gpu(
                str(pynvml.nvmlDeviceGetName(handle)),
                float(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
            )
            for handle in handles
        )


def _use() -> float | None:
    with _nvml() as there:
        if not there or pynvml.nvmlDeviceGetCount() == 0:
            return None
        rates = [
            pynvml.nvmlDeviceGetUtilizationRates(pynvml.nvmlDeviceGetHandleByIndex(index)).gpu
            for index in range(pynvml.nvmlDeviceGetCount())
        ]
        return float(np.mean(rates)) / 100.0


@contextlib.contextmanager
def _nvml() -> Iterator[bool]:
    """Whether NVML answers; it does not without its package or a driver."""
    if pynvml is None:
        yield False
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield False
        return
    try:
        yield True
    finally:
        pynvml.nvmlShutdown()
