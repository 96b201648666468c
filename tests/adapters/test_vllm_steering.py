"""Steering a scheduler that only looks like vLLM's: what is ordered, counted and reported."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from autospec.adapters.vllm.modes import Mode
from autospec.adapters.vllm.orders import ORDER, REPORT, DraftOrder, DraftReport
from autospec.adapters.vllm.steering import Steering
from autospec.policy.base import Decision, View

K = 3


class FakeRequest:
    """As much of vLLM's Request as is read."""

    def __init__(self, name: str, prompt: list[int]) -> None:
        self.request_id = name
        self.prompt_token_ids = prompt
        self.num_prompt_tokens = len(prompt)
        self.all_token_ids = list(prompt)
        self.sampling_params = SimpleNamespace(extra_args=None, temperature=0.0)
        self.max_tokens = 100
        self.num_computed_tokens = 0
        self.spec_token_ids: list[int] = []
        self.use_structured_output = False
        self.is_prefill_chunk = False
        self.status = SimpleNamespace(name="RUNNING")

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        return self.all_token_ids[len(self.prompt_token_ids) :]

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_token_ids)


class FakeEngine:
    """Runs steps around a Steering; every draft is accepted."""

    def __init__(self, method: str, reports: DraftReport | None) -> None:
        self.requests: dict[str, FakeRequest] = {}
        self.running: list[FakeRequest] = []
        self.structured_output_manager = None
        self.reports = reports
        config = SimpleNamespace(
            additional_config={"autospec": {"lookups": []}},
            speculative_config=SimpleNamespace(
                method=method, parallel_drafting=False, num_speculative_tokens_per_batch_size=None
            ),
            num_speculative_tokens=K,
            scheduler_config=SimpleNamespace(async_scheduling=False, max_num_seqs=8),
            parallel_config=SimpleNamespace(
                data_parallel_size=1,
                world_size=1,
                pipeline_parallel_size=1,
                decode_context_parallel_size=1,
                prefill_context_parallel_size=1,
            ),
            model_config=SimpleNamespace(
                is_multimodal_model=False,
                uses_mrope=False,
                max_model_len=256,
                model="m",
                enforce_eager=True,
                dtype="float32",
            ),
            compilation_config=SimpleNamespace(cudagraph_capture_sizes=[], cudagraph_mode=None),
            device_config=SimpleNamespace(device_type="cpu"),
            use_v2_model_runner=False,
        )
        self.steering = Steering(self, config, "0")
        self.k = K
        self.most_scheduled = K
        self.ends = False
        self.learns = True
        policy = self.steering.pilot.controller.policy
        policy.decide = self.decide  # type: ignore[method-assign]
        policy.program = lambda *_: None  # type: ignore[method-assign]
        self.steering.pilot.controller._rails.probes = None

    def get_request_counts(self) -> tuple[int, int]:
        return len(self.running), 0

    def decide(self, view: View) -> Decision:
        proposer = np.full(view.requests, self.steering.pilot.model, dtype=np.int16)
        return Decision(proposer, np.full(view.requests, self.k, dtype=np.int16))

    def add(self, name: str, tokens: int) -> None:
        request = FakeRequest(name, list(range(1, tokens + 1)))
        self.requests[name] = request
        self.running.append(request)
        self.steering.added(request)

    def step(self) -> DraftOrder | None:
        """One step of all running requests; returns what the workers were told."""
        steering = self.steering
        steering.safely("schedule", steering.before_schedule)
        counts: dict[str, int] = {}
        drafts: dict[str, list[int]] = {}
        for request in self.running:
            drafted = request.spec_token_ids[: self.most_scheduled]
            if drafted:
                drafts[request.request_id] = drafted
            counts[request.request_id] = (
                request.num_tokens - request.num_computed_tokens + len(drafted)
            )
            request.spec_token_ids = []
        output: Any = SimpleNamespace(
            num_scheduled_tokens=counts,
            scheduled_spec_decode_tokens=drafts,
            total_num_scheduled_tokens=sum(counts.values()),
            preempted_req_ids=set(),
            scheduled_new_reqs=[each for each in self.running if each.num_computed_tokens == 0],
            scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=set()),
        )
        steering.safely("schedule", steering.after_schedule, output)
        if self.learns:
            steering.safely("learn", steering.while_running)
        sampled: list[list[int]] = []
        for request in self.running:
            tokens = [*drafts.get(request.request_id, ()), 7]
            sampled.append(tokens)
            request.all_token_ids += tokens
            request.num_computed_tokens = request.num_tokens - 1
        result = SimpleNamespace(
            sampled_token_ids=sampled,
            req_id_to_index={each.request_id: row for row, each in enumerate(self.running)},
        )
        if self.reports is not None:
            setattr(result, REPORT, self.reports)
        if self.ends:
            self.running = []
        steering.safely("update", steering.after_update, output, result)
        return getattr(output, ORDER, None)


