"""Time for the engine core to save what it has learned when the server is stopped."""

from __future__ import annotations

import functools
import inspect
import logging
from typing import Any

log = logging.getLogger("autospec")

GRACE_SECONDS = 15.0
"""Most that a stop may take; it ends as soon as the engine core has ended."""

_ORIGINAL = "autospec_original"
_SAVES = "autospec_saves"


def grant_grace() -> None:
    """Let the engine core end by itself when vLLM's ``shutdown_timeout`` is 0, its default.

    vLLM then kills it right after SIGTERM, before the scheduler is told. Requests are still aborted
    at once. Only for engines whose scheduler is AutoSpec's; called in the API server's process.
    """
    try:
        from vllm.v1.engine.utils import CoreEngineProcManager as Manager

        start, shutdown = Manager.__init__, Manager.shutdown
    except (ImportError, AttributeError) as error:
        log.warning("profiles are saved at intervals only, not when the server stops: %s", error)
        return
    if hasattr(shutdown, _ORIGINAL):
        return
    parameters = inspect.signature(start)

    @functools.wraps(start)
    def noting_start(self: Any, *args: Any, **kwargs: Any) -> None:
        given = parameters.bind(self, *args, **kwargs).arguments
        setattr(self, _SAVES, _is_steered(given.get("vllm_config")))
        start(self, *args, **kwargs)

    @functools.wraps(shutdown)
    def patient_shutdown(self: Any, timeout: float | None = None) -> None:
        drains = getattr(self, "_request_shutdown_timeout", 0)
        if timeout == 0 and not drains and getattr(self, _SAVES, False):
            timeout = GRACE_SECONDS
        shutdown(self, timeout)

    setattr(patient_shutdown, _ORIGINAL, shutdown)
    Manager.__init__ = noting_start
    Manager.shutdown = patient_shutdown


def _is_steered(vllm_config: Any) -> bool:
    """Whether AutoSpec's scheduler, or a subclass that was given its options, is configured."""
    from autospec.adapters.vllm.options import KEY  # brings numba along: not into every process

    scheduler = getattr(getattr(vllm_config, "scheduler_config", None), "scheduler_cls", None)
    options = getattr(vllm_config, "additional_config", None)
    is_given = isinstance(options, dict) and KEY in options
    return scheduler is not None and (is_given or "AutoSpec" in str(scheduler))
