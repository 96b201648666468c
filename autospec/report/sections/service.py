"""Where a service's time goes, as a check has seen it from outside."""

from __future__ import annotations

from collections.abc import Sequence

from autospec.report.drawing import Sheet
from autospec.report.page import Chart, DataTable, Section, chart
from autospec.report.readers.check_run import CheckRun, Level, Percentiles
from autospec.report.sections.scales import fixed
from autospec.report.theme import INK, QUIET, SURFACE, Key, paint
from autospec.report.wording import count, duration, percent, rate

_PARTS = (
    ("queue", "waiting", QUIET),
    ("prefill", "reading the prompt", "s3"),
    ("decode", "decoding", "s1"),
)
_LABELED = 0.08


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


def _chart(name: str, run: CheckRun, levels: tuple[Level, ...], is_named: bool) -> Chart:
    rows = tuple(
        (level_name(level), *(percent(getattr(level.shares, part)) for part, _, _ in _PARTS))
        for level in levels
    )
    return chart(
        name,
        run.name if is_named else "",
        "Shares of the requests' time spent waiting, reading the prompt and decoding, by load"
        + (f", {run.name}" if is_named else ""),
        lambda sheet: _draw(sheet, levels),
        46 + 34 * len(levels),
        DataTable("By load", ("load", *(words for _, words, _ in _PARTS)), rows),
        keys=tuple(Key(words, role) for _, words, role in _PARTS),
        narrow_height=46 + 48 * len(levels),
    )


def _draw(sheet: Sheet, levels: tuple[Level, ...]) -> None:
    axes = sheet.axes()
    height = 0.44 if sheet.is_narrow else 0.62
    for row, level in enumerate(levels):
        left = 0.0
        if sheet.is_narrow:
            axes.annotate(
                level_name(level), (0, row - 0.5), xycoords=("axes fraction", "data"), va="center"
            )
        for part, words, role in _PARTS:
            share = float(getattr(level.shares, part))
            if share <= 0.0:
                continue
            bars = axes.barh(
                row, share, height, left=left, color=paint(role), edgecolor=paint(SURFACE),
                linewidth=1.5,
            )  # fmt: skip
            for bar in bars:
                sheet.mark(bar, [f"{level_name(level)}: {words} {percent(share)}"])
            if share >= _LABELED:
                axes.text(
                    left + share / 2, row, percent(share), ha="center", va="center", fontsize=11,
                    color=paint(INK if role == QUIET else SURFACE),
                )  # fmt: skip
            left += share
    axes.grid(visible=False)
    axes.spines["bottom"].set_visible(False)
    axes.set_xlim(0, 1)
    fixed(axes.xaxis, (0, 0.5, 1), ("0 %", "50 %", "100 %"))
    titles = [] if sheet.is_narrow else [level_name(level) for level in levels]
    axes.set_yticks(list(range(len(titles))), titles)
    axes.tick_params(axis="y", labelcolor=paint(INK))
    axes.set_ylim(len(levels) - 0.4, -0.75 if sheet.is_narrow else -0.5)


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
                _three(level.ttft),
                _three(level.tpot),
                _three(level.end_to_end),
                "–" if level.gpu_use is None else percent(level.gpu_use),
            )
            for level in run.levels
        ),
    )  # fmt: skip


def _three(seconds: Percentiles | None) -> str:
    if seconds is None:
        return "–"
    return " / ".join(duration(each) for each in (seconds.p50, seconds.p95, seconds.p99))


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
