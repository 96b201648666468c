"""How fast each arm was in each phase of a measurement, against plain decoding."""

from __future__ import annotations

from autospec.bench.phases import ADAPTIVE, PLAIN
from autospec.report.page import Chart, DataTable, Section, chart
from autospec.report.readers.bench_run import BenchRun, PhaseArm
from autospec.report.sections.dots import Dot, Row, draw_dots, heights
from autospec.report.theme import Key, proposer_roles
from autospec.report.wording import percent, plural, rate, times


def rows_of(run: BenchRun) -> tuple[Row, ...]:
    """Every phase that was measured against plain decoding."""
    rows = []
    for phase in run.phases:
        dots = [
            Dot(arm, spread.median, spread.low, spread.high)
            for arm, figures in phase.arms.items()
            if arm != PLAIN and (spread := figures.ratio_to_plain) is not None
        ]
        if dots:
            rows.append(Row(phase.title, tuple(dots)))
    return tuple(rows)


def speedup_section(runs: tuple[BenchRun, ...]) -> Section | None:
    """None where nothing was measured against plain decoding."""
    charts = []
    for number, run in enumerate(runs):
        rows = rows_of(run)
        if rows:
            charts.append(_chart(f"speedup-{number}", run, rows, len(runs) > 1))
    if not charts:
        return None
    return Section(
        "speedup",
        "Speed by load and workload",
        (
            "Every arm served the same requests, a few steps at a time in turn with the others, in "
            "rounds. A dot is the median over rounds of the speed against plain decoding in the "
            "same round, its line reaches from the worst round to the best.",
        ),
        tuple(charts),
    )


def _chart(name: str, run: BenchRun, rows: tuple[Row, ...], is_named: bool) -> Chart:
    arms = [arm for arm in run.arms if arm != PLAIN]
    roles = proposer_roles(arms)
    wide, narrow = heights(rows)
    disturbed = sum(
        each.disturbed
        for phase in run.phases
        for figures in phase.arms.values()
        for each in figures.rounds
    )
    return chart(
        name,
        run.name if is_named else "",
        f"Speedup over plain decoding by phase for {', '.join(arms)}"
        + (f", {run.name}" if is_named else ""),
        lambda sheet: draw_dots(sheet, rows, roles),
        wide,
        _table(run),
        keys=tuple(Key(arm, roles[arm], "diamond" if arm == ADAPTIVE else "dot") for arm in arms),
        note="Rows are running requests × workload; 1x is plain decoding."
        + (
            f" Other processes took processor time during {plural(disturbed, 'timed block')}."
            if disturbed
            else ""
        ),
        narrow_height=narrow,
    )


def _table(run: BenchRun) -> DataTable:
    rows = []
    for phase in run.phases:
        for arm, figures in phase.arms.items():
            spread = figures.ratio_to_plain
            rows.append(
                (
                    phase.title,
                    arm,
                    "–" if figures.tokens_per_second is None else rate(figures.tokens_per_second),
                    "–" if spread is None else times(spread.median),
                    "–" if spread is None else f"{times(spread.low)} to {times(spread.high)}",
                    "–"
                    if figures.acceptance_length is None
                    else f"{figures.acceptance_length:.2f}",
                    _accepted(figures),
                )
            )
    return DataTable(
        "Requests × workload, by arm",
        (
            "phase", "arm", "tokens/s", "against plain", "worst to best round",
            "tokens per request and step", "accepted",
        ),
        tuple(rows),
    )  # fmt: skip


def _accepted(figures: PhaseArm) -> str:
    return percent(figures.accepted / figures.drafted) if figures.drafted else "–"
