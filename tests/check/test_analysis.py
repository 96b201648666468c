"""The verdict on a made service, from its samples on."""

from __future__ import annotations

from dataclasses import replace

from autospec.check.analysis import Findings, find
from autospec.check.samples import Sample, summarize
from autospec.check.step_time import MeasuredTime, ReadingTime, measured_time
from autospec.replay.trace import TraceRequest
from tests.check.requests import copying, fresh

STEP = 0.034


def served(request: TraceRequest, sent: float) -> Sample:
    """Sixteen run at once, each getting a token every STEP."""
    count = len(request.output_token_ids)
    chunks = tuple(sent + 0.1 + STEP * number for number in range(count))
    return Sample(
        request.id,
        request.workload or "",
        sent,
        chunks[-1],
        chunks[0],
        chunks,
        len(request.prompt_token_ids),
        count,
        tuple(request.prompt_token_ids.tolist()),
        tuple(request.output_token_ids.tolist()),
    )


SAMPLES = [served(each, 0.0) for each in (*copying(4), *fresh(12))]
LADDER = MeasuredTime((1, 16), (0.03, STEP))
"""Running requests cost little: what is said of larger steps is that they go on like that."""


def found(time: MeasuredTime) -> Findings:
    level = summarize(SAMPLES, 1.0, 0.0005)
    return find(SAMPLES, [level], SAMPLES, time)


def test_a_full_service_is_off_above_where_more_tokens_take_long() -> None:
    measured = measured_time(SAMPLES, 0.0005)
    assert measured is not None
    assert measured.running == (16,)
    assert found(LADDER).verdict.kind == "candidate"
    slow = found(replace(LADDER, reading=ReadingTime((40, 400), (0.1, 1.2))))
    assert slow.verdict.kind == "off-above"
    assert slow.verdict.sentence.startswith("off above ")
    assert "at the cheaper of the two prices" in slow.verdict.reason
    assert slow.crossover is not None
    assert slow.crossover.off_from is not None
    assert slow.crossover.off_from < 16
    assert slow.step_time is not None
    assert "whichever is dearer" in slow.step_time.source


def test_where_weights_are_all_that_is_read_more_tokens_take_nothing() -> None:
    flat = found(replace(LADDER, reading=ReadingTime((40, 400), (0.1, 0.1))))
    assert flat.verdict.kind == "candidate"
    at = {each.running: each for each in flat.speedups}
    assert at[16].at_best is not None
    assert at[16].at_best > at[16].speedup
