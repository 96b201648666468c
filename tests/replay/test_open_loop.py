"""Runs in which requests arrive by the clock, computed by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from autospec.config import Settings
from autospec.policy.off import OffOptions
from autospec.replay.engine import ReplayEngine
from autospec.replay.latency import Finished, Percentiles, summarize_latency
from autospec.replay.run import make_engine, replay_open, run_open
from autospec.replay.trace import TraceRequest
from tests.replay.made_runs import (
    LOOKUPS_AND_MODEL,
    Watch,
    cost_file,
    random_requests,
    request,
    step_seconds,
)


def open_run(
    requests: Sequence[TraceRequest], arrivals: Sequence[float], slots: int, prefill: int
) -> tuple[ReplayEngine, Watch, Any]:
    engine = make_engine(requests, cost_file(), slots, prefill_tokens=prefill)
    watch = Watch(OffOptions(), engine)
    result = run_open(engine, watch, requests, arrivals, slots, rate=1.0, tpot_target_seconds=1.51)
    return engine, watch, result


def test_open_loop_by_hand() -> None:
    one = request("one", [1, 2, 3], [4, 5], [0, 0])
    engine, watch, result = open_run([one], [10.0], 1, 2)
    # two prompt tokens, then the last one with the first output token, then one decoding step
    chunks = [step_seconds(2, 0), step_seconds(1, 2)]
    decode = step_seconds(1, 4)
    done = engine.finished[0]
    assert done.arrival == 10.0
    assert done.first_token == pytest.approx(10.0 + sum(chunks))
    assert done.end == pytest.approx(10.0 + sum(chunks) + decode)
    assert result.seconds == pytest.approx(done.end)
    assert result.latency.ttft.p50 == pytest.approx(sum(chunks))
    assert result.latency.tpot.p99 == pytest.approx(decode)
    assert result.latency.end_to_end.p95 == pytest.approx(sum(chunks) + decode)
    assert result.latency.target_share == 0.0  # 1.514 s for the one token after the first
    assert (result.tokens, len(watch.batches)) == (2, 1)
    assert watch.requests[0].tpot_target_seconds == 1.51


def test_prompts_are_read_beside_decoding() -> None:
    early = request("early", [1], [2, 3, 4, 5], [0] * 4)
    late = request("late", [1, 2, 3], [4], [0])
    engine, watch, _ = open_run([early, late], [0.0, 0.1], 2, 2)
    # step 1 reads early's prompt; late comes meanwhile, reads 2 tokens, then 1 and ends at once
    assert [batch.prefill_tokens for batch in watch.batches] == [2, 1, 0]
    assert [r.prefill_tokens for r in watch.results] == [2, 1, 0]
    assert [r.step_seconds for r in watch.results] == pytest.approx(
        [step_seconds(1 + 2, 2 + 0), step_seconds(1 + 1, 3 + 2), step_seconds(1, 4)]
    )
    assert [done.id for done in engine.finished] == ["late", "early"]
    assert engine.finished[0].first_token == engine.finished[0].end
    assert engine.finished[0].tpot is None


def test_requests_queue_for_a_slot_and_nothing_idles() -> None:
    requests = [request(str(i), [1], [2, 3], [0, 0]) for i in range(3)]
    engine, watch, result = open_run(requests, [0.0, 0.0, 100.0], 1, 8)
    assert [batch.waiting_requests for batch in watch.batches] == [1, 0, 0]
    each = step_seconds(1, 0) + step_seconds(1, 2)
    assert [done.end for done in engine.finished] == pytest.approx([each, 2 * each, 100.0 + each])
    assert result.latency.end_to_end.p50 == pytest.approx(each)


def test_the_controller_serves_the_open_loop() -> None:
    requests = random_requests(6)
    result, controller = replay_open(
        requests,
        [float(i) for i in range(6)],
        1.0,
        cost_file(**LOOKUPS_AND_MODEL),
        Settings(version=1),
        max_running=2,
        tpot_target_seconds=0.5,
    )
    assert result.tokens == 6 * 40
    assert result.rate == 1.0
    assert controller.cost.is_known


def test_latency_summary() -> None:
    found = summarize_latency(
        [Finished("a", 3, 0.0, 1.0, 3.0), Finished("b", 1, 0.0, 2.0, 2.0)], 0.9
    )
    assert found.ttft == Percentiles(1.5, 1.95, 1.99)
    assert found.tpot == Percentiles(1.0, 1.0, 1.0)
    assert found.target_share == 0.5  # one token has no pace to miss
    assert summarize_latency([]).tpot == Percentiles(0.0, 0.0, 0.0)
