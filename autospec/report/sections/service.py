"""Where a service's time goes, as a check has seen it from outside."""

from __future__ import annotations

from collections.abc import Sequence

from autospec.report.page import Chart, DataTable, Section, chart
from autospec.report.readers.check_run import CheckRun, Level
from autospec.report.readers.percentiles import three
from autospec.report.sections.bars import Bar, Segment, bar_heights, draw_bars
from autospec.report.theme import QUIET, Key
from autospec.report.wording import count, percent, rate

_PARTS = (
    ("queue", "waiting", QUIET),
    ("prefill", "reading the prompt", "s3"),
    ("decode", "decoding", "s1"),
)


def service_section(runs: Sequence[CheckRun]) -> Section | None:
    """None where no check measured requests."""
    charts, tables = [], []
    for number, run in enumerate(runs):
        shared = tuple(level for level in run.levels if level.shares is not None)
        if shared:
            charts.append(_chart(f"time-{number}", run, shared, len(runs) > 1))
        if run.levels:
            tables.append(_levels(run))
        if run.workloads:
            tables.append(_workloads(run))
    if not charts and not tables:
        return None
    return Section(
        "service",
        "Where the time goes",
        (
            "Drafts speed up decoding alone: what is waiting in the queue or reading the prompt "
            "takes as long as before.",
        ),
        tuple(charts),
        tuple(tables),
    )


def level_name(level: Level) -> str:
    """The load of a level."""
    return f"{level.rate:.2g} requests/s, {level.running:.1f} running"


def bars_of(levels: tuple[Level, ...]) -> tuple[Bar, ...]:
    """The parts of the requests' time at each load; those of nothing are left out."""
    return tuple(
        Bar(
            level_name(level),
            tuple(
                Segment(words, share, role)
                for part, words, role in _PARTS
                if (share := float(getattr(level.shares, part))) > 0.0
            ),
        )
        for level in levels
    )


def _chart(name: str, run: CheckRun, levels: tuple[Level, ...], is_named: bool) -> Chart:
    bars = bars_of(levels)
    wide, narrow = bar_heights(bars)
    rows = tuple(
        (level_name(level), *(percent(getattr(level.shares, part)) for part, _, _ in _PARTS))
        for level in levels
    )
    return chart(
        name,
        run.name if is_named else "",
        "Shares of the requests' time spent waiting, reading the prompt and decoding, by load"
        + (f", {run.name}" if is_named else ""),
        lambda sheet: draw_bars(sheet, bars),
        wide,
        DataTable("By load", ("load", *(words for _, words, _ in _PARTS)), rows),
        keys=tuple(Key(words, role) for _, words, role in _PARTS),
        narrow_height=narrow,
    )


def _levels(run: CheckRun) -> DataTable:
    return DataTable(
        f"{run.name}: by load; times are p50 / p95 / p99 over requests",
        (
            "load", "requests", "failed", "tokens/s", "to the first token", "per output token",
            "whole request", "GPU in use",
        ),
        tuple(
            (
                level_name(level),
                count(level.requests),
                count(level.failed),
                rate(level.tokens_per_second),
                three(level.ttft),
                three(level.tpot),
                three(level.end_to_end),
                "–" if level.gpu_use is None else percent(level.gpu_use),
            )
            for level in run.levels
        ),
    )  # fmt: skip


def _workloads(run: CheckRun) -> DataTable:
    return DataTable(
        f"{run.name}: requests by workload, and the lookup that would have had most accepted",
        (
            "workload", "requests", "prompt tokens", "output tokens", "output repeats",
            "best lookup", "tokens a step", "accepted",
        ),
        tuple(
            (
                each.name,
                count(each.requests),
                count(each.prompt_tokens),
                count(each.output_tokens),
                percent(each.repetitiveness),
                f"{each.best.proposer}:{each.best.k}",
                f"{each.best.tokens_per_step:.2f}",
                "–" if each.best.accepted_share is None else percent(each.best.accepted_share),
            )
            for each in run.workloads
        ),
    )  # fmt: skip
