"""Speed against plain decoding by load, and where speculation stops paying."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from autospec.bench.phases import ADAPTIVE, PLAIN
from autospec.profile.tuned import Tuning
from autospec.report.drawing import Sheet
from autospec.report.page import Chart, DataTable, Section, chart
from autospec.report.readers.bench_run import BenchRun
from autospec.report.readers.check_run import CheckRun
from autospec.report.readers.journal_run import JournalRun, LoadSums
from autospec.report.readers.replay_run import ReplayRun
from autospec.report.sections.scales import load_axis, plain_line, speedup_axis
from autospec.report.theme import ACCENT, INK, MUTED, Key, paint, proposer_roles
from autospec.report.wording import count, shortened, times

BEST_FIXED = "best fixed choice in hindsight"
CLAIRVOYANT = "clairvoyant bound"
BEST_LOOKUP = "the best lookup"
PREDICTED = "best fixed choice, predicted"
TUNED = "AutoSpec, tuned settings"
UNTUNED = "AutoSpec, default settings"
_BOUNDS = (BEST_FIXED, CLAIRVOYANT, PREDICTED)
_FEWEST_PLAIN = 3
_FEWEST_STEPS = 30
_COVERED = 0.5
_MOST_PANELS = 6
_COLUMNS = 3


@dataclass(frozen=True, slots=True)
class Line:
    """Speedups over plain decoding by running requests, loads rising; ``spans`` are intervals."""

    name: str
    points: tuple[tuple[float, float], ...]
    spans: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Panel:
    """Lines over one kind of requests."""

    title: str
    lines: tuple[Line, ...]


def crossing(points: Sequence[tuple[float, float]]) -> float | None:
    """The load at which the speedup falls through 1 for good, interpolated on logarithmic axes.

    None where it does not: it is above 1 at the highest load, or never was above.
    """
    if not points or points[-1][1] >= 1.0:
        return None
    for (load, above), (next_load, below) in reversed(list(pairwise(points))):
        if above >= 1.0 > below:
            part = math.log(above) / math.log(above / below)
            return float(load * (next_load / load) ** part)
    return None


def crossing_words(line: Line) -> str:
    """Where a line falls below plain decoding, in words."""
    first, last = line.points[0], line.points[-1]
    found = crossing(line.points)
    if found is not None:
        return f"{line.name} stops paying at about {found:.0f} running requests"
    if last[1] >= 1.0:
        return f"{line.name} is still at {times(last[1])} at {last[0]:g} running requests"
    return f"{line.name} did not pay at any load from {first[0]:g} on"


def panels_of_bench(run: BenchRun) -> tuple[Panel, ...]:
    """Workloads that were measured at two loads or more."""
    by_workload: dict[str, dict[str, list[tuple[float, float]]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for phase in sorted(run.phases, key=lambda each: each.load):
        for arm, figures in phase.arms.items():
            if arm != PLAIN and figures.ratio_to_plain is not None:
                point = (float(phase.load), figures.ratio_to_plain.median)
                by_workload[phase.workload][arm].append(point)
    panels = []
    for workload, arms in by_workload.items():
        lines = tuple(
            Line(arm, tuple(points))
            for arm, points in arms.items()
            if len({load for load, _ in points}) == len(points) > 1
        )
        if lines:
            panels.append(Panel(workload, lines))
    return tuple(panels)


def panels_of_replay(run: ReplayRun) -> tuple[Panel, ...]:
    """Closed loops at two loads or more."""
    lines = [
        Line(policy, tuple((float(r.concurrency), r.speedup_vs_plain) for r in run.closed(policy)))
        for policy in run.policies
    ]
    for name, bounds in ((BEST_FIXED, run.best_fixed), (CLAIRVOYANT, run.clairvoyant)):
        points = sorted((float(load), each.speedup_vs_plain) for load, each in bounds.items())
        lines.append(Line(name, tuple(points)))
    kept = tuple(line for line in lines if len(line.points) > 1)
    return (Panel("", kept),) if kept else ()


def panels_of_check(run: CheckRun) -> tuple[Panel, ...]:
    """The best lookup expected, for all requests and by workload, at two loads or more."""
    found = [("all requests", run.speedups)] if len(run.workloads) != 1 else []
    found += [(workload.name, workload.speedups) for workload in run.workloads]
    return tuple(
        Panel(
            title,
            (
                Line(
                    BEST_LOOKUP,
                    tuple((float(each.running), each.speedup) for each in speedups),
                    tuple((each.low, each.high) for each in speedups),
                ),
            ),
        )
        for title, speedups in found
        if len(speedups) > 1
    )


def panels_of_tuning(tuned: Tuning) -> tuple[Panel, ...]:
    """What a tuning predicted and measured, at two loads or more.

    Settings that were not kept are the default ones: one line is enough then.
    """
    loads = sorted(tuned.loads, key=lambda each: each.load)
    lines = [Line(PREDICTED, tuple((float(each.load), each.predicted) for each in loads))]
    for name in ("measured", "untuned") if tuned.kept else ("untuned",):
        found = [
            (float(each.load), ratio)
            for each in loads
            if (ratio := getattr(each, name)) is not None
        ]
        points = tuple((load, ratio.value) for load, ratio in found)
        spans = tuple((ratio.low, ratio.high) for _, ratio in found)
        lines.append(Line(TUNED if name == "measured" else UNTUNED, points, spans))
    kept = tuple(line for line in lines if len(line.points) > 1)
    return (Panel("", kept),) if kept else ()


def panels_of_journal(run: JournalRun) -> tuple[Panel, ...]:
    """The run against its own plain steps, by octave of load."""
    points = journal_speedups(run.loads)
    return (Panel("", (Line(ADAPTIVE, points),)),) if len(points) > 1 else ()


def journal_speedups(loads: Mapping[int, LoadSums]) -> tuple[tuple[float, float], ...]:
    """Goodput over that of plain steps, by mean load of each octave.

    The time of a plain step at a load is interpolated between loads that saw some. Octaves with few
    steps, or with less than half of their time between such loads, are left out.
    """
    known = sorted(
        (load, sums.plain_seconds / sums.plain_steps)
        for load, sums in loads.items()
        if load > 0 and sums.plain_steps >= _FEWEST_PLAIN
    )
    if not known:
        return ()
    at, plain = (np.array(column) for column in zip(*known, strict=True))
    octaves: dict[int, list[tuple[int, LoadSums]]] = defaultdict(list)
    for load, sums in loads.items():
        if load > 0:
            octaves[max(0, load - 1).bit_length()].append((load, sums))
    points = []
    for _, members in sorted(octaves.items()):
        covered = [(load, sums) for load, sums in members if at[0] <= load <= at[-1]]
        seconds = sum(sums.seconds for _, sums in covered)
        if seconds < _COVERED * sum(sums.seconds for _, sums in members) or seconds <= 0.0:
            continue
        worth = sum(
            sums.tokens / load * float(np.interp(load, at, plain)) for load, sums in covered
        )
        steps = sum(sums.steps for _, sums in covered)
        if steps < _FEWEST_STEPS:
            continue
        mean = sum(load * sums.steps for load, sums in covered) / steps
        points.append((round(mean, 1), worth / seconds))
    return tuple(points)


def crossover_section(
    benches: Sequence[BenchRun],
    replays: Sequence[ReplayRun],
    journals: Sequence[JournalRun],
    tunings: Sequence[tuple[str, Tuning]],
    checks: Sequence[CheckRun],
) -> Section | None:
    """None where nothing was measured at more than one load."""
    found: list[tuple[str, str, tuple[Panel, ...], str]] = []
    for bench in benches:
        note = "Medians over rounds, against plain decoding in the same round."
        found.append(("bench", bench.name, panels_of_bench(bench), note))
    for replay in replays:
        note = "Simulated clock, each policy on the same requests; closed loops."
        found.append(("replay", replay.name, panels_of_replay(replay), note))
    for name, tuned in tunings:
        note = "Measured on held-out requests against plain decoding, with 95 % intervals."
        found.append(("tuned", name, panels_of_tuning(tuned), note))
    for check in checks:
        note = "Expected from the outputs and the step times known, with 90 % intervals."
        found.append(("check", check.name, panels_of_check(check), note))
    for journal in journals:
        note = (
            "Goodput of the run over that of its own plain steps at the same load, probes and "
            "steps without a draft among them; requests were not the same, so this is a guide. "
            f"{_odd_steps(journal)} are left out "
            f"({count(journal.odd_steps)} of {count(journal.steps)})."
        )
        found.append(("journal", journal.name, panels_of_journal(journal), note))
    kept = [each for each in found if each[2]]
    if not kept:
        return None
    sentences = []
    for _, name, panels, _ in kept:
        for panel in panels[:_MOST_PANELS]:
            words = [crossing_words(line) for line in panel.lines if line.name not in _BOUNDS]
            head = ": ".join(part for part in (name if len(kept) > 1 else "", panel.title) if part)
            sentences.append((f"{head}: " if head else "") + "; ".join(words) + ".")
    return Section(
        "crossover",
        "Where speculation stops paying",
        tuple(sentences),
        tuple(
            _chart(f"crossover-{kind}-{number}", name, panels, note, len(kept) > 1)
            for number, (kind, name, panels, note) in enumerate(kept)
        ),
    )


def _odd_steps(journal: JournalRun) -> str:
    if journal.tells_prefill:
        return "Steps that prefilled as well"
    return "Steps that took over twice the time told, as those that prefill do,"


def _roles(panels: tuple[Panel, ...]) -> dict[str, str]:
    names = dict.fromkeys(line.name for panel in panels for line in panel.lines)
    own = [name for name in names if name not in _BOUNDS]
    roles = proposer_roles(own)
    if ADAPTIVE not in own and own:
        roles[own[0]] = ACCENT
    return roles | {BEST_FIXED: INK, PREDICTED: INK, CLAIRVOYANT: MUTED}


def _chart(name: str, source: str, panels: tuple[Panel, ...], note: str, is_named: bool) -> Chart:
    drawn = panels[:_MOST_PANELS]
    roles = _roles(drawn)
    names = dict.fromkeys(line.name for panel in drawn for line in panel.lines)
    rows = -(-len(drawn) // _COLUMNS)
    table = tuple(
        (panel.title or "all requests", line.name, f"{load:g}", times(speedup))
        for panel in panels
        for line in panel.lines
        for load, speedup in line.points
    )
    return chart(
        name,
        source if is_named else "",
        f"Speedup over plain decoding by running requests for {', '.join(names)}"
        + (f", {source}" if is_named else ""),
        lambda sheet: _draw(sheet, drawn, roles),
        300 if len(drawn) == 1 else 50 + 190 * rows,
        DataTable(
            "By running requests",
            ("requests", "line", "running requests", "against plain"),
            table,
        ),
        keys=tuple(
            Key(each, roles[each], "dashed" if each in _BOUNDS else "line") for each in names
        ),
        note=note,
        narrow_height=260 if len(drawn) == 1 else 50 + 190 * len(drawn),
    )


def _draw(sheet: Sheet, panels: tuple[Panel, ...], roles: Mapping[str, str]) -> None:
    columns = 1 if sheet.is_narrow or len(panels) == 1 else _COLUMNS
    rows = -(-len(panels) // columns)
    grid = sheet.figure.subplots(rows, columns, sharey=True, squeeze=False)
    values = [y for panel in panels for line in panel.lines for _, y in line.points]
    values += [y for panel in panels for line in panel.lines for span in line.spans for y in span]
    for index, axes in enumerate(grid.flat):
        if index >= len(panels):
            axes.set_axis_off()
            continue
        panel = panels[index]
        axes.set_title(shortened(panel.title, 28), color=paint(MUTED))
        for line in panel.lines:
            is_bound = line.name in _BOUNDS
            xs, ys = zip(*line.points, strict=True)
            if line.spans:
                low, high = zip(*line.spans, strict=True)
                axes.vlines(xs, low, high, color=paint(roles[line.name]), alpha=0.45, linewidth=2)
            (drawn,) = axes.plot(
                xs, ys, color=paint(roles[line.name]), marker="o", markersize=5,
                linestyle=(0, (4, 2)) if is_bound else "-", linewidth=1.3 if is_bound else 2.0,
            )  # fmt: skip
            sheet.mark(
                drawn,
                [f"{line.name} at {x:g} running: {times(y)}" for x, y in line.points],
            )
        load_axis(axes, [x for line in panel.lines for x, _ in line.points])
        plain_line(axes, is_vertical=False)
        speedup_axis(axes, "y", values, is_narrow=sheet.is_narrow)
    grid[0, 0].set_ylabel("speed against plain")
