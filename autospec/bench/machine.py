"""The machine and the versions of programs that a figure depends on."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from autospec import __version__


def machine() -> dict[str, Any]:
    """What a figure depends on: processor, cores in use, threads, memory, accelerator."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "torch_threads": torch.get_num_threads(),
        "memory_gib": round(
            os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30), 1
        ),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "system": platform.platform(terse=True),
    }


def versions() -> dict[str, str]:
    """Versions of what the figures depend on."""
    found = {"autospec": __version__, "python": platform.python_version()}
    for name in ("torch", "transformers", "numpy", "numba"):
        found[name] = metadata.version(name)
    return found


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
