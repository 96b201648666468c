"""The measurement's plan and arithmetic."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autospec.bench.phases import (
    Block,
    BlockResult,
    Choice,
    Measurement,
    Phase,
    acceptance_length,
    add_results,
    arm_order,
    plan_blocks,
    report,
    shares,
    spread,
    staggered_tokens,
    tokens_per_second,
)
from autospec.bench.summary import findings
from autospec.errors import InputError
from autospec.prompts import Message, Prompt

PROMPTS = tuple(
    Prompt(f"{workload}{number}", workload, (Message("user", "text"),))
    for workload, count in (("chat", 3), ("code", 2))
    for number in range(count)
)


def ids(block: Block) -> list[str]:
    return [prompt.id for prompt in block.prompts]


def test_workloads_take_turns_and_go_round_their_prompts() -> None:
    phases = (Phase(1, ("chat",), 2, 8, rounds=2), Phase(2, ("code", "chat"), 3, 8, rounds=2))
    blocks = plan_blocks(phases, PROMPTS)
    assert [(block.phase, block.round) for block in blocks] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [ids(block) for block in blocks] == [
        ["chat0", "chat1"],
        ["chat2", "chat0"],
        ["code0", "chat1", "code1"],
        ["chat2", "code0", "chat0"],
    ]
    assert phases[1].workload == "code+chat"
    assert Phase(1, tuple("abcde"), 5, 8).workload == "mix of 5"


def test_a_workload_without_prompts_is_refused() -> None:
    with pytest.raises(InputError, match="no prompts of workload 'math'; there are chat, code"):
        plan_blocks((Phase(1, ("math",), 1, 8),), PROMPTS)


def test_every_arm_goes_first_once() -> None:
    arms = ("a", "b", "c")
    orders = [arm_order(arms, block) for block in range(4)]
    assert orders == [("a", "b", "c"), ("b", "c", "a"), ("c", "a", "b"), ("a", "b", "c")]


def test_sums_are_of_sums() -> None:
    fast = BlockResult(100, 1.0, 90, 30, 60, 50, {Choice("suffix", 4): 20, Choice("off", 0): 10})
    slow = BlockResult(100, 4.0, 90, 90, 5, 1, {Choice("suffix", 1): 10, Choice("ngram", 2): 80})
    both = add_results([fast, slow])
    assert tokens_per_second(both) == pytest.approx(40.0)  # a mean of ratios would be 62.5
    assert acceptance_length(both) == pytest.approx(1.5)
    assert (both.drafted, both.accepted) == (65, 51)
    found = shares(both.choices)
    assert list(found) == ["ngram", "suffix", "off"]
    assert found["suffix"] == pytest.approx((30 / 120, 3.0))
    assert found["off"] == pytest.approx((10 / 120, 0.0))


def test_nothing_measured_is_none_not_zero() -> None:
    nothing = add_results([])
    assert tokens_per_second(nothing) is None
    assert acceptance_length(nothing) is None
    assert shares({}) == {}
    assert spread([]) is None


def test_ratios_are_taken_within_a_round() -> None:
    measurement = Measurement.empty((Phase(1, ("chat",), 1, 8, rounds=3),), ("plain", "adaptive"))
    for plain_seconds, seconds in ((1.0, 0.5), (10.0, 4.0), (2.0, 2.0)):  # the machine drifts
        measurement.add_round(
            0,
            {
                "plain": BlockResult(10, plain_seconds, 9, 9),
                "adaptive": BlockResult(10, seconds, 9, 6, 5, 3, {Choice("ngram", 1): 6}),
            },
        )
    ratios = measurement.ratios("adaptive", "plain", 0)
    assert ratios == pytest.approx((2.0, 2.5, 1.0))
    assert measurement.ratios("adaptive", "missing", 0) == ()
    found = report(measurement)
    arms = found["phases"][0]["arms"]
    assert arms["adaptive"]["ratio_to_plain"] == {"median": 2.0, "low": 1.0, "high": 2.5}
    assert arms["adaptive"]["acceptance_length"] == 1.5
    assert arms["adaptive"]["choices"] == [{"proposer": "ngram", "k": 1, "share": 1.0}]
    assert found["phases"][0]["rounds"] == 3
    assert found["total"]["adaptive"]["ratio_to_plain"] == 2.0  # 13 seconds over 6.5
    assert found["total"]["plain"]["tokens"] == 30


def test_outputs_that_nobody_compared_are_not_told_about() -> None:
    measurement = Measurement.empty([Phase(1, ("a",), 1, 10, 1)], ["plain", "adaptive"])
    plain, adaptive = BlockResult(10, 2.0, 9, 9), BlockResult(10, 1.0, 9, 6, requests=1)
    measurement.add_round(0, {"plain": plain, "adaptive": adaptive})
    assert not any("token for token" in each for each in findings(measurement))
    assert report(measurement)["total"]["adaptive"]["outputs_equal_to_plain"] is None
    measurement.add_round(0, {"plain": plain, "adaptive": replace(adaptive, equal_outputs=1)})
    assert any(each.startswith("1 of 2 outputs are") for each in findings(measurement))


def test_requests_that_begin_together_end_one_after_the_other() -> None:
    phase = Phase(4, ("chat",), requests=8, max_tokens=10)
    found = [staggered_tokens(10, index, phase) for index in range(8)]
    assert found == [3, 5, 8, 10, 10, 10, 10, 10]
    all_at_once = Phase(4, ("chat",), requests=4, max_tokens=10)
    assert [staggered_tokens(10, index, all_at_once) for index in range(4)] == [10] * 4
