from __future__ import annotations

import pytest

from autospec.check.server_metrics import Reading, metrics_urls, server_facts

VLLM = """
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="m"}} {running}
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{{engine="0",model_name="m"}} 2.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{{engine="0",model_name="m"}} 0.5
# TYPE vllm:spec_decode_num_drafts counter
vllm:spec_decode_num_drafts_total{{engine="0"}} {steps}
# TYPE vllm:spec_decode_num_draft_tokens counter
vllm:spec_decode_num_draft_tokens_total{{engine="0"}} {drafted}
# TYPE vllm:spec_decode_num_accepted_tokens counter
vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {accepted}
# TYPE vllm:request_queue_time_seconds histogram
vllm:request_queue_time_seconds_bucket{{le="+Inf"}} {steps}
vllm:request_queue_time_seconds_sum {queue}
vllm:request_queue_time_seconds_count {steps}
"""


def vllm(**values: float) -> Reading:
    reading = Reading.parse(VLLM.format(**values))
    assert reading is not None
    return reading


def test_vllm_by_its_names() -> None:
    facts = server_facts(
        [
            vllm(running=1.0, steps=10, drafted=40, accepted=5, queue=1.0),
            vllm(running=4.0, steps=30, drafted=120, accepted=45, queue=3.0),
        ]
    )
    assert facts is not None
    assert (facts.engine, facts.running, facts.waiting) == ("vllm", 2.5, 2.0)
    assert facts.cache_usage == 0.5
    assert facts.accepted_per_draft_token == pytest.approx(0.5)
    assert facts.tokens_per_step == pytest.approx(3.0)
    assert facts.queue_seconds == pytest.approx(0.1)


def test_a_server_that_does_not_speculate() -> None:
    same = vllm(running=1.0, steps=0, drafted=0, accepted=0, queue=0.0)
    facts = server_facts([same, same])
    assert facts is not None
    assert facts.accepted_per_draft_token is None
    assert facts.tokens_per_step is None
    assert facts.queue_seconds is None


@pytest.mark.parametrize(
    "text,engine,cache,per_step",
    [
        (
            "sglang:num_running_reqs 3.0\nsglang:num_queue_reqs 1.0\nsglang:token_usage 0.28\n"
            "sglang:spec_accept_length 1.8\n",
            "sglang", 0.28, 1.8,
        ),
        (
            "trtllm_num_requests_running 3.0\ntrtllm_num_requests_waiting 1.0\n"
            "trtllm_kv_cache_utilization 0.62\ntrtllm_spec_decode_acceptance_length 0\n",
            "tensorrt-llm", 0.62, None,
        ),
        (
            "autospec_engine_running_requests 3.0\nautospec_engine_waiting_requests 1.0\n"
            "autospec_engine_cache_usage_ratio 0.25\n",
            "autospec", 0.25, None,
        ),
    ],
)  # fmt: skip
def test_other_engines(text: str, engine: str, cache: float, per_step: float | None) -> None:
    reading = Reading.parse(text)
    assert reading is not None
    facts = server_facts([reading])
    assert facts is not None
    assert (facts.engine, facts.running, facts.waiting) == (engine, 3.0, 1.0)
    assert facts.cache_usage == cache
    assert facts.tokens_per_step == per_step


def test_what_is_no_engine_s() -> None:
    assert Reading.parse("<html>hello</html>") is None
    other = Reading.parse("node_load1 0.5\n")
    assert other is not None
    assert server_facts([other]) is None
    assert server_facts([]) is None


def test_where_metrics_are_looked_for() -> None:
    assert metrics_urls("http://h:8000/v1") == (
        "http://h:8000/metrics", "http://h:8000/prometheus/metrics",
    )  # fmt: skip
