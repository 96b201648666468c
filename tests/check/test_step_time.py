from __future__ import annotations

import numpy as np
import pytest

from autospec.check.devices import DEVICES, device_of
from autospec.check.samples import Sample
from autospec.check.step_time import (
    FileTime,
    MeasuredTime,
    ReadingTime,
    RooflineTime,
    measured_time,
    profile_time,
    reading_time,
)
from autospec.config import load_settings
from autospec.controller import Controller
from autospec.cost.step_cost import StepLoad
from autospec.errors import InputError
from autospec.profile.learned import Profile
from autospec.records import EngineInfo, ProposerInfo
from autospec.replay.cost_file import CostFile, StepSeconds


def served(number: int, first: float, step: float, tokens: int) -> Sample:
    chunks = tuple(first + step * index for index in range(tokens))
    return Sample(str(number), "w", first - 0.1, chunks[-1], first, chunks, 100, tokens)


def test_steps_are_told_by_the_requests_that_run() -> None:
    alone = [served(0, 1.0, 0.03, 20)]
    four = [served(number, 11.0, 0.05, 20) for number in range(4)]
    time = measured_time([*alone, *four], prefill_seconds=0.001)
    assert time is not None
    assert time.running == (1, 4)
    assert time.step_seconds == pytest.approx((0.03, 0.05))
    assert time.seconds(1, 0.0, 0.0) == pytest.approx(0.03)
    assert time.seconds(1, 3.0, 0.0) == pytest.approx(0.05)
    assert time.seconds(2, 0.25, 0.0) == pytest.approx(0.03 + 1.5 / 3 * 0.02)
    assert time.most_tokens == 6.0
    assert "1: 30, 4: 50" in time.source


def test_gaps_in_which_a_prompt_is_read_are_left_out() -> None:
    slow = list(served(0, 1.0, 0.03, 30).chunks)
    slow[10:] = [time + 0.5 for time in slow[10:]]  # another prompt comes between
    sample = Sample("0", "w", 0.9, slow[-1], slow[0], tuple(slow), 100, 30)
    other = Sample("1", "w", slow[9], slow[10], slow[10] - 0.01, (slow[10] - 0.01,), 500, 1)
    time = measured_time([sample, other], prefill_seconds=0.001)
    assert time is not None
    assert max(time.step_seconds) == pytest.approx(0.03)


def test_too_little_is_nothing() -> None:
    assert measured_time([served(0, 1.0, 0.03, 2)], 0.001) is None
    assert measured_time([], None) is None


def test_a_step_is_no_longer_than_a_larger_one_was() -> None:
    samples = [
        *(served(number, 1.0, 0.03, 20) for number in range(1)),
        *(served(number, 11.0, 0.028, 20) for number in range(2)),
        *(served(number, 21.0, 0.04, 20) for number in range(4)),
    ]
    time = measured_time(samples, 0.001)
    assert time is not None
    assert time.step_seconds == pytest.approx((0.028, 0.028, 0.04))


def read(tokens: int, seconds: float) -> Sample:
    return Sample("r", "w", 5.0, 5.0 + seconds, 5.0 + seconds, (5.0 + seconds,), tokens, 1)


def test_prompts_tell_how_much_longer_more_tokens_take() -> None:
    lengths = [
        [read(40, 0.1), read(42, 0.11), read(41, 0.9)],
        [read(100, 0.22)] * 3,
        [Sample("r", "w", 5.0, 5.0, error="too long")],
        [read(200, 0.21)] * 3,  # what is disturbed takes longer, nothing shorter
    ]
    time = reading_time(lengths)
    assert time is not None
    assert time.tokens == (41, 100, 200)
    assert time.seconds == pytest.approx((0.105, 0.21, 0.21))
    assert time.more(41, 59) == pytest.approx(0.105)
    assert time.more(1, 16) == pytest.approx(16 * 0.105 / 59)
    assert time.more(120, 300) == 0.0
    assert reading_time(lengths[:1]) is None
    assert reading_time([[read(0, 0.1)], [read(0, 0.2)]]) is None  # tokens are not told


