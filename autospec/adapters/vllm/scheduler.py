"""The scheduler classes for ``--scheduler-cls``."""

from __future__ import annotations

import atexit
import copy
import weakref
from collections.abc import Mapping
from typing import Any

from autospec.adapters.vllm.options import KEY
from autospec.adapters.vllm.steering import Steering
from autospec.adapters.vllm.versions import SCHEDULER_HOOKS, check_version, require_hooks

_VERSION = check_version()
require_hooks(SCHEDULER_HOOKS)

from vllm.v1.core.sched.async_scheduler import AsyncScheduler  # noqa: E402
from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402


class _Steered:
    """The calls around a vLLM scheduler's own; mixed in before it."""

    steering: Steering

    def _steer(self, vllm_config: Any) -> None:
        self.steering = Steering(self, vllm_config, _VERSION)
        # A table keeps vLLM from padding new requests with drafts that nobody planned.
        most = int(vllm_config.num_speculative_tokens)
        sizes = int(vllm_config.scheduler_config.max_num_seqs) + 1
        self.dynamic_sd_lookup = [most] * sizes
        atexit.register(_close, weakref.ref(self.steering))

    def steer_anew(self, options: Mapping[str, Any]) -> None:
        """Close AutoSpec's part and begin it with other ``options``; only while no request runs.

        Raises ConfigError and EngineError; AutoSpec's part then stays closed.
        """
        config = copy.copy(self.vllm_config)  # type: ignore[attr-defined]
        config.additional_config = {KEY: dict(options)}
        self.steering.close()
        self._steer(config)

    def add_request(self, request: Any) -> None:
        self.steering.safely("add_request", self.steering.added, request)
        super().add_request(request)  # type: ignore[misc]

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        steering = self.steering
        steering.safely("schedule", steering.before_schedule)
        output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        steering.safely("schedule", steering.after_schedule, output)
        return output

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        super()._update_after_schedule(scheduler_output)  # type: ignore[misc]
        if self.steering.plans_ahead:
            self.steering.safely("schedule", self.steering.plan_ahead, scheduler_output)

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        if self.steering.plans_ahead:
            self.steering.safely("drafts", self.steering.drafts_arrived, draft_token_ids)
        super().update_draft_token_ids(draft_token_ids)  # type: ignore[misc]

    def get_grammar_bitmask(self, scheduler_output: Any) -> Any:
        # vLLM calls this once the workers have the step: what is done here delays nobody.
        self.steering.safely("learn", self.steering.while_running)
        return super().get_grammar_bitmask(scheduler_output)  # type: ignore[misc]

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        outputs = super().update_from_output(  # type: ignore[misc]
            scheduler_output, model_runner_output
        )
        steering = self.steering
        steering.safely("update", steering.after_update, scheduler_output, model_runner_output)
        return outputs

    def _update_request_as_session(self, session: Any, update: Any) -> None:
        super()._update_request_as_session(session, update)  # type: ignore[misc]
        self.steering.safely("session", self.steering.rewritten, session)

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        self.steering.safely("finish", self.steering.freed, request)
        return super()._free_request(request, *args, **kwargs)  # type: ignore[misc]

    def shutdown(self) -> None:
        self.steering.close()
        super().shutdown()  # type: ignore[misc]


class AutoSpecAsyncScheduler(_Steered, AsyncScheduler):  # type: ignore[misc]
    """AutoSpec over vLLM's asynchronous scheduler: the configured drafter, planned a step ahead."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        self._steer(vllm_config)


class AutoSpecScheduler(_Steered, Scheduler):  # type: ignore[misc]
    """AutoSpec over vLLM's scheduler; becomes AutoSpecAsyncScheduler where vLLM schedules so."""

    def __new__(cls, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        if vllm_config.scheduler_config.async_scheduling:
            return AutoSpecAsyncScheduler(vllm_config, *args, **kwargs)
        return super().__new__(cls)

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        self._steer(vllm_config)


def _close(steering: weakref.ref[Steering]) -> None:
    """Save at exit what an engine that was never shut down has learned."""
    alive = steering()
    if alive is not None:
        alive.close()
