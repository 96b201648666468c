"""Axes that several charts share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from autospec.report.theme import MUTED, paint

_SPEEDUPS = (0.25, 0.5, 0.7, 0.8, 0.9, 1.0, 1.2, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0)
_FEWER = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)


def speedup_axis(
    axes: Axes, name: Literal["x", "y"], values: Sequence[float], *, is_narrow: bool
) -> None:
    """Logarithmic, since 2x and 0.5x are equally far from 1x."""
    low, high = min([*values, 0.95]) / 1.06, max([*values, 1.05]) * 1.06
    if name == "x":
        axes.set_xscale("log")
        axes.set_xlim(low, high)
    else:
        axes.set_yscale("log")
        axes.set_ylim(low, high)
    ticks = [each for each in _SPEEDUPS if low <= each <= high]
    if len(ticks) > (5 if is_narrow else 8):
        ticks = [each for each in _FEWER if low <= each <= high]
    axis = axes.xaxis if name == "x" else axes.yaxis
    fixed(axis, ticks, [f"{each:g}x" for each in ticks])


def load_axis(axes: Axes, loads: Sequence[float]) -> None:
    """Running requests on a logarithmic x axis, with a tick at every load."""
    axes.set_xscale("log", base=2)
    ticks = sorted(set(loads))
    while len(ticks) > 9:
        ticks = ticks[::2]
    fixed(axes.xaxis, ticks, [f"{each:g}" for each in ticks])
    low, high = min(loads), max(loads)
    axes.set_xlim(low / 1.25, high * 1.25)
    axes.set_xlabel("running requests")


def fixed(axis: Axis, ticks: Sequence[float], labels: Sequence[str]) -> None:
    """Exactly these ticks."""
    axis.set_major_locator(FixedLocator(list(ticks)))
    axis.set_minor_locator(NullLocator())
    names = dict(zip(ticks, labels, strict=True))
    axis.set_major_formatter(FuncFormatter(lambda value, _: names.get(value, f"{value:g}")))


def plain_line(axes: Axes, *, is_vertical: bool) -> None:
    """Where plain decoding is."""
    draw = axes.axvline if is_vertical else axes.axhline
    draw(1.0, color=paint(MUTED), linewidth=1.0, linestyle=(0, (4, 3)), zorder=1)
