"""Rows of speedups: a dot for the median, a line from the worst round to the best."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autospec.bench.phases import ADAPTIVE
from autospec.report.drawing import Sheet
from autospec.report.sections.scales import plain_line, speedup_axis
from autospec.report.theme import GRID, INK, SURFACE, paint
from autospec.report.wording import shortened, times

_ROW = 22
_HEAD = 20


@dataclass(frozen=True, slots=True)
class Dot:
    """The speedup of an arm or a run: median and extremes over rounds."""

    name: str
    ratio: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Row:
    """What is compared under one title."""

    title: str
    dots: tuple[Dot, ...]


def heights(rows: tuple[Row, ...]) -> tuple[int, int]:
    """Of the wide drawing and of the narrow one, whose rows have their titles above."""
    wide = 46 + sum(max(2, len(row.dots)) * _ROW * 3 // 5 + 14 for row in rows)
    return wide, wide + _HEAD * len(rows)


def draw_dots(sheet: Sheet, rows: tuple[Row, ...], roles: Mapping[str, str]) -> None:
    """``roles`` are colors by the dots' names."""
    axes = sheet.axes()
    values = [value for row in rows for dot in row.dots for value in (dot.low, dot.high)]
    top = 0.0
    ticks, names = [], []
    places: dict[str, list[tuple[Dot, str, float]]] = {}
    for row in rows:
        start = top + (0.9 if sheet.is_narrow else 0.0)
        for line, dot in enumerate(row.dots):
            places.setdefault(dot.name, []).append((dot, row.title, start + line * 0.62))
        ticks.append(start + 0.31 * (len(row.dots) - 1))
        names.append(row.title)
        if sheet.is_narrow:
            axes.annotate(
                shortened(row.title, 46), (0, start - 0.62), (0, 0), va="center",
                xycoords=("axes fraction", "data"), textcoords="offset points",
                bbox={"facecolor": paint(SURFACE), "edgecolor": "none", "pad": 1.5},
            )  # fmt: skip
        top = start + 0.62 * (len(row.dots) - 1) + 1.25
        axes.axhline(top - 0.62, color=paint(GRID), linewidth=0.8)
    axes.grid(visible=False, axis="y")
    axes.grid(visible=True, axis="x")
    for name, found in places.items():
        color = paint(roles[name])
        heights = [height for _, _, height in found]
        spans = axes.hlines(
            heights, [d.low for d, _, _ in found], [d.high for d, _, _ in found],
            color=color, linewidth=2.0, alpha=0.55,
        )  # fmt: skip
        spans.set_capstyle("round")
        (dots,) = axes.plot(
            [dot.ratio for dot, _, _ in found], heights, "D" if name == ADAPTIVE else "o",
            color=color, markersize=6.5,
        )  # fmt: skip
        sheet.mark(
            dots,
            [
                f"{name}, {title}: {times(dot.ratio)} ({times(dot.low)} to {times(dot.high)})"
                for dot, title, _ in found
            ],
        )
    speedup_axis(axes, "x", values, is_narrow=sheet.is_narrow)
    plain_line(axes, is_vertical=True)
    axes.set_yticks([] if sheet.is_narrow else ticks, [] if sheet.is_narrow else names)
    axes.tick_params(axis="y", labelcolor=paint(INK))
    axes.set_ylim(top - 0.62, -0.62)
    axes.set_xlabel("speed against plain decoding")
