"""A run over time: throughput, k, who drafts, and the load beneath."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.ticker import MaxNLocator

from autospec.bench.phases import OFF
from autospec.records import Float64Array
from autospec.report.drawing import Sheet
from autospec.report.page import Chart, DataTable, Section, chart
from autospec.report.readers.journal_run import (
    FIRST_MODE,
    FIRST_PROPOSER,
    MODES,
    RUNNING,
    SECONDS,
    STEPS,
    TOKENS,
    WAITING,
    JournalRun,
)
from autospec.report.theme import ACCENT, INK, MUTED, SCALE, Key, paint, proposer_roles
from autospec.report.wording import duration, percent, rate

MOST_BINS = 180
FEWEST_STEPS = 6
_MOST_ROWS = 40
_IDLE = 0.6
"""Below this share of the time in steps, time between steps is left out."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """Series over bins of ``width`` seconds; NaN where no step was.

    ``is_busy`` says that time counts only while steps ran. ``shares`` [proposer, bin] of the
    request steps are in the order of ``names``, off last; ``modes`` [mode, bin] of the steps.
    """

    width: float
    is_busy: bool
    starts: Float64Array
    throughput: Float64Array  # tokens/s of step time
    k: Float64Array  # verified draft tokens of a request step that drafted
    names: tuple[str, ...]
    shares: Float64Array
    modes: Float64Array
    running: Float64Array
    waiting: Float64Array


def timeline_of(run: JournalRun) -> Timeline:
    """Means over bins, each of a few steps at least. Pure arithmetic on the run's sums."""
    is_busy = not _IDLE * run.span <= run.seconds <= 1.05 * run.span
    bins = run.busy if is_busy else run.wall
    width, sums = bins.coarse(FEWEST_STEPS, MOST_BINS)
    if is_busy:  # a bin without a start lies within a long step
        filled = np.maximum.accumulate(np.where(sums[:, STEPS] > 0, np.arange(len(sums)), 0))
        sums = sums[filled]
    drafts = sums[:, FIRST_PROPOSER:].reshape(len(sums), -1, 2)  # [bin, proposer, steps or tokens]
    request_steps, drafting = drafts[:, :, 0].sum(axis=1), drafts[:, :-1, 0].sum(axis=1)
    steps = sums[:, STEPS]
    return Timeline(
        width=width,
        is_busy=is_busy,
        starts=np.arange(len(sums), dtype=np.float64) * np.float64(width),
        throughput=_ratio(sums[:, TOKENS], sums[:, SECONDS]),
        k=_ratio(drafts[:, :-1, 1].sum(axis=1), drafting),
        names=(*run.proposers, OFF),
        shares=np.array([_ratio(drafts[:, p, 0], request_steps) for p in range(drafts.shape[1])]),
        modes=np.array([_ratio(sums[:, FIRST_MODE + m], steps) for m in range(len(MODES))]),
        running=_ratio(sums[:, RUNNING], steps),
        waiting=_ratio(sums[:, WAITING], steps),
    )


def _ratio(above: Float64Array, below: Float64Array) -> Float64Array:
    found = np.full(len(above), np.nan)
    np.divide(above, below, out=found, where=below > 0)
    return found


def time_label(timeline: Timeline) -> str:
    """What the time axis counts."""
    return "seconds spent in steps" if timeline.is_busy else "seconds since the start"


def timeline_section(runs: Sequence[JournalRun]) -> Section | None:
    """The last run of each journal over time; None without one."""
    if not runs:
        return None
    charts = tuple(
        _chart(f"timeline-{number}", run, len(runs) > 1) for number, run in enumerate(runs)
    )
    return Section(
        "timeline",
        "Over time",
        ("What was decided as load and requests changed, and what it brought.",),
        charts,
    )


