"""A report as records, and its HTML: one file that asks the network for nothing."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from autospec.report.drawing import Draw, render
from autospec.report.theme import Key


@dataclass(frozen=True, slots=True)
class DataTable:
    """Columns and rows as text; after the first, columns of numbers align right."""

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    @property
    def numeric(self) -> tuple[bool, ...]:
        """Which columns hold numbers."""
        return tuple(
            column > 0 and all(_is_number(row[column]) for row in self.rows)
            for column in range(len(self.columns))
        )


def _is_number(text: str) -> bool:
    return not text or text[0] in "–-" or text[0].isdigit()


@dataclass(frozen=True, slots=True)
class Chart:
    """One drawing and the figures behind it. ``about`` says what it shows to who cannot see it."""

    name: str
    title: str
    about: str
    wide: str
    narrow: str
    keys: tuple[Key, ...]
    note: str
    table: DataTable


def chart(
    name: str,
    title: str,
    about: str,
    draw: Draw,
    height: int,
    table: DataTable,
    keys: tuple[Key, ...] = (),
    note: str = "",
    narrow_height: int | None = None,
) -> Chart:
    """Draw a chart in both widths; ``name`` is its id, heights are in CSS pixels."""
    wide, narrow = render(draw, name, height, narrow_height)
    return Chart(name, title, about, wide, narrow, keys, note, table)


@dataclass(frozen=True, slots=True)
class Section:
    """Charts and tables about one question; ``lead`` answers it in words."""

    name: str
    title: str
    lead: tuple[str, ...]
    charts: tuple[Chart, ...] = ()
    tables: tuple[DataTable, ...] = ()


@dataclass(frozen=True, slots=True)
class Figure:
    """A number worth reading first."""

    value: str
    label: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one input says, in sentences and a few figures."""

    source: str
    sentences: tuple[str, ...]
    figures: tuple[Figure, ...]


@dataclass(frozen=True, slots=True)
class Source:
    """An input of the report and what it was measured on."""

    name: str
    kind: str
    date: str
    facts: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Page:
    """A whole report. ``absent`` says in sentences what could not be shown, and what it takes."""

    title: str
    subtitle: str
    verdicts: tuple[Verdict, ...]
    sections: tuple[Section, ...]
    sources: tuple[Source, ...]
    absent: tuple[str, ...]


def page_html(page: Page) -> str:
    """The page as one HTML document."""
    folder = resources.files("autospec.report")
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["svg"] = Markup
    template = environment.from_string((folder / "page.html.j2").read_text(encoding="utf-8"))
    style = Markup((folder / "page.css").read_text(encoding="utf-8"))
    return template.render(page=page, style=style)
