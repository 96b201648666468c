"""Which choice was best, or was made, at each load and workload: heat maps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from matplotlib.patches import Rectangle

from autospec.bench.phases import ADAPTIVE, OFF, PLAIN
from autospec.octave import octave_of
from autospec.report.drawing import Sheet
from autospec.report.page import Chart, DataTable, Section, chart
from autospec.report.readers.bench_run import BenchRun
from autospec.report.readers.check_run import CheckRun
from autospec.report.readers.journal_run import ChoiceSums, JournalRun
from autospec.report.readers.profile_counts import ProfileCounts
from autospec.report.sections.step_cost import octave_name
from autospec.report.theme import (
    GRID,
    HEAT,
    HEAT_EDGES,
    INK,
    MUTED,
    SCALE,
    SURFACE,
    Key,
    heat_role,
    paint,
)
from autospec.report.wording import percent, shortened, times

_MOST_ROWS = 12
_FEWEST_STEPS = 20
_WORTH_NAMING = 0.1
_TOLERANCE = 0.005  # of goodput: ties go to the smaller k
_DARK = SCALE[2:]
_TOKENS_EDGES = (1.05, 1.3, 1.8, 2.6, 4.0)


@dataclass(frozen=True, slots=True)
class Cell:
    """A workload at a load; ``lines`` are written in it, ``tip`` is shown over it."""

    row: str
    column: str
    lines: tuple[str, ...]
    role: str
    tip: str


@dataclass(frozen=True, slots=True)
class Grid:
    """Rows are workloads, columns loads; a pair that was not measured has no cell."""

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: tuple[Cell, ...]


def grid_of_bench(run: BenchRun) -> Grid:
    """The best fixed arm of every phase, plain among them, and the speed of the adaptive one."""
    cells = []
    for phase in run.phases:
        ratios = {
            arm: figures.ratio_to_plain.median
            for arm, figures in phase.arms.items()
            if figures.ratio_to_plain is not None
        }
        fixed = {arm: ratio for arm, ratio in ratios.items() if arm != ADAPTIVE}
        if not fixed:
            continue
        best = max(fixed, key=lambda arm: fixed[arm])
        shown = OFF if best == PLAIN else best
        lines = [shown, times(fixed[best])]
        tip = f"{phase.title}: best fixed choice {shown} at {times(fixed[best])}"
        if ADAPTIVE in ratios:
            lines.append(f"adaptive {times(ratios[ADAPTIVE])}")
            tip += f", adaptive {times(ratios[ADAPTIVE])}"
        cells.append(
            Cell(phase.workload, str(phase.load), tuple(lines), heat_role(fixed[best]), tip)
        )
    return _grid(cells)


def grid_of_check(run: CheckRun) -> Grid:
    """The best lookup and k that a check expects at each load."""
    cells = []
    for workload in run.workloads:
        for each in workload.speedups:
            choice = f"{each.proposer}:{each.k}" if each.k else OFF
            lines = (choice, times(each.speedup), f"{each.low:.2f}–{each.high:.2f}x")
            tip = f"{workload.name} at {each.running} running: {choice}, {', '.join(lines[1:])}"
            role = heat_role(each.speedup)
            cells.append(Cell(workload.name, str(each.running), lines, role, tip))
    return _grid(cells)


def grid_of_profile(profile: ProfileCounts) -> Grid:
    """The best proposer and k by a profile's rates and step cost, at the loads it has seen."""
    cells = []
    for workload, view in profile.outlooks.items():
        for octave in range(octave_of(view.most_load) + 1):
            load = min(1 << octave, view.most_load)
            deepest = max(view.most_k(load, name) for name in view.expectation.rates)
            best = view.expectation.best(load, deepest, _TOLERANCE)
            speedup = best.goodput / view.expectation.plain_goodput(load)
            choice = f"{best.proposer}:{best.k}" if best.proposer else OFF
            tip = f"{workload} at {load} running: {choice}, {times(speedup)}"
            role = heat_role(speedup)
            cells.append(Cell(workload, str(load), (choice, times(speedup)), role, tip))
    return _grid(cells)


def _grid(cells: list[Cell]) -> Grid:
    rows = tuple(dict.fromkeys(cell.row for cell in cells))[:_MOST_ROWS]
    columns = tuple(sorted({cell.column for cell in cells}, key=int))
    return Grid(rows, columns, tuple(cell for cell in cells if cell.row in rows))


