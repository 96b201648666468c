"""Who drafted in each phase of a measurement, and how much: what the adaptive arm chose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autospec.phases import ADAPTIVE, OFF
from autospec.report.drawing import Sheet
from autospec.report.page import Chart, DataTable, Section, chart
from autospec.report.readers.bench_run import BenchRun, ChoiceShare
from autospec.report.sections.scales import fixed
from autospec.report.theme import INK, SURFACE, Key, paint, proposer_roles
from autospec.report.wording import percent, shortened

_LABELED, _LABELED_LONG = 0.07, 0.17
"""Shares below these carry no label, or a short one."""


@dataclass(frozen=True, slots=True)
class Part:
    """A proposer's share of the request steps of a phase, and its mean k."""

    proposer: str
    share: float
    k: float


def parts_of(choices: tuple[ChoiceShare, ...]) -> tuple[Part, ...]:
    """By proposer, the largest share first and off last."""
    shares: dict[str, float] = {}
    tokens: dict[str, float] = {}
    for choice in choices:
        shares[choice.proposer] = shares.get(choice.proposer, 0.0) + choice.share
        tokens[choice.proposer] = tokens.get(choice.proposer, 0.0) + choice.share * choice.k
    names = sorted(shares, key=lambda name: (name == OFF, -shares[name]))
    return tuple(
        Part(name, shares[name], tokens[name] / shares[name]) for name in names if shares[name] > 0
    )


def drafting_section(runs: tuple[BenchRun, ...]) -> Section | None:
    """None where no adaptive arm drafted or chose not to."""
    charts = []
    for number, run in enumerate(runs):
        phases = [
            (phase.title, parts_of(phase.arms[ADAPTIVE].choices))
            for phase in run.phases
            if ADAPTIVE in phase.arms and phase.arms[ADAPTIVE].choices
        ]
        if phases:
            charts.append(_chart(f"drafting-{number}", run, tuple(phases), len(runs) > 1))
    if not charts:
        return None
    return Section(
        "drafting",
        "Who drafted",
        (
            "Shares of the request steps of the adaptive arm, with the mean number of tokens k "
            "that were verified. Off is a step of a request without a draft.",
        ),
        tuple(charts),
    )


Phases = tuple[tuple[str, tuple[Part, ...]], ...]


def _chart(name: str, run: BenchRun, phases: Phases, is_named: bool) -> Chart:
    names = dict.fromkeys(part.proposer for _, parts in phases for part in parts)
    ordered = sorted(names, key=lambda each: each == OFF)
    roles = proposer_roles(ordered)
    rows = tuple(
        (title, part.proposer, percent(part.share), f"{part.k:.1f}")
        for title, parts in phases
        for part in parts
    )
    return chart(
        name,
        run.name if is_named else "",
        f"Share of {', '.join(ordered)} in each phase" + (f", {run.name}" if is_named else ""),
        lambda sheet: _draw(sheet, phases, roles),
        46 + 34 * len(phases),
        DataTable(
            "Requests × workload, by proposer",
            ("phase", "proposer", "share of request steps", "mean k"),
            rows,
        ),
        keys=tuple(Key(each, roles[each]) for each in ordered),
        narrow_height=46 + 48 * len(phases),
    )


def _draw(sheet: Sheet, phases: Phases, roles: Mapping[str, str]) -> None:
    axes = sheet.axes()
    height = 0.44 if sheet.is_narrow else 0.62
    for row, (title, parts) in enumerate(phases):
        left = 0.0
        if sheet.is_narrow:
            axes.annotate(
                shortened(title, 46), (0, row - 0.5), xycoords=("axes fraction", "data"),
                va="center",
            )  # fmt: skip
        for part in parts:
            bars = axes.barh(
                row, part.share, height, left=left, color=paint(roles[part.proposer]),
                edgecolor=paint(SURFACE), linewidth=1.5,
            )  # fmt: skip
            for bar in bars:
                sheet.mark(bar, [f"{title}: {part.proposer} {percent(part.share)}, k {part.k:.1f}"])
            if part.share >= _LABELED * (2 if sheet.is_narrow else 1):
                text = percent(part.share)
                if part.k and part.share >= _LABELED_LONG and not sheet.is_narrow:
                    text += f", k {part.k:.1f}"
                axes.text(
                    left + part.share / 2, row, text,
                    ha="center", va="center", fontsize=11,
                    color=paint(INK if part.proposer == OFF else SURFACE),
                )  # fmt: skip
            left += part.share
    axes.grid(visible=False)
    axes.spines["bottom"].set_visible(False)
    axes.set_xlim(0, 1)
    fixed(axes.xaxis, (0, 0.5, 1), ("0 %", "50 %", "100 %"))
    titles = [] if sheet.is_narrow else [shortened(title, 40) for title, _ in phases]
    axes.set_yticks(list(range(len(titles))), titles)
    axes.tick_params(axis="y", labelcolor=paint(INK))
    axes.set_ylim(len(phases) - 0.4, -0.75 if sheet.is_narrow else -0.5)
