"""Several runs beside each other."""

from __future__ import annotations

from collections.abc import Sequence

from autospec.bench.phases import ADAPTIVE
from autospec.report.page import Chart, DataTable, Section, chart
from autospec.report.readers.bench_run import BenchRun
from autospec.report.readers.journal_run import JournalRun
from autospec.report.readers.replay_run import ReplayRun
from autospec.report.sections.dots import Dot, Row, draw_dots, heights
from autospec.report.theme import SERIES, Key
from autospec.report.wording import count, duration, percent, rate, times

EVERYTHING = "everything"


def rows_of_benches(runs: Sequence[BenchRun]) -> tuple[Row, ...]:
    """The adaptive arm of every run: over everything, then in each phase of two runs or more."""
    totals = []
    for run in runs:
        total = run.total.get(ADAPTIVE)
        if total is not None and total.ratio_to_plain is not None:
            ratio = total.ratio_to_plain
            totals.append(Dot(run.name, ratio, ratio, ratio))
    rows = [Row(EVERYTHING, tuple(totals))] if len(totals) > 1 else []
    for title in dict.fromkeys(phase.title for run in runs for phase in run.phases):
        dots = [
            Dot(run.name, spread.median, spread.low, spread.high)
            for run in runs
            for phase in run.phases
            if phase.title == title
            and ADAPTIVE in phase.arms
            and (spread := phase.arms[ADAPTIVE].ratio_to_plain) is not None
        ]
        if len(dots) > 1:
            rows.append(Row(title, tuple(dots)))
    return tuple(rows)


def rows_of_replays(runs: Sequence[ReplayRun]) -> tuple[Row, ...]:
    """Every policy and concurrency that two runs or more have."""
    found: dict[str, list[Dot]] = {}
    for run in runs:
        for policy in run.policies:
            for row in run.closed(policy):
                dot = Dot(run.name, *(row.speedup_vs_plain,) * 3)
                found.setdefault(f"{policy} at {row.concurrency}", []).append(dot)
    return tuple(Row(title, tuple(dots)) for title, dots in found.items() if len(dots) > 1)


def comparison_section(
    benches: Sequence[BenchRun], replays: Sequence[ReplayRun], journals: Sequence[JournalRun]
) -> Section | None:
    """None where no two runs of a kind can be compared."""
    charts, tables = [], []
    rows = rows_of_benches(benches)
    if rows:
        note = "Dots are the adaptive arm against plain decoding of its own run, median of rounds."
        charts.append(_chart("compare-bench", "Measurements", rows, note))
    rows = rows_of_replays(replays)
    if rows:
        note = "Speedup over plain decoding on a simulated clock."
        charts.append(_chart("compare-replay", "Replays", rows, note))
    if len(benches) > 1:
        tables.append(_bench_table(benches))
    if len(journals) > 1:
        tables.append(_journal_table(journals))
    if not charts and not tables:
        return None
    return Section(
        "comparison",
        "Runs compared",
        ("Ratios within a run can be compared; absolute times depend on the machine of the day.",),
        tuple(charts),
        tuple(tables),
    )


def _chart(name: str, title: str, rows: tuple[Row, ...], note: str) -> Chart:
    names = list(dict.fromkeys(dot.name for row in rows for dot in row.dots))
    order = (SERIES[0], SERIES[2], SERIES[1], SERIES[3], SERIES[4], SERIES[5])
    roles = {each: order[index % len(order)] for index, each in enumerate(names)}
    wide, narrow = heights(rows)
    return chart(
        name,
        title,
        f"Speedup over plain decoding of {', '.join(names)}",
        lambda sheet: draw_dots(sheet, rows, roles),
        wide,
        DataTable(
            "By phase and run",
            ("requests", "run", "against plain", "worst to best round"),
            tuple(
                (row.title, dot.name, times(dot.ratio), f"{times(dot.low)} to {times(dot.high)}")
                for row in rows
                for dot in row.dots
            ),
        ),
        keys=tuple(Key(each, roles[each], "dot") for each in names),
        note=note,
        narrow_height=narrow,
    )


def _bench_table(runs: Sequence[BenchRun]) -> DataTable:
    rows = []
    for run in runs:
        for arm in run.arms:
            total = run.total[arm]
            rows.append(
                (
                    run.name,
                    arm,
                    count(total.tokens),
                    "–" if total.tokens_per_second is None else rate(total.tokens_per_second),
                    "–" if total.ratio_to_plain is None else times(total.ratio_to_plain),
                    "–" if total.acceptance_length is None else f"{total.acceptance_length:.2f}",
                    percent(total.accepted / total.drafted) if total.drafted else "–",
                )
            )
    return DataTable(
        "Measurements: every arm over everything",
        (
            "run", "arm", "tokens", "tokens/s", "against plain", "tokens per request and step",
            "accepted",
        ),
        tuple(rows),
    )  # fmt: skip


def _journal_table(runs: Sequence[JournalRun]) -> DataTable:
    return DataTable(
        "Journals: every run over everything",
        (
            "run", "started", "steps", "in steps", "tokens", "tokens/s", "tokens a step",
            "with a draft", "accepted",
        ),
        tuple(
            (
                run.name,
                run.date,
                count(run.steps),
                duration(run.seconds),
                count(run.tokens),
                rate(run.tokens / run.seconds) if run.seconds > 0.0 else "–",
                f"{run.tokens / run.request_steps:.2f}" if run.request_steps else "–",
                percent(run.drafting_steps / run.request_steps) if run.request_steps else "–",
                percent(run.accepted / run.verified) if run.verified else "–",
            )
            for run in runs
        ),
    )  # fmt: skip