def grid_of_journal(run: JournalRun) -> Grid:
    """What was chosen most of the time, and tokens per request and step."""
    enough = {key: sums for key, sums in run.choices.items() if sums.request_steps >= _FEWEST_STEPS}
    weight: dict[str, int] = {}
    for (_, workload), sums in enough.items():
        weight[workload] = weight.get(workload, 0) + sums.request_steps
    rows = tuple(sorted(weight, key=lambda workload: -weight[workload]))[:_MOST_ROWS]
    octaves = sorted({octave for octave, workload in enough if workload in rows})
    cells = tuple(
        _journal_cell(octave, workload, sums)
        for (octave, workload), sums in sorted(enough.items())
        if workload in rows
    )
    return Grid(rows, tuple(octave_name(octave) for octave in octaves), cells)


def _journal_cell(octave: int, workload: str, sums: ChoiceSums) -> Cell:
    name, share, k = most_chosen(sums)
    length = sums.tokens / sums.request_steps
    role = SCALE[sum(length >= edge for edge in _TOKENS_EDGES)]
    choice = name if name == OFF else f"{name} k {k:.1f}"
    return Cell(
        workload,
        octave_name(octave),
        (name, percent(share) if name == OFF else f"{percent(share)}, k {k:.1f}", f"{length:.2f}"),
        role,
        f"{workload} at {octave_name(octave)} running: {choice} in {percent(share)} of the request "
        f"steps, {length:.2f} tokens a step",
    )


def most_chosen(sums: ChoiceSums) -> tuple[str, float, float]:
    """Who drafted most, the share of the request steps in which it did, and its mean k.

    Off where nobody drafted in a tenth of them.
    """
    steps: dict[str, int] = {}
    tokens: dict[str, int] = {}
    for (proposer, k), number in sums.choices.items():
        steps[proposer] = steps.get(proposer, 0) + number
        tokens[proposer] = tokens.get(proposer, 0) + k * number
    total = sum(steps.values())
    drafting = {name: number for name, number in steps.items() if name != OFF}
    name = max(drafting, key=lambda each: drafting[each], default=OFF)
    if name != OFF and drafting[name] < _WORTH_NAMING * total:
        name = OFF
    return name, steps.get(name, 0) / total, tokens.get(name, 0) / max(1, steps.get(name, 0))


def best_choice_section(
    runs: Sequence[BenchRun],
    journals: Sequence[JournalRun],
    profiles: Sequence[ProfileCounts],
    checks: Sequence[CheckRun],
) -> Section | None:
    """None without phases or steps enough."""
    charts = []
    for number, run in enumerate(runs):
        grid = grid_of_bench(run)
        if grid.cells:
            charts.append(_bench_chart(f"best-{number}", run, grid, len(runs) > 1))
    for number, profile in enumerate(profiles):
        grid = grid_of_profile(profile)
        if grid.cells:
            charts.append(_profile_chart(f"expected-{number}", profile, grid, len(profiles) > 1))
    for number, check in enumerate(checks):
        grid = grid_of_check(check)
        if grid.cells:
            charts.append(_check_chart(f"checked-{number}", check, grid, len(checks) > 1))
    for number, journal in enumerate(journals):
        grid = grid_of_journal(journal)
        if grid.cells:
            is_named = len(journals) > 1 or bool(charts)
            charts.append(_journal_chart(f"chosen-{number}", journal, grid, is_named))
    if not charts:
        return None
    return Section("best", "The best choice by load and workload", (), tuple(charts))


def _bench_chart(name: str, run: BenchRun, grid: Grid, is_named: bool) -> Chart:
    title = "Best fixed choice, measured" + (f": {run.name}" if is_named else "")
    return _chart(
        name, title, "Best fixed proposer and k with its speedup over plain decoding", grid,
        _heat_keys(grid), ("best fixed choice", "against plain", "AutoSpec"),
        "Color is the speedup of the best fixed choice over plain decoding; off is plain decoding "
        "itself.",
    )  # fmt: skip


def _profile_chart(name: str, profile: ProfileCounts, grid: Grid, is_named: bool) -> Chart:
    title = "Best fixed choice, expected" + (f": {profile.name}" if is_named else "")
    left_out = dict.fromkeys(
        f"{proposer}: {why}"
        for view in profile.outlooks.values()
        for proposer, why in view.left_out.items()
    )
    note = "By the profile's acceptance and step cost, at loads it has seen; not measured."
    if left_out:
        note += f" Left out are {'; '.join(each.replace('`', chr(39)) for each in left_out)}."
    return _chart(
        name, title, "Best fixed proposer and k and the speedup expected of it", grid,
        _heat_keys(grid), ("best fixed choice", "against plain"), note,
    )  # fmt: skip


def _check_chart(name: str, run: CheckRun, grid: Grid, is_named: bool) -> Chart:
    title = "Best lookup, expected" + (f": {run.name}" if is_named else "")
    return _chart(
        name, title, "Best lookup and k and the speedup expected of it", grid, _heat_keys(grid),
        ("best lookup", "against plain", "90 % interval"),
        "What lookups would have had accepted on exactly these outputs, at the step times that the "
        "check knows; intervals are over the requests.",
    )  # fmt: skip