def faults(engine: FakeEngine) -> dict[str, int]:
    return engine.steering.pilot.metrics._fallbacks


def total(engine: FakeEngine, name: str) -> float:
    families = engine.steering.registry.collect()
    return sum(each.value for family in families for each in family.samples if each.name == name)


def test_a_prompt_is_caught_up_once_and_drafts_follow() -> None:
    engine = FakeEngine("eagle", DraftReport(0.0, 0))
    engine.add("a", 20)
    assert engine.step() == DraftOrder()  # the prefill
    assert engine.step() == DraftOrder({"a": K})
    engine.add("b", 30)
    assert engine.step() == DraftOrder({"a": K})  # b prefills
    engine.k = 0
    assert engine.step() == DraftOrder(catch_up=("b",))
    assert engine.step() == DraftOrder()
    engine.k = 2
    assert engine.step() == DraftOrder({"a": 2, "b": 2})
    assert not faults(engine)


def test_tokens_that_the_drafter_missed_are_counted() -> None:
    engine = FakeEngine("eagle", DraftReport(0.0, 0))
    engine.add("a", 20)
    engine.step()
    engine.step()
    tracked = engine.steering.pilot.requests.get("a")
    assert tracked is not None
    assert (tracked.behind, tracked.last) == (K + 1, K + 1)
    engine.k = 0
    for _ in range(5):
        engine.step()
    assert tracked.behind == K + 1 + 5
    assert tracked.prompt_behind == 0


def test_only_what_vllm_scheduled_is_drafted_and_verified() -> None:
    engine = FakeEngine("eagle", DraftReport(0.0, 0))
    engine.add("a", 20)
    engine.step()
    assert engine.step() == DraftOrder({"a": K})
    engine.most_scheduled = 1
    engine.ends = True
    assert engine.step() == DraftOrder({"a": 1})
    assert total(engine, "autospec_drafted_tokens_total") == K + 1
    assert total(engine, "autospec_verified_tokens_total") == K + 1


def test_a_step_is_learned_from_while_the_next_one_runs() -> None:
    engine = FakeEngine("medusa", DraftReport(0.0, 0))
    drafted = "autospec_drafted_tokens_total"
    engine.add("a", 20)
    engine.step()
    for number in range(3):
        engine.step()
        assert total(engine, drafted) == K * number
    engine.steering.close()
    assert total(engine, drafted) == K * 3


def test_the_last_step_for_now_is_learned_from_at_once() -> None:
    engine = FakeEngine("medusa", DraftReport(0.0, 0))
    engine.add("a", 20)
    engine.step()
    engine.ends = True
    engine.step()
    assert total(engine, "autospec_drafted_tokens_total") == K


def test_a_step_is_learned_from_late_where_vllm_never_calls_in_between() -> None:
    engine = FakeEngine("medusa", DraftReport(0.0, 0))
    engine.add("a", 20)
    engine.learns = False
    for _ in range(4):
        engine.step()
    assert total(engine, "autospec_drafted_tokens_total") == K * 2


def test_medusa_keeps_nothing_to_catch_up() -> None:
    engine = FakeEngine("medusa", DraftReport(0.0, 0))
    engine.add("a", 20)
    assert [engine.step() for _ in range(3)] == [DraftOrder(), *[DraftOrder({"a": K})] * 2]


def test_without_the_plugin_the_drafter_stays_off(caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine("eagle", None)
    engine.add("a", 20)
    orders = [engine.step() for _ in range(6)]
    assert not any(order.draft for order in orders if order is not None)
    assert engine.requests["a"].num_output_tokens == 6
    assert caplog.text.count("did not load AutoSpec's plugin") == 1


def test_a_drafter_that_cannot_wait_is_planned_ahead(caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine("eagle", DraftReport(0.0, 0, supports=False))
    engine.add("a", 20)
    with caplog.at_level(logging.WARNING, logger="autospec"):
        engine.step()
    assert engine.steering.drafting.mode is Mode.AHEAD
    assert engine.step() is None
    assert "cannot wait for orders" in caplog.text


def test_a_failing_drafter_is_counted_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine("eagle", DraftReport(0.0, 1))
    engine.add("a", 20)
    for _ in range(4):
        engine.step()
    assert faults(engine) == {"vllm drafting": 4}
    assert caplog.text.count("drafter failed") == 1


def test_a_broken_plan_leaves_the_step_to_vllm() -> None:
    engine = FakeEngine("eagle", DraftReport(0.0, 0))
    engine.add("a", 20)
    engine.step()

    def fail(*_: Any) -> Any:
        raise RuntimeError("injected")

    engine.steering.pilot.plan = fail  # type: ignore[assignment, method-assign]
    assert engine.step() is None
    assert faults(engine) == {"vllm schedule": 1}
    engine.steering.close()
    engine.steering.close()
