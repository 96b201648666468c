"""Who drafted in each phase of a measurement, and how much: what the adaptive arm chose."""

from __future__ import annotations

from dataclasses import dataclass

from autospec.bench.phases import ADAPTIVE, OFF
from autospec.report.page import Chart, DataTable, Section, chart
from autospec.report.readers.bench_run import BenchRun, ChoiceShare
from autospec.report.sections.bars import Bar, Segment, bar_heights, draw_bars
from autospec.report.theme import Key, proposer_roles
from autospec.report.wording import percent


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
    bars = tuple(
        Bar(
            title,
            tuple(
                Segment(
                    part.proposer,
                    part.share,
                    roles[part.proposer],
                    f"k {part.k:.1f}" if part.k else "",
                )
                for part in parts
            ),
        )
        for title, parts in phases
    )
    wide, narrow = bar_heights(bars)
    rows = tuple(
        (title, part.proposer, percent(part.share), f"{part.k:.1f}")
        for title, parts in phases
        for part in parts
    )
    return chart(
        name,
        run.name if is_named else "",
        f"Share of {', '.join(ordered)} in each phase" + (f", {run.name}" if is_named else ""),
        lambda sheet: draw_bars(sheet, bars),
        wide,
        DataTable(
            "Requests × workload, by proposer",
            ("phase", "proposer", "share of request steps", "mean k"),
            rows,
        ),
        keys=tuple(Key(each, roles[each]) for each in ordered),
        narrow_height=narrow,
    )
