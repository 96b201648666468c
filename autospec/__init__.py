"""AutoSpec: adaptive speculative decoding. Names load on first use, so importing this is cheap."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from autospec.config import Settings, load_settings
    from autospec.controller import Controller
    from autospec.errors import AutoSpecError
    from autospec.journal.writer import Journal
    from autospec.metrics import Metrics, MetricsServer
    from autospec.profile.file import load_profile
    from autospec.profile.learned import Identity, Profile
    from autospec.records import (
        NO_PROPOSER,
        BatchState,
        EngineInfo,
        Plan,
        ProposerInfo,
        Request,
        StepResult,
    )

__all__ = [
    "NO_PROPOSER",
    "AutoSpecError",
    "BatchState",
    "Controller",
    "EngineInfo",
    "Identity",
    "Journal",
    "Metrics",
    "MetricsServer",
    "Plan",
    "Profile",
    "ProposerInfo",
    "Request",
    "Settings",
    "StepResult",
    "__version__",
    "load_profile",
    "load_settings",
]

_MODULES = {
    "autospec.config": ("Settings", "load_settings"),
    "autospec.controller": ("Controller",),
    "autospec.errors": ("AutoSpecError",),
    "autospec.journal.writer": ("Journal",),
    "autospec.metrics": ("Metrics", "MetricsServer"),
    "autospec.profile.learned": ("Identity", "Profile"),
    "autospec.profile.file": ("load_profile",),
    "autospec.records": (
        "NO_PROPOSER",
        "BatchState",
        "EngineInfo",
        "Plan",
        "ProposerInfo",
        "Request",
        "StepResult",
    ),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}


if not TYPE_CHECKING:  # a type checker would take any name for known

    def __getattr__(name: str) -> object:
        if name not in _HOME:
            raise AttributeError(f"module 'autospec' has no attribute {name!r}")
        value = getattr(import_module(_HOME[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