def test_the_dearer_price_counts_and_the_cheaper_is_known() -> None:
    compute_bound = MeasuredTime((1, 16), (0.03, 0.045), ReadingTime((40, 100), (0.1, 0.22)))
    assert compute_bound.seconds(16, 0.0, 0.0) == pytest.approx(0.045)
    assert compute_bound.seconds(16, 1.0, 0.0) == pytest.approx(0.045 + 16 * 0.002)
    assert compute_bound.at_best is not None
    assert compute_bound.at_best.seconds(16, 1.0, 0.0) == pytest.approx(0.045 + 16 * 0.001)
    assert (compute_bound.most_running, compute_bound.most_tokens) == (24.0, 100.0)
    assert "(40: 100, 100: 220); a verified token is priced as one more" in compute_bound.source
    memory_bound = MeasuredTime((1, 64), (0.01, 0.0163), ReadingTime((40, 400), (0.02, 0.02)))
    assert memory_bound.seconds(32, 1.0, 0.0) == pytest.approx(0.0163)
    assert memory_bound.at_best is not None
    assert memory_bound.at_best.seconds(32, 1.0, 0.0) == memory_bound.seconds(32, 0.0, 0.0)
    alone = MeasuredTime((1, 2), (0.03, 0.031))
    assert alone.at_best is None
    assert alone.source.endswith("a verified token is priced as one more running request")


def test_cost_files_of_every_shape() -> None:
    step = StepSeconds(fixed_seconds=1.0, per_token_seconds=0.1, per_context_token_seconds=0.01)
    packed = FileTime(CostFile(shape="packed", step=step, proposers={}), "c")
    assert packed.seconds(4, 1.5, 10) == pytest.approx(1.0 + 0.1 * 10 + 0.01 * 40)
    stepped = FileTime(
        CostFile(shape="stepped", captured_sizes=(8, 16), step=step, proposers={}), "c"
    )
    assert stepped.seconds(4, 1.5, 0) == pytest.approx(1.0 + 0.1 * 16)
    assert stepped.lookup_share("ngram") == 0.0


def test_a_data_sheet_is_a_roofline() -> None:
    device = device_of("H100-SXM")
    time = RooflineTime(device, 16e9, 8e9, 131072.0)
    assert time.seconds(1, 0.0, 0.0) == pytest.approx(16e9 / 3.35e12)
    assert time.seconds(1, 7.0, 1000.0) == pytest.approx((16e9 + 131072e3) / 3.35e12)
    assert time.seconds(512, 7.0, 0.0) == pytest.approx(2 * 8e9 * 4096 / 989e12)
    assert "not measured" in time.source
    with pytest.raises(InputError, match="no data sheet for 'h101'; there are a100"):
        device_of("h101")
    assert all(each.source.startswith("https://") for each in DEVICES)


def test_a_profile_tells_the_steps_it_has_seen() -> None:
    engine = EngineInfo("m", "embedded", "1", "cpu", "float32")
    controller = Controller(load_settings("default"), [ProposerInfo("ngram", "lookup", 8)], engine)
    cost = controller.learned.cost
    nothing = np.zeros(1)
    for _ in range(60):
        for running in (1, 2, 4, 8):
            for k in (0, 2):
                tokens = running * (1 + k)
                load = StepLoad(tokens, running, 100 * running, k > 0, nothing, nothing, nothing)
                cost.observe(load, 0.02 + 0.002 * tokens, None)
    profile = controller.learned.take_fresh(controller.workloads.labels, "test", 0.0)
    time = profile_time(profile, "p.json")
    assert time.seconds(1, 0.0, 100.0) == pytest.approx(0.022, rel=0.05)
    assert time.seconds(4, 2.0, 100.0) == pytest.approx(0.044, rel=0.05)
    assert time.most_tokens == 32.0
    assert 1.0 < time.least_gain < MeasuredTime((1,), (0.022,)).least_gain  # it holds all costs
    empty = Profile(
        profile.identity, profile.acceptance_layout, profile.cost_layout, {}, {}, (), 0.0
    )
    with pytest.raises(InputError, match=r"p\.json: the profile holds no step times"):
        profile_time(empty, "p.json")
