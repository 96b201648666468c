"""How likely draft tokens were to be accepted, by position, workload and proposer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autospec.report.drawing import Sheet
from autospec.report.interval import Interval
from autospec.report.page import Chart, DataTable, Section, chart
from autospec.report.readers.counts import POSITIONS, Counts
from autospec.report.readers.journal_run import JournalRun
from autospec.report.readers.profile_counts import ProfileCounts
from autospec.report.theme import MUTED, Key, paint, proposer_roles
from autospec.report.wording import count, percent, plural, shortened

FEWEST_TRIALS = 10.0
MOST_PANELS = 9


@dataclass(frozen=True, slots=True)
class Line:
    """One proposer on one workload; ``points`` are (index of the position, interval)."""

    proposer: str
    points: tuple[tuple[int, Interval], ...]


@dataclass(frozen=True, slots=True)
class Panel:
    """One workload; ``trials`` is how many draft tokens were judged."""

    workload: str
    trials: float
    lines: tuple[Line, ...]


def panels_of(counts: Mapping[tuple[str, str], Counts]) -> tuple[Panel, ...]:
    """Workloads in which a position was tried often enough, the most tried first."""
    panels = []
    for workload in dict.fromkeys(label for label, _ in counts):
        lines, trials = [], 0.0
        for (label, proposer), each in counts.items():
            if label != workload:
                continue
            trials += sum(each.trials)
            points = tuple(
                (index, interval)
                for index, interval in enumerate(each.intervals(FEWEST_TRIALS))
                if interval is not None
            )
            if points:
                lines.append(Line(proposer, points))
        if lines:
            panels.append(Panel(workload, trials, tuple(lines)))
    return tuple(sorted(panels, key=lambda panel: -panel.trials))


def acceptance_section(
    profiles: Sequence[ProfileCounts], journals: Sequence[JournalRun]
) -> Section | None:
    """Of the profiles, else of the journals; None where neither counted enough."""
    found: list[tuple[str, Mapping[tuple[str, str], Counts], str]] = [
        (each.name, each.counts, "Lookups are judged on every draft they had to offer, models on ")
        for each in profiles
    ]
    if not found:
        found = [(run.name, run.counts(), "Judged on ") for run in journals]
    charts = []
    for number, (name, counts, basis) in enumerate(found):
        panels = panels_of(counts)
        if panels:
            charts.append(
                _chart(f"acceptance-{number}", name, panels, counts, basis, len(found) > 1)
            )
    if not charts:
        return None
    return Section(
        "acceptance",
        "Acceptance by position",
        (
            "The chance that a draft token is accepted when all before it were, by its position "
            "in the draft. Where the curve rises, a draft that began well goes on well.",
        ),
        tuple(charts),
    )


def _chart(
    name: str,
    source: str,
    panels: tuple[Panel, ...],
    counts: Mapping[tuple[str, str], Counts],
    basis: str,
    is_named: bool,
) -> Chart:
    drawn, left_out = panels[:MOST_PANELS], panels[MOST_PANELS:]
    names = sorted({line.proposer for panel in drawn for line in panel.lines})
    roles = proposer_roles(names)
    rows = -(-len(drawn) // _columns(len(drawn)))
    note = (
        f"{basis}the drafts that were verified. Lines are 95 % intervals (Wilson) of positions "
        f"tried {FEWEST_TRIALS:.0f} times or more; tokens of one request resemble each other, so "
        "the truth is less certain than they look."
    )
    if left_out:
        note += f" {plural(len(left_out), 'workload')} with fewer tokens: see the data."
    return chart(
        name,
        source if is_named else "",
        f"Acceptance by draft position for {', '.join(names)} on {plural(len(drawn), 'workload')}"
        + (f", {source}" if is_named else ""),
        lambda sheet: _draw(sheet, drawn, roles),
        40 + 165 * rows,
        _table(counts),
        keys=tuple(Key(each, roles[each], "line") for each in names),
        note=note,
        narrow_height=40 + 160 * len(drawn),
    )


def _columns(panels: int) -> int:
    return 2 if panels in (2, 4) else min(panels, 3)


def _draw(sheet: Sheet, panels: tuple[Panel, ...], roles: Mapping[str, str]) -> None:
    columns = 1 if sheet.is_narrow else _columns(len(panels))
    rows = -(-len(panels) // columns)
    grid = sheet.figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for index, axes in enumerate(grid.flat):
        if index >= len(panels):
            axes.set_axis_off()
            continue
        panel = panels[index]
        title = f"{shortened(panel.workload, 24)} · {count(panel.trials)} tokens"
        axes.set_title(title, color=paint(MUTED))
        for place, line in enumerate(panel.lines):
            color = paint(roles[line.proposer])
            offset = 0.12 * (place - (len(panel.lines) - 1) / 2)
            spots = [position + offset for position, _ in line.points]
            spans = axes.vlines(
                spots,
                [each.low for _, each in line.points],
                [each.high for _, each in line.points],
                color=color, linewidth=1.6, alpha=0.5,
            )  # fmt: skip
            spans.set_capstyle("round")
            (drawn,) = axes.plot(
                spots, [each.share for _, each in line.points], "o-", color=color, markersize=4,
                linewidth=1.4,
            )  # fmt: skip
            sheet.mark(
                drawn,
                [
                    f"{line.proposer} on {panel.workload}, position {POSITIONS[position].name}: "
                    f"{_shown(each)}"
                    for position, each in line.points
                ],
            )
        axes.set_ylim(0, 1.03)
        axes.set_yticks([0, 0.5, 1], ["0 %", "50 %", "100 %"])
        axes.set_xlim(-0.4, len(POSITIONS) - 0.6)
        axes.set_xticks(range(len(POSITIONS)), [each.name for each in POSITIONS])
        axes.tick_params(labelsize=10)
        if index + columns >= len(panels):
            axes.tick_params(labelbottom=True)
            axes.set_xlabel("position in the draft")


def _shown(interval: Interval) -> str:
    return f"{percent(interval.share)} ({percent(interval.low)} to {percent(interval.high)})"


def _table(counts: Mapping[tuple[str, str], Counts]) -> DataTable:
    rows = []
    for (workload, proposer), each in sorted(counts.items()):
        survival = 1.0
        intervals = each.intervals(0.0)
        for name, tried, interval in zip(each.positions, each.trials, intervals, strict=True):
            if interval is None:
                continue
            start = next(position for position in POSITIONS if position.name == name)
            survival *= interval.share ** (1 if start.end > 12 else start.end - start.start)
            rows.append(
                (
                    workload, proposer, name, count(tried), percent(interval.share),
                    f"{percent(interval.low)} to {percent(interval.high)}", percent(survival),
                )
            )  # fmt: skip
    return DataTable(
        "By workload, proposer and position",
        (
            "workload", "proposer", "position", "tried", "accepted", "95 % interval",
            "accepted up to here",
        ),
        tuple(rows),
    )  # fmt: skip
