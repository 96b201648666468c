from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from autospec.check.lookups import (
    KS,
    Walks,
    acceptance,
    crossover,
    repetitiveness,
    speedups,
    walk,
)
from autospec.check.step_time import FileTime, MeasuredTime, ReadingTime
from autospec.replay.cost_file import CostFile, LookupSeconds, ModelSeconds, StepSeconds
from autospec.replay.fixed_arms import replay_fixed
from autospec.replay.hindsight import replay_plain
from autospec.replay.trace import TraceRequest
from tests.check.requests import copying, fresh

COST = CostFile(
    shape="packed",
    step=StepSeconds(fixed_seconds=0.02, per_token_seconds=0.001, per_context_token_seconds=1e-7),
    proposers={
        "ngram": LookupSeconds(kind="lookup", step_fraction=0.01, max_k=16),
        "suffix": LookupSeconds(kind="lookup", step_fraction=0.02, max_k=16),
        # Beside a model that can draft, lookups do so from two tokens on, as those of check do.
        "model": ModelSeconds(kind="sequential", per_depth_seconds=0.001),
    },
)
TIME = FileTime(COST, "made")


def beside_model(requests: Sequence[TraceRequest]) -> list[TraceRequest]:
    """The requests with the record of a model that is never right."""
    return [
        replace(each, accepted={"model": np.zeros(len(each.output_token_ids), dtype=np.int16)})
        for each in requests
    ]


def test_walks_are_those_of_the_replay() -> None:
    requests = beside_model([*copying(3), *fresh(2)])
    for walks in walk(requests):
        replayed = {each.arm.k: each for each in replay_fixed(requests, COST, walks.proposer, 1)}
        for c, k in enumerate(KS):
            assert walks.steps[:, c].sum() == replayed[k].steps
            assert walks.tokens.sum() == replayed[k].tokens


@pytest.mark.parametrize("running", [1, 4])
def test_speedups_are_those_of_the_closed_loop(running: int) -> None:
    requests = beside_model(copying(24, output=80))
    (found,) = speedups(walk(requests), TIME, [running])
    plain = replay_plain(requests, COST, running).tokens_per_second
    best = max(
        each.tokens_per_second / plain
        for proposer in ("ngram", "suffix")
        for each in replay_fixed(requests, COST, proposer, running)
        if each.arm.k in KS
    )
    assert found.speedup == pytest.approx(best, rel=0.05)
    assert found.low <= found.speedup <= found.high


def test_workloads_are_kept_apart() -> None:
    walks = walk([*copying(4), *fresh(4)])
    edit = max(acceptance(walks[1], "edit"), key=lambda each: each.tokens_per_step)
    story = max(acceptance(walks[1], "story"), key=lambda each: each.tokens_per_step)
    assert edit.tokens_per_step > 4.0
    assert edit.accepted_share > 0.5
    assert story.tokens_per_step == pytest.approx(1.0, abs=0.02)
    assert repetitiveness(walks, "edit") > 0.8
    assert repetitiveness(walks, "story") < 0.02


def test_what_copies_pays_until_the_step_is_full() -> None:
    walks = walk(copying(6))
    found = speedups(walks, TIME, [1, 8, 64, 256])
    values = [each.speedup for each in found]
    assert values == sorted(values, reverse=True)
    assert values[0] > 3.0
    steep = CostFile(
        shape="packed",
        step=StepSeconds(fixed_seconds=0.02, per_token_seconds=0.02),
        proposers=COST.proposers,
    )
    assert crossover(walk(fresh(3)), TIME).off_from == 1
    gone = crossover(walks, TIME).off_from
    assert gone is not None
    assert gone > 128
    # Where a step costs its tokens alone, the wrong ones are pure loss.
    early = crossover(walks, FileTime(steep, "steep")).off_from
    assert early is not None
    assert early < 32


def test_the_lower_quartile_and_the_dearer_price_decide() -> None:
    walks = walk([*copying(2), *fresh(6)])  # two requests of eight make all of the gain
    ladder = MeasuredTime((1, 16), (0.03, 0.036))
    (found,) = speedups(walks, ladder, [8])
    assert found.low < found.cautious < found.speedup < found.high
    assert found.at_best is None
    dear = replace(ladder, reading=ReadingTime((40, 400), (0.1, 1.1)))
    (dearer,) = speedups(walks, dear, [8])
    assert dearer.speedup < found.speedup
    assert dearer.at_best == pytest.approx(
        speedup_of(walks, ladder, dearer.proposer, dearer.k, running=8), rel=0.02
    )  # but for the lookup's own time
    # Sixteen places were measured, and prompts of 400 tokens: that is as far as it goes.
    assert speedups(walks, dear, [24, 25])[-1].running == 24
    assert crossover(walks, dear).off_from < crossover(walks, ladder).known_to  # type: ignore[operator]


def speedup_of(
    walks: Sequence[Walks], time: MeasuredTime, proposer: str, k: int, *, running: int
) -> float:
    """By the definition."""
    (each,) = (each for each in walks if each.proposer == proposer)
    (found,) = (one for one in acceptance(each) if one.k == k)
    step = time.seconds(running, found.verified_per_step, 0.0)
    return found.tokens_per_step * time.seconds(running, 0.0, 0.0) / step


def test_a_speedup_pays_above_what_its_step_times_leave_out() -> None:
    walks = walk([*copying(2), *fresh(6)])
    ladder = MeasuredTime((1, 16, 64), (0.03, 0.033, 0.12))
    found = speedups(walks, ladder, range(1, 65))
    assert [each.pays for each in found] == [each.cautious >= 1.1 for each in found]
    paying = [each.running for each in found if each.pays]
    assert 1 in paying
    assert len(paying) < len(found)
    assert crossover(walks, ladder).off_from == min({each.running for each in found} - {*paying})


def test_nothing_is_said_beyond_what_was_measured() -> None:
    walks = walk(copying(4))
    time = MeasuredTime((1, 2, 4), (0.03, 0.031, 0.033))
    found = speedups(walks, time, [1, 2, 4, 8, 16])
    assert time.most_tokens == 6.0
    assert [each.running for each in found] == [1, 2]  # four requests and a draft each are eight
    assert crossover(walks, time).known_to == 3