def _chart(name: str, run: JournalRun, is_named: bool) -> Chart:
    timeline = timeline_of(run)
    drawn = tuple(
        name
        for name, share in zip(timeline.names, timeline.shares, strict=True)
        if np.nansum(share) > 0
    )
    roles = proposer_roles(timeline.names)
    keys = tuple(Key(each, roles[each]) for each in drawn)
    if np.nansum(timeline.waiting) > 0:
        keys += (Key("waiting requests", MUTED, "dashed"),)
    return chart(
        name,
        run.name if is_named else "",
        "Throughput, k, proposers' shares and load over time"
        + (f", {run.name}" if is_named else ""),
        lambda sheet: _draw(sheet, timeline, drawn, roles),
        520,
        _table(timeline, drawn),
        keys=keys,
        note=f"Means over {duration(timeline.width)}. Throughput is committed tokens over the time "
        "of the steps; k counts the verified draft tokens of the requests that had any."
        + (
            " Time between steps is left out, most of this run's time was spent elsewhere."
            if timeline.is_busy
            else ""
        ),
    )


def _draw(
    sheet: Sheet, timeline: Timeline, drawn: tuple[str, ...], roles: Mapping[str, str]
) -> None:
    panels = sheet.figure.subplots(4, 1, sharex=True, height_ratios=(3, 2.2, 2.6, 2))
    speed, k, who, load = panels
    edges = np.append(timeline.starts, timeline.starts[-1] + timeline.width)
    middles = timeline.starts + timeline.width / 2
    speed.set_title("throughput, tokens/s", color=paint(MUTED))
    (line,) = speed.plot(middles, timeline.throughput, color=paint(ACCENT))
    sheet.mark(line)
    k.set_title("k, draft tokens per request and step", color=paint(MUTED))
    sheet.mark(k.stairs(timeline.k, edges, color=paint(INK), linewidth=1.5, baseline=None))
    who.set_title("who drafts, share of request steps", color=paint(MUTED))
    floor = np.zeros(len(middles))
    for name in drawn:
        share = np.nan_to_num(timeline.shares[timeline.names.index(name)])
        sheet.mark(
            who.stairs(
                floor + share, edges, baseline=floor, fill=True, color=paint(roles[name]),
                linewidth=0,
            )
        )  # fmt: skip
        floor = floor + share
    who.set_yticks([0, 0.5, 1], ["0 %", "50 %", "100 %"])
    who.set_ylim(0, 1)
    load.set_title("load, running requests", color=paint(MUTED))
    sheet.mark(
        load.stairs(np.nan_to_num(timeline.running), edges, fill=True, color=paint(SCALE[1]))
    )
    if np.nansum(timeline.waiting) > 0:
        sheet.mark(
            load.stairs(
                np.nan_to_num(timeline.waiting), edges, color=paint(MUTED), linestyle=(0, (3, 2)),
                baseline=None,
            )
        )  # fmt: skip
    for axes in (speed, k, load):
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_locator(MaxNLocator(4, integer=axes is not speed))
    for axes in panels[:-1]:
        axes.tick_params(axis="x", length=0)
    load.set_xlim(0, edges[-1])
    load.xaxis.set_major_locator(MaxNLocator(4 if sheet.is_narrow else 8))
    load.set_xlabel(time_label(timeline))


def _table(timeline: Timeline, drawn: tuple[str, ...]) -> DataTable:
    """Every so many bins, so that the table stays readable."""
    step = -(-len(timeline.starts) // _MOST_ROWS)
    rows = []
    for first in range(0, len(timeline.starts), step):
        bins = slice(first, first + step)
        cells = [duration(float(timeline.starts[first])) if first else "0 s"]
        cells += [_mean(timeline.throughput[bins], rate), _mean(timeline.k[bins], "{:.1f}".format)]
        cells += [
            _mean(timeline.shares[timeline.names.index(name)][bins], percent) for name in drawn
        ]
        cells += [
            _mean(timeline.running[bins], "{:.1f}".format),
            _mean(timeline.waiting[bins], "{:.1f}".format),
        ]
        rows.append(tuple(cells))
    return DataTable(
        f"Means over {duration(step * timeline.width)} from the time given",
        ("time", "tokens/s", "k", *drawn, "running", "waiting"),
        tuple(rows),
    )


def _mean(values: Float64Array, shown: Callable[[float], str]) -> str:
    known = values[~np.isnan(values)]
    return shown(float(known.mean())) if known.size else "–"
