from __future__ import annotations

import pytest

from autospec.check.samples import (
    Sample,
    mean_running,
    prefill_seconds_per_token,
    summarize,
    time_shares,
)


def sample(sent: float, first: float | None, end: float, **more: object) -> Sample:
    values: dict[str, object] = {"prompt_tokens": 100, "output_tokens": 11} | more
    return Sample("x", "w", sent, end, first, **values)  # type: ignore[arg-type]


def test_times_of_one_request() -> None:
    one = sample(1.0, 1.5, 2.5, chunks=(1.5, 1.8, 2.5))
    assert one.ttft == 0.5
    assert one.tpot == pytest.approx(0.1)
    assert one.gaps == pytest.approx((0.3, 0.7))
    assert sample(1.0, None, 2.0).ttft is None
    assert sample(1.0, 2.0, 2.0, output_tokens=1).tpot is None


def test_running_requests_are_averaged_over_the_busy_time() -> None:
    assert mean_running([sample(0.0, 1.0, 3.0), sample(0.0, 2.0, 3.0)]) == pytest.approx(1.5)
    apart = [sample(0.0, 1.0, 2.0), sample(100.0, 101.0, 102.0)]
    assert mean_running(apart) == pytest.approx(1.0)
    assert mean_running([sample(0.0, None, 2.0)]) == pytest.approx(1.0)


def test_the_queue_is_what_an_idle_service_would_not_take() -> None:
    alone = sample(0.0, 1.0, 2.0)
    queued = sample(1.5, 6.5, 7.5)
    per_token = prefill_seconds_per_token([alone, queued])
    assert per_token == pytest.approx(0.01)
    shares = time_shares([queued], per_token)
    assert shares is not None
    assert shares.queue == pytest.approx(4.0 / 6.0)
    assert shares.prefill == pytest.approx(1.0 / 6.0)
    assert shares.before_first_token == pytest.approx(5.0 / 6.0)
    assert shares.prefill_without_queue == pytest.approx(0.5)


def test_prompts_that_others_read_meanwhile_are_not_decoding() -> None:
    decoding = sample(0.0, 1.0, 5.0)
    other = sample(1.0, 4.0, 4.0, prompt_tokens=300, output_tokens=1)
    shares = time_shares([decoding, other], 0.01)
    assert shares is not None
    # Of the four seconds after the first token three went by with the other's prompt.
    assert shares.prefill == pytest.approx((1.0 + 3.0 + 3.0) / 8.0)
    assert shares.decode == pytest.approx(1.0 / 8.0)
    waiting = sample(1.0, 4.0, 4.0, prompt_tokens=150, output_tokens=1)
    shares = time_shares([decoding, waiting], 0.01)
    assert shares is not None
    assert shares.queue == pytest.approx(1.5 / 8.0)
    assert shares.decode == pytest.approx(2.5 / 8.0)


def test_only_who_found_the_service_idle_tells_how_long_a_prompt_takes() -> None:
    burst = [sample(0.1 * n, 1.0 + 0.3 * n, 9.0) for n in range(8)]
    later = [sample(10.0, 12.0, 13.0), sample(14.0, 15.8, 17.0)]
    assert prefill_seconds_per_token(burst) == pytest.approx(0.01)
    assert prefill_seconds_per_token([*later, *burst]) == pytest.approx(0.018)
    assert prefill_seconds_per_token([sample(0.0, None, 1.0)]) is None


def test_a_level_counts_failures_apart() -> None:
    failed = Sample("f", "w", 0.0, 1.0, error="timed out")
    done = [sample(0.0, 0.5, 1.5, chunks=(0.5, 1.5)), sample(2.0, 2.5, 4.0, chunks=(2.5, 4.0))]
    level = summarize([*done, failed], 0.5, 0.005)
    assert (level.requests, level.failed) == (2, 1)
    assert level.seconds == 4.0
    assert level.tokens_per_second == pytest.approx(5.5)
    assert level.ttft is not None
    assert level.ttft.p50 == 0.5
    assert level.inter_token is not None
    assert level.inter_token.p50 == pytest.approx(1.25)
    assert level.shares is not None
    assert level.shares.decode == pytest.approx(2.5 / 3.5)


def test_without_first_tokens_there_are_no_shares() -> None:
    level = summarize([sample(0.0, None, 1.0)], 1.0, None)
    assert level.ttft is None
    assert level.shares is None
