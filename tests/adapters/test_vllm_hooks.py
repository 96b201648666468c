"""The installed vLLM still is what AutoSpec hooks into; a different one is told apart clearly."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from autospec.adapters.vllm import versions
from autospec.adapters.vllm.graphs import candidate_ks, naming_table
from autospec.adapters.vllm.versions import (
    SCHEDULER_HOOKS,
    WORKER_HOOKS,
    Hook,
    check_version,
    is_tested,
    missing_hooks,
    require_hooks,
)
from autospec.errors import EngineError
from tests.adapters.vllm_engines import engine, prompts, random_decisions, samples, scheduler_of

pytestmark = pytest.mark.filterwarnings("ignore")


def test_every_hook_is_there() -> None:
    assert missing_hooks(SCHEDULER_HOOKS) == []
    assert missing_hooks(WORKER_HOOKS) == []
    assert is_tested(check_version())


@pytest.mark.parametrize(
    "hook, said",
    [
        (Hook("vllm.v1.core.sched.scheduler", "Scheduler.sched"), "Scheduler.sched .not there"),
        (Hook("vllm.v1.core.nowhere", "X"), "vllm.v1.core.nowhere"),
        (Hook("vllm.v1.core.sched.scheduler", "Scheduler.add_request", ("k",)), "no parameter k"),
        (
            Hook("vllm.v1.core.sched.scheduler", "Scheduler.schedule", (), "no such text"),
            "no longer uses no such text",
        ),
    ],
)
def test_a_missing_hook_is_named_with_the_versions_that_work(hook: Hook, said: str) -> None:
    with pytest.raises(EngineError, match=rf"{said}.*Versions that work: 0\.32"):
        require_hooks((hook,))


def test_an_untested_version_is_warned_about(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(versions, "installed_version", lambda: "0.99.0")
    with caplog.at_level(logging.WARNING, logger="autospec"):
        assert check_version() == "0.99.0"
    assert "tested with vLLM 0.32, not with 0.99.0" in caplog.text


def test_vllm_captures_the_ks_that_are_named() -> None:
    from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

    for most, requests in ((3, 8), (8, 64), (16, 256)):
        lookup = build_dynamic_sd_schedule_lookup(
            naming_table(candidate_ks(most), requests), requests, most
        )
        assert set(lookup[1:]) == set(candidate_ks(most))


def test_engine_info_says_what_a_step_is_padded_to(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.config import CompilationConfig, CUDAGraphMode

    from autospec.adapters.vllm.modes import engine_of

    compilation = CompilationConfig(
        cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE, cudagraph_capture_sizes=[1, 2, 4, 8, 6]
    )
    config = SimpleNamespace(
        model_config=SimpleNamespace(model="m", enforce_eager=False, dtype="torch.bfloat16"),
        device_config=SimpleNamespace(device_type="cuda"),
        parallel_config=SimpleNamespace(world_size=4),
        compilation_config=compilation,
    )
    monkeypatch.setattr("vllm.platforms.current_platform.get_device_name", lambda: "NVIDIA H100")
    info = engine_of(config, "0.32.0")
    assert (info.shape, info.captured_sizes) == ("stepped", (1, 2, 4, 6, 8))
    assert (info.device, info.dtype) == ("NVIDIA H100 x4", "bfloat16")
    config.model_config.enforce_eager = True
    assert engine_of(config, "0.32.0").shape == "packed"
    config.model_config.enforce_eager = False
    compilation.cudagraph_mode = CUDAGraphMode.NONE
    assert engine_of(config, "0.32.0").shape == "packed"


class FakeWorkers:
    """Answers scheduled steps as an engine would, with random acceptance."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)
        self.lengths: list[int] = []

    def run(self, output: Any, requests: Any) -> Any:
        from vllm.v1.outputs import ModelRunnerOutput

        request_ids = list(output.num_scheduled_tokens)
        sampled: list[list[int]] = []
        for request_id in request_ids:
            drafts = output.scheduled_spec_decode_tokens.get(request_id, [])
            self.lengths.append(len(drafts))
            kept = int(self.rng.integers(0, len(drafts) + 1))
            sampled.append([5] * (kept + 1))
        return ModelRunnerOutput(
            req_ids=request_ids,
            req_id_to_index={each: place for place, each in enumerate(request_ids)},
            sampled_token_ids=sampled,
        )


def test_asynchronous_scheduling_is_planned_one_step_ahead() -> None:
    """No CPU build runs it: the scheduler itself is real, the workers are not."""
    from vllm import SamplingParams
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.request import Request

    from autospec.adapters.vllm import AutoSpecAsyncScheduler, AutoSpecScheduler

    with engine("draft_model", enable_prefix_caching=False) as llm:
        real = scheduler_of(llm)
        config = real.vllm_config
        config.scheduler_config.async_scheduling = True
        scheduler = AutoSpecScheduler(
            config, real.kv_cache_config, real.structured_output_manager, real.block_size
        )
        assert isinstance(scheduler, AutoSpecAsyncScheduler)
        assert isinstance(scheduler, AsyncScheduler)
        random_decisions(scheduler.steering.pilot)
        for index, prompt in enumerate(prompts(5)):
            parameters = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
            parameters.update_from_generation_config({}, None)
            scheduler.add_request(Request(f"r{index}", prompt, parameters, None))
        workers = FakeWorkers()
        pending: list[Any] = []
        depths: list[int] = []
        done: dict[str, int] = {}
        for _ in range(300):
            runs = False
            if scheduler.has_requests():
                output = scheduler.schedule()
                runs = bool(output.num_scheduled_tokens)
                depths.append(output.num_spec_tokens_to_schedule)
                if runs:
                    pending.append(output)
            if not pending:
                break
            if len(pending) == 2 or not runs:
                output = pending.pop(0)
                for each in scheduler.update_from_output(
                    output, workers.run(output, scheduler.requests)
                ).values():
                    for part in each.outputs:
                        done[part.request_id] = done.get(part.request_id, 0) + len(
                            part.new_token_ids
                        )
        assert done == {f"r{index}": 30 for index in range(5)}
        assert {0, 1, 2, 3, 4} == set(workers.lengths)
        assert set(depths) > {0, 4}
        assert not samples(scheduler.steering, "autospec_fallbacks_total")
        verified = samples(scheduler.steering, "autospec_verified_tokens_total")
        assert sum(verified.values()) == sum(workers.lengths)
        scheduler.steering.close()
        config.scheduler_config.async_scheduling = False
