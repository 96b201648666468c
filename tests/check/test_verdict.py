"""The decision on constructed numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autospec.check.lookups import Acceptance, Crossover, Speedup
from autospec.check.samples import Shares
from autospec.check.verdict import Evidence, decide

CANDIDATE = Evidence(
    output_tokens=200.0,
    shares_low=Shares(0.0, 0.1, 0.9),
    shares_high=Shares(0.05, 0.1, 0.85),
    running_low=1.2,
    running_high=6.0,
    best_acceptance=Acceptance("suffix", 8, 3.0, 4.0),
    crossover=Crossover(12, 12),
    at_low=Speedup(1, "suffix", 8, 1.7, 1.5, 1.8, 1.6, True),
    at_high=Speedup(6, "suffix", 4, 1.5, 1.4, 1.6, 1.45, True),
    at_one=Speedup(1, "suffix", 8, 1.7, 1.5, 1.8, 1.6, True),
    largest_k=8,
)


def test_a_candidate_says_who_how_far_below_what_and_how_much() -> None:
    verdict = decide(CANDIDATE)
    assert verdict.kind == "candidate"
    assert (
        verdict.sentence
        == "candidate: suffix, k up to 8 below 12 running requests, expected 1.4-1.8x"
    )
    assert "50% of its drafts accepted" in verdict.reason
    assert "1.7" in verdict.reason
    assert any("k 8 for suffix" in step for step in verdict.next_steps)


def test_where_it_always_paid_it_says_how_far_that_is_known() -> None:
    verdict = decide(replace(CANDIDATE, crossover=Crossover(None, 24)))
    assert "up to at least 24 running requests" in verdict.sentence
    beyond = decide(replace(CANDIDATE, crossover=Crossover(None, 3), running_low=5.0))
    assert beyond.kind == "unknown"
    assert "drafts pay up to 3 running requests, but 5 to 6 run here" in beyond.sentence


def test_the_workload_that_gains_most_is_named() -> None:
    edits = ("edits", Speedup(16, "suffix", 2, 1.3, 1.2, 1.4, 1.25, True))
    verdict = decide(replace(CANDIDATE, running_low=15.0, best_workload=edits))
    assert verdict.kind == "off-above"
    assert (
        verdict.next_steps[-1]
        == "of the workloads edits gains most: 1.30x with suffix:2 at 16 running requests"
    )


def test_a_load_that_does_not_pay_does_not_spoil_what_is_expected_below() -> None:
    verdict = decide(
        replace(
            CANDIDATE,
            running_high=20.0,
            at_high=Speedup(20, "suffix", 1, 0.9, 0.85, 0.95, 0.88, False),
        )
    )
    assert verdict.kind == "candidate"
    assert verdict.sentence.endswith("expected 1.5-1.8x")


@pytest.mark.parametrize("queue", [0.0, 0.7])
def test_prefill_comes_first_whatever_drafts_would_bring(queue: float) -> None:
    busy = 1.0 - queue
    verdict = decide(
        replace(CANDIDATE, output_tokens=5.0, shares_low=Shares(queue, 0.81 * busy, 0.19 * busy))
    )
    assert verdict.kind == "not-yet-prefill"
    assert verdict.sentence == "not yet: 81% of the time is before the first token"
    assert "5 output tokens" in verdict.reason


def test_off_above_the_crossover() -> None:
    verdict = decide(
        replace(
            CANDIDATE,
            shares_low=Shares(0.6, 0.02, 0.38),
            shares_high=Shares(0.8, 0.02, 0.18),
            running_low=15.6,
            running_high=16.0,
            at_low=Speedup(16, "suffix", 2, 1.05, 0.9, 1.2, 1.01, False),
        )
    )
    assert verdict.kind == "off-above"
    assert verdict.sentence == (
        "off above 11 running requests: 16 run here, where drafts bring too little (1.01x)"
    )
    assert "at 1 running request it would be 1.70x" in verdict.reason
    assert any("80% of the time at the highest load is queue" in s for s in verdict.next_steps)


def test_it_says_what_the_cheaper_price_would_change() -> None:
    dear = replace(CANDIDATE, running_low=15.6, running_high=16.0)
    verdict = decide(replace(dear, best_crossover=Crossover(30, 30)))
    assert verdict.kind == "off-above"  # the dearer price decides
    cheaper = "; at the cheaper of the two prices of a verified token it would pay up to "
    assert verdict.reason.endswith(f"{cheaper}29 running requests")
    no_end = decide(replace(CANDIDATE, best_crossover=Crossover(None, 24)))
    assert no_end.reason.endswith(f"{cheaper}at least 24 running requests")
    assert "cheaper" not in decide(replace(dear, best_crossover=Crossover(12, 12))).reason


def test_without_anything_to_copy_it_is_no() -> None:
    nothing = replace(
        CANDIDATE,
        best_acceptance=Acceptance("ngram", 2, 1.04, 0.5),
        crossover=Crossover(1, 1),
        at_low=None,
        at_high=None,
        at_one=Speedup(1, "ngram", 2, 1.01, 1.0, 1.02, 1.0, False),
        largest_k=0,
    )
    verdict = decide(nothing)
    assert verdict.kind == "no"
    assert "1.01x at 1 running request" in verdict.sentence
    queued = decide(replace(nothing, shares_high=Shares(0.7, 0.05, 0.25)))
    assert queued.kind == "not-yet-queue"
    assert queued.sentence == "not yet: 70% of the time is spent waiting for a place"


def test_what_is_not_known_is_said() -> None:
    no_time = decide(replace(CANDIDATE, crossover=None, at_low=None, at_high=None, at_one=None))
    assert no_time.kind == "unknown"
    assert "3.00 tokens per step" in no_time.sentence
    assert any("--cost" in step for step in no_time.next_steps)
    no_tokens = decide(replace(CANDIDATE, best_acceptance=None))
    assert no_tokens.kind == "unknown"
    assert no_tokens.next_steps == ("give the model's folder with --tokenizer",)


def test_a_server_that_speculates_is_named() -> None:
    verdict = decide(replace(CANDIDATE, speculates_already=2.1))
    assert verdict.kind == "candidate"
    assert "speculates already (2.10 tokens per step)" in verdict.reason
