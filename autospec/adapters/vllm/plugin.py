"""What vLLM loads into each of its processes: the entry point ``vllm.general_plugins``.

Without an AutoSpecScheduler the hooks do nothing: they act only on steps that carry an order.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

from autospec.adapters.vllm.exposition import serve_metrics
from autospec.adapters.vllm.orders import ORDER, REPORT
from autospec.adapters.vllm.versions import WORKER_HOOKS, missing_hooks

log = logging.getLogger("autospec")

_DESK = "autospec_desk"
_ORIGINAL = "autospec_original"


def register() -> None:
    """Called by vLLM in the API server, the engine core and every worker; may be called twice."""
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    serve_metrics()
    init_device = WorkerWrapperBase.init_device
    if hasattr(init_device, _ORIGINAL):
        return

    @functools.wraps(init_device)
    def hooked(self: Any, *args: Any, **kwargs: Any) -> Any:
        hook_runner()
        return init_device(self, *args, **kwargs)

    setattr(hooked, _ORIGINAL, init_device)
    WorkerWrapperBase.init_device = hooked


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
