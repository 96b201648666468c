"""Rows of bars that each add up to the whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autospec.report.drawing import Sheet
from autospec.report.sections.scales import fixed
from autospec.report.theme import INK, QUIET, SURFACE, paint
from autospec.report.wording import percent, shortened

_LABELED, _LABELED_LONG = 0.07, 0.17
"""Shares below these carry no label, or the share alone."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A share of the whole; ``more`` is written beside it where there is room."""

    name: str
    share: float
    role: str
    more: str = ""


@dataclass(frozen=True, slots=True)
class Bar:
    """One whole."""

    title: str
    segments: tuple[Segment, ...]


def bar_heights(bars: Sequence[Bar]) -> tuple[int, int]:
    """Of the wide drawing and of the narrow one, whose bars have their titles above."""
    return 46 + 34 * len(bars), 46 + 48 * len(bars)


def draw_bars(sheet: Sheet, bars: Sequence[Bar]) -> None:
    """Bars from top to bottom, their segments from left to right."""
    axes = sheet.axes()
    height = 0.44 if sheet.is_narrow else 0.62
    for row, bar in enumerate(bars):
        if sheet.is_narrow:
            axes.annotate(
                shortened(bar.title, 46), (0, row - 0.5), xycoords=("axes fraction", "data"),
                va="center",
            )  # fmt: skip
        left = 0.0
        for segment in bar.segments:
            _draw_segment(sheet, bar.title, segment, row, left, height)
            left += segment.share
    axes.grid(visible=False)
    axes.spines["bottom"].set_visible(False)
    axes.set_xlim(0, 1)
    fixed(axes.xaxis, (0, 0.5, 1), ("0 %", "50 %", "100 %"))
    titles = [] if sheet.is_narrow else [shortened(bar.title, 40) for bar in bars]
    axes.set_yticks(list(range(len(titles))), titles)
    axes.tick_params(axis="y", labelcolor=paint(INK))
    axes.set_ylim(len(bars) - 0.4, -0.75 if sheet.is_narrow else -0.5)


def _draw_segment(
    sheet: Sheet, title: str, segment: Segment, row: int, left: float, height: float
) -> None:
    axes = sheet.figure.axes[0]
    drawn = axes.barh(
        row, segment.share, height, left=left, color=paint(segment.role),
        edgecolor=paint(SURFACE), linewidth=1.5,
    )  # fmt: skip
    text = percent(segment.share)
    full = f"{text}, {segment.more}" if segment.more else text
    for patch in drawn:
        sheet.mark(patch, [f"{title}: {segment.name} {full}"])
    if segment.share >= _LABELED * (2 if sheet.is_narrow else 1):
        is_roomy = segment.share >= _LABELED_LONG and not sheet.is_narrow
        axes.text(
            left + segment.share / 2, row, full if is_roomy else text, ha="center", va="center",
            fontsize=11, color=paint(INK if segment.role == QUIET else SURFACE),
        )  # fmt: skip
