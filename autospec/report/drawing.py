"""Charts as inline SVG.

Drawn with matplotlib rather than a JavaScript library: a page stays small (tens of kilobytes a
chart, where plotly alone is 4 MB), needs no script, prints as it looks, and its text is text. Each
chart is drawn twice, for wide and for narrow windows, so that labels stay readable on a phone.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from xml.etree import ElementTree

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from autospec.report.theme import GRID, INK, MUTED, VARIABLES, paint

WIDE, NARROW = 760, 350
"""Widths of the two drawings, in CSS pixels."""

_SVG = "http://www.w3.org/2000/svg"
_LINK = "{http://www.w3.org/1999/xlink}href"
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "autospec",
    "text.parse_math": False,
    "font.family": "DejaVu Sans",
    "font.size": 12.0,
    "axes.titlesize": 12.0,
    "axes.titlelocation": "left",
    "axes.titlepad": 6.0,
    "axes.labelsize": 11.5,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.linewidth": 0.8,
    "xtick.labelsize": 11.5,
    "ytick.labelsize": 11.5,
    "xtick.major.size": 3.5,
    "ytick.major.size": 0.0,
    "xtick.minor.size": 0.0,
    "ytick.minor.size": 0.0,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
    "text.color": paint(INK),
    "axes.labelcolor": paint(MUTED),
    "axes.edgecolor": paint(MUTED),
    "xtick.color": paint(MUTED),
    "ytick.color": paint(MUTED),
    "grid.color": paint(GRID),
    "figure.facecolor": "none",
    "axes.facecolor": "none",
}
_FONT = re.compile(r"font:\s*(?P<weight>bold |\d+ )?(?P<size>[\d.]+px)[^;]*")


@dataclass(slots=True)
class Sheet:
    """What a chart is drawn on. ``is_narrow`` asks for fewer labels; ``mark`` names the data."""

    figure: Figure
    is_narrow: bool
    tips: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def mark(self, artist: Artist, tips: Sequence[str] = ()) -> None:
        """Declare an artist to be data; ``tips`` are shown over its parts, in their order."""
        name = f"mark{len(self.tips)}"
        artist.set_gid(name)
        self.tips[name] = tuple(tips)

    def axes(self) -> Axes:
        """The only axes of a chart."""
        return self.figure.subplots()


Draw = Callable[[Sheet], None]


def render(draw: Draw, name: str, height: int, narrow_height: int | None = None) -> tuple[str, str]:
    """A chart's wide and narrow SVG; ``name`` keeps their ids apart from other charts'."""
    return (
        _svg(draw, f"{name}-w", WIDE, height),
        _svg(draw, f"{name}-n", NARROW, narrow_height or height),
    )


def _svg(draw: Draw, name: str, width: int, height: int) -> str:
    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        # A label in a script that the bundled font lacks: the reader's browser has one for it.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure = Figure(figsize=(width / 72, height / 72), layout="constrained")
        sheet = Sheet(figure, width == NARROW)
        draw(sheet)
        output = io.StringIO()
        figure.savefig(output, format="svg", metadata={"Date": None})
    return _restyled(output.getvalue(), name, sheet.tips)


def _restyled(text: str, name: str, tips: dict[str, tuple[str, ...]]) -> str:
    """The SVG with CSS variables for colors, ids of its own, and its data marked."""
    ElementTree.register_namespace("", _SVG)
    root = ElementTree.fromstring(text.encode("utf-8"))
    for part in root.findall(f"{{{_SVG}}}metadata"):
        root.remove(part)
    for parent in root.findall(f".//{{{_SVG}}}style/.."):
        for style in parent.findall(f"{{{_SVG}}}style"):  # it would style the whole page
            parent.remove(style)
    for element in root.iter():
        given = element.get("id")
        if given in tips:
            element.set("class", "mark")
            _add_tips(element, tips[given])
        for key, value in list(element.attrib.items()):
            element.set(key, _value(key, value, name))
        if _LINK in element.attrib:
            element.set("href", element.attrib.pop(_LINK))
    for key in ("width", "height", "version"):
        root.attrib.pop(key, None)
    root.set("aria-hidden", "true")
    root.set("focusable", "false")
    return ElementTree.tostring(root, encoding="unicode")


def _add_tips(group: ElementTree.Element, tips: tuple[str, ...]) -> None:
    parts = group.findall(f".//{{{_SVG}}}use") or group.findall(f"./{{{_SVG}}}path")
    if len(parts) == len(tips):
        for part, tip in zip(parts, tips, strict=True):
            title = ElementTree.SubElement(part, f"{{{_SVG}}}title")
            title.text = tip


def _value(key: str, value: str, name: str) -> str:
    if key == "id":
        return f"{name}-{value}"
    if key == _LINK:
        return value.replace("#", f"#{name}-")
    value = value.replace("url(#", f"url(#{name}-")
    if key == "style":
        value = _FONT.sub(_font, value)
        for color, variable in VARIABLES.items():
            value = value.replace(color, variable)
    return value


def _font(found: re.Match[str]) -> str:
    weight = (found["weight"] or "").strip()
    return f"font-size: {found['size']}" + (f"; font-weight: {weight}" if weight else "")