def _heat_keys(grid: Grid) -> tuple[Key, ...]:
    texts = [f"below {HEAT_EDGES[0]:g}x"]
    texts += [f"{low:g}–{high:g}x" for low, high in pairwise(HEAT_EDGES)]
    texts.append(f"{HEAT_EDGES[-1]:g}x and more")
    used = {cell.role for cell in grid.cells}
    return tuple(Key(text, role) for text, role in zip(texts, HEAT, strict=True) if role in used)


def _journal_chart(name: str, run: JournalRun, grid: Grid, is_named: bool) -> Chart:
    title = "What AutoSpec chose most" + (f": {run.name}" if is_named else "")
    edges = [f"below {_TOKENS_EDGES[0]:g}"]
    edges += [f"{low:g}–{high:g}" for low, high in pairwise(_TOKENS_EDGES)]
    edges.append(f"{_TOKENS_EDGES[-1]:g} and more")
    used = {cell.role for cell in grid.cells}
    keys = tuple(
        Key(f"{text} tokens a step", role)
        for text, role in zip(edges, SCALE, strict=True)
        if role in used
    )
    return _chart(
        name, title, "Proposer that drafted most and its mean k, with tokens per request and step",
        grid, keys,
        ("drafted most", "share of request steps, mean k", "tokens per request and step"),
        "Color is tokens per request and step, 1 in plain decoding. Requests of several workloads "
        "share a step, so its time cannot be told apart by workload: speed by load is below.",
    )  # fmt: skip


def _chart(
    name: str,
    title: str,
    about: str,
    grid: Grid,
    keys: tuple[Key, ...],
    columns: tuple[str, ...],
    note: str,
) -> Chart:
    rows = tuple((cell.row, cell.column, *cell.lines) for cell in grid.cells)
    if len(grid.cells) < len(grid.rows) * len(grid.columns):
        note += " Empty cells were not seen, or too little."
    return chart(
        name,
        title,
        f"{about}, by running requests and workload",
        lambda sheet: _draw(sheet, grid),
        54 + 62 * len(grid.rows),
        DataTable(
            title,
            ("workload", "running requests", *columns),
            tuple((*row, *("–",) * (2 + len(columns) - len(row))) for row in rows),
        ),
        keys=keys,
        note=note,
        narrow_height=54 + 84 * len(grid.rows),
    )


def _draw(sheet: Sheet, grid: Grid) -> None:
    axes = sheet.axes()
    axes.grid(visible=False)
    axes.spines["bottom"].set_visible(False)
    head = 0.24 if sheet.is_narrow else 0.0
    size = 10.5 if len(grid.columns) > (4 if sheet.is_narrow else 7) else 11.5
    filled = {(cell.row, cell.column): cell for cell in grid.cells}
    for y, row in enumerate(grid.rows):
        if sheet.is_narrow:
            axes.text(-0.48, y - 0.5 + head / 2, shortened(row, 44), va="center")
        for x, column in enumerate(grid.columns):
            place, height = (x - 0.48, y - 0.47 + head), 0.94 - head
            cell = filled.get((row, column))
            if cell is None:
                axes.add_patch(
                    Rectangle(
                        place, 0.96, height, facecolor="none", edgecolor=paint(GRID), linewidth=0.8
                    )
                )
                continue
            patch = Rectangle(place, 0.96, height, facecolor=paint(cell.role), linewidth=0)
            axes.add_patch(patch)
            sheet.mark(patch, [cell.tip])
            is_dark = cell.role in _DARK
            for line, text in enumerate(cell.lines):
                axes.text(
                    x,
                    y + head / 2 + (line - (len(cell.lines) - 1) / 2) * (0.27 - head / 5),
                    shortened(text, 9 if sheet.is_narrow and len(grid.columns) > 4 else 18),
                    ha="center",
                    va="center",
                    fontsize=size if line == 0 else size - 1,
                    fontweight="bold" if line == 0 else "normal",
                    color=paint(SURFACE if is_dark else INK),
                )
    axes.set_xlim(-0.5, len(grid.columns) - 0.5)
    axes.set_ylim(len(grid.rows) - 0.5, -0.5)
    axes.set_xticks(range(len(grid.columns)), grid.columns)
    axes.tick_params(axis="x", length=0)
    names = [] if sheet.is_narrow else [shortened(row, 28) for row in grid.rows]
    axes.set_yticks(list(range(len(names))), names)
    axes.tick_params(axis="y", labelcolor=paint(INK))
    axes.set_xlabel("running requests", color=paint(MUTED))
