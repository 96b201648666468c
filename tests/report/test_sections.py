"""The series behind the charts, and the sentences."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from autospec.report.inputs import Inputs, read_inputs
from autospec.report.interval import wilson
from autospec.report.readers.journal_run import ChoiceSums, JournalRun, LoadSums, StepPoint
from autospec.report.sections.acceptance import panels_of
from autospec.report.sections.best_choice import grid_of_bench, most_chosen
from autospec.report.sections.comparison import rows_of_benches
from autospec.report.sections.crossover import (
    Line,
    crossing,
    crossing_words,
    crossover_section,
    journal_speedups,
    panels_of_bench,
    panels_of_replay,
)
from autospec.report.sections.rails import rails_sentences
from autospec.report.sections.step_cost import (
    cost_section,
    costs_of_journal,
    costs_of_profile,
    octave_name,
)
from autospec.report.sections.timeline import timeline_of
from autospec.report.sections.verdict import (
    bench_verdict,
    journal_verdict,
    profile_verdict,
    replay_verdict,
)
from autospec.report.theme import HEAT, QUIET, heat_role, proposer_roles
from autospec.report.wording import duration, percent, series
from tests.report.samples import bench_document, replay_document


@pytest.fixture(scope="module")
def inputs(folder: Path) -> Inputs:
    return read_inputs([bench_document(), replay_document(), *folder.glob("[rl]*n*.json*")])


def test_wilson_interval() -> None:
    # 50 of 100: (0.4038, 0.5962); 0 of 10: (0, 0.2775), as published tables have them.
    half, none = wilson(50, 100), wilson(0, 10)
    assert half is not None
    assert none is not None
    assert (half.low, half.high) == pytest.approx((0.40383, 0.59617), abs=1e-5)
    assert (none.low, none.high) == pytest.approx((0.0, 0.27754), abs=1e-5)
    assert wilson(0, 0) is None


@pytest.mark.parametrize(
    "points,expected",
    [
        pytest.param([(1, 2.0), (4, 0.5)], 2.0, id="halfway on logarithmic axes"),
        pytest.param([(1, 0.8), (2, 1.25), (8, 0.8)], 4.0, id="the last time it falls"),
        pytest.param([(1, 2.0), (8, 1.0)], None, id="pays to the end"),
        pytest.param([(1, 0.9), (8, 0.5)], None, id="never pays"),
        pytest.param([], None, id="nothing"),
    ],
)
def test_crossing(points: list[tuple[float, float]], expected: float | None) -> None:
    assert crossing(points) == (None if expected is None else pytest.approx(expected))


def test_crossing_in_words() -> None:
    def words(*points: tuple[float, float]) -> str:
        return crossing_words(Line("x", points))

    assert words((1, 2.0), (4, 0.5)) == "x stops paying at about 2 running requests"
    assert words((1, 2.0), (4, 1.5)) == "x is still at 1.50x at 4 running requests"
    assert words((2, 0.9), (4, 0.5)) == "x did not pay at any load from 2 on"


def test_journal_speedups_are_against_plain_steps_of_the_same_load() -> None:
    loads = {
        1: LoadSums(100, 10.0, 200, plain_steps=10, plain_seconds=0.8),
        2: LoadSums(50, 5.0, 150),  # plain steps take 0.1 s in between
        4: LoadSums(100, 12.0, 400, plain_steps=10, plain_seconds=1.4),
        64: LoadSums(100, 10.0, 9000),  # beyond all plain steps: not told
    }
    found = dict(journal_speedups(loads))
    assert found == pytest.approx({1: 200 * 0.08 / 10.0, 2: 75 * 0.1 / 5.0, 4: 100 * 0.14 / 12.0})


def test_journal_speedups_take_plain_steps() -> None:
    assert journal_speedups({1: LoadSums(100, 10.0, 200)}) == ()


def test_panels_by_workload_and_load(inputs: Inputs) -> None:
    code, chat = panels_of_bench(inputs.benches[0])
    assert (code.title, chat.title) == ("code", "chat")
    assert chat.lines[1] == Line("adaptive", ((1.0, 1.3), (16.0, 0.98)))
    (replay,) = panels_of_replay(inputs.replays[0])
    assert [line.name for line in replay.lines] == ["default", "best fixed choice in hindsight"]


def test_best_choice_is_plain_where_drafting_loses(inputs: Inputs) -> None:
    grid = grid_of_bench(inputs.benches[0])
    cells = {(cell.row, cell.column): cell for cell in grid.cells}
    assert cells["code", "1"].lines == ("suffix:8", "4.60x", "adaptive 5.60x")
    assert cells["chat", "16"].lines == ("off", "1.00x", "adaptive 0.98x")
    assert grid.columns == ("1", "16")


def test_heat_roles_lie_about_plain_decoding() -> None:
    assert heat_role(1.0) == HEAT[2]
    assert heat_role(0.95) == HEAT[1]
    assert heat_role(0.5) == HEAT[0]
    assert heat_role(9.0) == HEAT[-1]


def test_most_chosen() -> None:
    sums = ChoiceSums()
    sums.choices.update({("off", 0): 70, ("suffix", 4): 10, ("suffix", 8): 10, ("ngram", 1): 10})
    assert most_chosen(sums) == ("suffix", 0.2, 6.0)
    sums.choices.update({("off", 0): 200})
    assert most_chosen(sums)[0] == "off"


def test_timeline(inputs: Inputs) -> None:
    run = inputs.last_runs[0]
    timeline = timeline_of(run)
    assert not timeline.is_busy
    assert timeline.names == ("suffix", "eagle", "off")
    seen = ~np.isnan(timeline.throughput)
    assert timeline.shares[:, seen].sum(axis=0) == pytest.approx(1.0)
    assert timeline.modes[:, seen].sum(axis=0) == pytest.approx(1.0)
    assert timeline.running[seen][0] == 1
    assert timeline.running[seen][-1] == 24
    assert np.nanmax(timeline.throughput) < 24 * 7 / 0.02


def test_acceptance_curves_find_the_rates_that_were_set(inputs: Inputs) -> None:
    panels = {panel.workload: panel for panel in panels_of(inputs.profiles[0].counts)}
    lines = {line.proposer: line for line in panels["chat"].lines}
    position, interval = lines["suffix"].points[0]
    assert position == 0
    assert interval.low < 0.85 < interval.high
    assert interval.high - interval.low < 0.1


def test_cost_series(inputs: Inputs) -> None:
    served = costs_of_journal(inputs.last_runs[0].points)
    assert [octave_name(cost.octave) for cost in served] == ["1", "5–8", "17–32"]
    for point in served[-1].measured:
        assert point.seconds == pytest.approx(0.02 + 0.001 * point.tokens, rel=0.15)
        assert point.low <= point.seconds <= point.high
    fit = inputs.profiles[0].cost
    assert fit is not None
    learned = costs_of_profile(fit)[-1]
    times = dict(learned.line)
    assert times[24.0] == pytest.approx(0.044, rel=0.1)
    assert list(times) == sorted(times)


@pytest.mark.parametrize(
    "tells,left_out,of_costs",
    [
        (True, "Steps that prefilled as well are left out (2 of 80).", "2 steps that prefilled"),
        (False, "Steps that took over twice the time told, as those that prefill do, are", ""),
    ],
)
def test_what_is_left_out_of_a_journal_is_said(tells: bool, left_out: str, of_costs: str) -> None:
    run = JournalRun("j", "", (), ("suffix",), steps=80, tells_prefill=tells, odd_steps=2)
    for load in (1, 4):
        run.loads[load] = LoadSums(40, 1.0, 40 * load, 20, 0.5)
        run.points += [StepPoint(load, load, 0.025, 0.025)] * 4
    crossover = crossover_section([], [], [run], [], [])
    costs = cost_section([], [run])
    assert crossover is not None
    assert costs is not None
    assert left_out in crossover.charts[0].note
    assert of_costs in costs.charts[0].note
    assert ("prefilled" in costs.charts[0].note) == tells


def test_cost_of_too_few_steps_is_not_drawn() -> None:
    assert costs_of_journal([StepPoint(1, 1, 0.02, None)] * 3) == ()


def test_comparison_rows(folder: Path) -> None:
    benches = read_inputs([folder / "bench.json", folder / "warm.json"]).benches
    rows = rows_of_benches(benches)
    assert rows[0].title == "everything"
    assert [dot.name for dot in rows[1].dots] == ["bench.json", "warm.json"]
    assert rows_of_benches(benches[:1]) == ()


def test_verdicts(inputs: Inputs) -> None:
    bench = bench_verdict(inputs.benches[0])
    assert bench.sentences[0] == (
        "AutoSpec served everything at 1.60x the speed of plain decoding and at 1.07x that of the "
        "best fixed choice, suffix:8."
    )
    assert "from 0.98x (16\u00a0× chat) to 5.60x (1\u00a0× code)" in bench.sentences[1]
    replay = replay_verdict(inputs.replays[0])
    assert "2.40x at 1, 1.70x at 8 and 0.90x at 32 running requests" in replay.sentences[0]
    assert "0.82x to 1.20x of the best fixed" in replay.sentences[1]
    journal = journal_verdict(inputs.last_runs[0])
    assert "in 600 steps" in journal.sentences[0]
    profile = profile_verdict(inputs.profiles[0])
    assert "24 requests of 2 workloads" in profile.sentences[0]
    assert "suffix on" in profile.sentences[1]


def test_verdict_without_plain_or_adaptive() -> None:
    document = bench_document(interrupted=True)
    for phase in document["phases"]:
        del phase["arms"]["plain"]
        for figures in phase["arms"].values():
            figures["ratio_to_plain"] = None
    del document["total"]["plain"]
    for figures in document["total"].values():
        figures["ratio_to_plain"] = None
    sentences = bench_verdict(read_inputs([document]).benches[0]).sentences
    assert "no speedup to name" in sentences[0]
    assert "interrupted" in sentences[-1]


def test_rails_in_words(inputs: Inputs) -> None:
    run = inputs.last_runs[0]
    (before,) = rails_sentences(run)
    assert "The guard never had to step in." in before
    guard = run.modes["guard"]
    guard.steps, guard.episodes, guard.longest, guard.seconds = 128, 2, 64, run.seconds / 10
    try:
        (after,) = rails_sentences(run)
    finally:
        guard.steps = guard.episodes = guard.longest = 0
    assert "off 2 times, for 128 steps in all and 64 steps at most: 10\u202f% of the time" in after


def test_colors_are_kept_by_family_and_distinct() -> None:
    roles = proposer_roles(["off", "ngram:4", "suffix:8", "eagle3", "mtp", "medusa", "adaptive"])
    assert roles["off"] == QUIET
    assert len(set(roles.values())) == len(roles)
    assert proposer_roles(["suffix"])["suffix"] == roles["suffix:8"]


def test_wording() -> None:
    assert [percent(share) for share in (0.0, 0.003, 0.5, 1.0)] == [
        "0\u202f%",
        "0.3\u202f%",
        "50\u202f%",
        "100\u202f%",
    ]
    assert [duration(seconds) for seconds in (2e-5, 0.0123, 3.0, 600.0, 9000.0)] == [
        "20 µs",
        "12.3 ms",
        "3 s",
        "10 min",
        "2.5 h",
    ]
    assert series(["a", "b", "c"]) == "a, b and c"
