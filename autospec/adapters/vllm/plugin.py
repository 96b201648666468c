"""What vLLM loads into each of its processes: the entry point ``vllm.general_plugins``.

Without an AutoSpecScheduler the hooks do nothing: they act only on steps that carry an order.
"""

from __future__ import annotations

import functools
import logging
import sys
from typing import Any

from prometheus_client import REGISTRY

from autospec.adapters.vllm.exposition import add_to, serve_metrics
from autospec.adapters.vllm.grace import grant_grace
from autospec.adapters.vllm.orders import ORDER, REPORT
from autospec.adapters.vllm.versions import WORKER_HOOKS, missing_hooks

log = logging.getLogger("autospec")

_DESK = "autospec_desk"
_ORIGINAL = "autospec_original"


def register() -> None:
    """Called by vLLM in the API server, the engine core and every worker; may be called twice.

    vLLM does not guard its plugins: what fails here would take down every vLLM beside which
    AutoSpec is installed, in use or not.
    """
    try:
        _register()
    except Exception:
        log.exception("AutoSpec's plugin stays off; vLLM goes on without it")


def _register() -> None:
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    serve_metrics()
    shield_llvmlite()
    _join_registries()
    grant_grace()
    init_device, init_worker = WorkerWrapperBase.init_device, WorkerWrapperBase.init_worker
    if hasattr(init_device, _ORIGINAL):
        return

    @functools.wraps(init_device)
    def hooked(self: Any, *args: Any, **kwargs: Any) -> Any:
        hook_runner()
        return init_device(self, *args, **kwargs)

    @functools.wraps(init_worker)
    def shielded(self: Any, *args: Any, **kwargs: Any) -> Any:
        shield_llvmlite()
        return init_worker(self, *args, **kwargs)

    setattr(hooked, _ORIGINAL, init_device)
    setattr(shielded, _ORIGINAL, init_worker)
    WorkerWrapperBase.init_device = hooked
    WorkerWrapperBase.init_worker = shielded


def _join_registries() -> None:
    """With several API servers vLLM makes a registry of its own for each /metrics."""
    from vllm.v1.metrics import prometheus

    make = prometheus.get_prometheus_registry
    if hasattr(make, _ORIGINAL):
        return

    @functools.wraps(make)
    def joined() -> Any:
        registry = make()
        if registry is not REGISTRY:
            add_to(registry)
        return registry

    setattr(joined, _ORIGINAL, make)
    prometheus.get_prometheus_registry = joined
    importer = sys.modules.get("vllm.entrypoints.serve.instrumentator.metrics")
    if importer is not None:
        setattr(importer, make.__name__, joined)


def shield_llvmlite() -> None:
    """Let vLLM's CPU workers start in a process that has imported numba, as AutoSpec does.

    vLLM looks at ``__dict__`` of every attribute of every loaded module; llvmlite's library object
    invents any attribute that it is asked for, and that one is no dict.
    """
    ffi = sys.modules.get("llvmlite.binding.ffi")
    if ffi is None or hasattr(type(ffi.lib).__getattr__, _ORIGINAL):
        return
    find = type(ffi.lib).__getattr__

    @functools.wraps(find)
    def honest(self: Any, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return find(self, name)

    setattr(honest, _ORIGINAL, find)
    type(ffi.lib).__getattr__ = honest


def hook_runner() -> bool:
    """Hook model runner V1, once; False (and an error in the log) if it is not what was tested."""
    missing = missing_hooks(WORKER_HOOKS)
    if missing:
        log.error(
            "the configured drafter stays off: this vLLM lacks what AutoSpec hooks into: %s",
            "; ".join(missing),
        )
        return False
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from autospec.adapters.vllm.drafting import DraftDesk

    execute_model = GPUModelRunner.execute_model
    sample_tokens = GPUModelRunner.sample_tokens
    propose = GPUModelRunner.propose_draft_token_ids
    if hasattr(execute_model, _ORIGINAL):
        return True

    def desk_of(runner: Any) -> DraftDesk:
        desk: DraftDesk | None = getattr(runner, _DESK, None)
        if desk is None:
            desk = DraftDesk(runner, propose)
            setattr(runner, _DESK, desk)
        return desk

    @functools.wraps(execute_model)
    def ordered_execute(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        order = getattr(scheduler_output, ORDER, None)
        if order is not None and hasattr(self, "drafter"):
            desk_of(self).draft(order, scheduler_output)
        return execute_model(self, scheduler_output, *args, **kwargs)

    @functools.wraps(sample_tokens)
    def reporting_sample(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = sample_tokens(self, *args, **kwargs)
        if getattr(result, "req_ids", None) and hasattr(self, _DESK):
            setattr(result, REPORT, desk_of(self).report())
        return result

    @functools.wraps(propose)
    def deferring_propose(self: Any, scheduler_output: Any, *args: Any) -> Any:
        if getattr(scheduler_output, ORDER, None) is not None:
            return desk_of(self).defer(scheduler_output, *args)
        if hasattr(self, _DESK):
            desk_of(self).drop()
        return propose(self, scheduler_output, *args)

    for hooked, original in (
        (ordered_execute, execute_model),
        (reporting_sample, sample_tokens),
        (deferring_propose, propose),
    ):
        setattr(hooked, _ORIGINAL, original)
    GPUModelRunner.execute_model = ordered_execute
    GPUModelRunner.sample_tokens = reporting_sample
    GPUModelRunner.propose_draft_token_ids = deferring_propose
    return True
