"""What a step costs: the model that was learned against the times that were measured."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from matplotlib.ticker import FuncFormatter, MaxNLocator

from autospec.octave import octave_of
from autospec.profile.fitted_cost import CostCell, CostFit
from autospec.report.drawing import Sheet
from autospec.report.page import Chart, DataTable, Section, chart
from autospec.report.readers.journal_run import JournalRun, StepPoint
from autospec.report.readers.profile_counts import ProfileCounts
from autospec.report.readers.tune_run import SurfacePoint, TuneRun
from autospec.report.sections.scales import fixed
from autospec.report.theme import SCALE, Key, paint
from autospec.report.wording import count, duration, percent

MOST_LOADS = len(SCALE)
_FEWEST = 4  # steps behind a point
_LINE_POINTS = 24
_REACH = 1.6  # how far beyond what was seen the model is drawn


@dataclass(frozen=True, slots=True)
class Measured:
    """Steps that carried about as many tokens: their mean or median, and where most of them lie."""

    tokens: float
    seconds: float
    low: float
    high: float
    modeled: float | None
    steps: float
    is_plain: bool


@dataclass(frozen=True, slots=True)
class LoadCost:
    """Steps at one octave of load, and the model's line through (tokens, seconds)."""

    octave: int
    measured: tuple[Measured, ...]
    line: tuple[tuple[float, float], ...]


def octave_name(octave: int) -> str:
    """The numbers of running requests in an octave."""
    high = 1 << octave
    low = high // 2 + 1 if octave else 1
    return str(high) if low == high else f"{low}–{high}"


def costs_of_profile(fit: CostFit) -> tuple[LoadCost, ...]:
    """The model's line for each load that a profile has steps of, at their mean context."""
    by_octave: dict[int, list[CostCell]] = defaultdict(list)
    for cell in fit.cells:
        by_octave[cell.octave].append(cell)
    return tuple(_profile_cost(fit, octave, cells) for octave, cells in sorted(by_octave.items()))


def _profile_cost(fit: CostFit, octave: int, cells: list[CostCell]) -> LoadCost:
    widest = max(cells, key=lambda cell: cell.tokens)
    requests = max(1, round(widest.requests))
    context = round(widest.context_tokens)

    def seconds(tokens: float) -> float:
        return fit.model.verify_seconds(round(tokens), requests, context, widest.is_speculative)

    drafting = widest.predicted_seconds - seconds(widest.tokens)
    ends = requests, max(requests + 1, widest.tokens * _REACH)
    line = [
        (float(tokens), seconds(tokens) + drafting)
        for tokens in np.unique(np.geomspace(*ends, _LINE_POINTS).round())
        if tokens > requests or not widest.is_speculative
    ]
    if widest.is_speculative:
        plain = fit.model.verify_seconds(requests, requests, context, speculating=False)
        line.insert(0, (float(requests), plain))
    return LoadCost(
        octave,
        tuple(
            Measured(
                cell.tokens, cell.seconds, cell.seconds, cell.seconds, cell.predicted_seconds,
                cell.steps, not cell.is_speculative,
            )
            for cell in cells
        ),
        tuple(line),
    )  # fmt: skip


def costs_of_journal(points: Sequence[StepPoint]) -> tuple[LoadCost, ...]:
    """Medians of steps alike in load and tokens, with the model's medians for the same steps."""
    groups: dict[tuple[int, bool, int], list[StepPoint]] = defaultdict(list)
    for point in points:
        is_plain = point.tokens == point.requests
        size = round(2.0 * np.log2(max(1, point.tokens)))
        groups[octave_of(point.requests), is_plain, size].append(point)
    by_octave: dict[int, list[Measured]] = defaultdict(list)
    for (octave, is_plain, _), group in sorted(groups.items()):
        if len(group) >= _FEWEST:
            by_octave[octave].append(_measured(group, is_plain))
    return tuple(
        LoadCost(
            octave,
            tuple(found),
            tuple(
                sorted((each.tokens, each.modeled) for each in found if each.modeled is not None)
            ),
        )
        for octave, found in sorted(by_octave.items())
    )


def _measured(group: list[StepPoint], is_plain: bool) -> Measured:
    seconds = [point.seconds for point in group]
    modeled = [each.predicted_seconds for each in group if each.predicted_seconds is not None]
    low, high = np.percentile(seconds, (25, 75))
    return Measured(
        tokens=median(point.tokens for point in group),
        seconds=median(seconds),
        low=float(low),
        high=float(high),
        modeled=median(modeled) if modeled else None,
        steps=len(group),
        is_plain=is_plain,
    )


def costs_of_surface(points: Sequence[SurfacePoint]) -> tuple[LoadCost, ...]:
    """Measured points of a designed set; the model fitted to them is in the profile."""
    by_octave: dict[int, list[Measured]] = defaultdict(list)
    for each in points:
        seconds, half = each.median_seconds, each.spread_seconds / 2.0
        tokens = each.requests * (1 + each.k)
        by_octave[octave_of(each.requests)].append(
            Measured(
                tokens, seconds, seconds - half, seconds + half, None, each.replicates, each.k == 0
            )
        )
    return tuple(
        LoadCost(octave, tuple(sorted(found, key=lambda each: each.tokens)), ())
        for octave, found in sorted(by_octave.items())
    )


def cost_section(
    profiles: Sequence[ProfileCounts],
    journals: Sequence[JournalRun],
    tunes: Sequence[TuneRun] = (),
) -> Section | None:
    """Of every profile and journal with measured steps; None without any."""
    found: list[tuple[str, tuple[LoadCost, ...], str]] = []
    for run in journals:
        note = "Dots are medians of steps alike, their lines reach from the lower to the upper "
        note += "quartile; the curve is the model's time for the same steps, as told beforehand."
        if run.error_steps:
            off = percent(run.error_sum / run.error_steps)
            note += f" On average a step took {off} more or less than told."
        if run.tells_prefill and run.odd_steps:
            note += f" {count(run.odd_steps)} steps that prefilled as well are left out."
        found.append((run.name, costs_of_journal(run.points), note))
    for profile in profiles:
        if profile.cost is not None:
            note = "Curves are the model at the mean context of each load; dots are means of the "
            note += "steps it was fitted to, which weigh fast steps more, as the fit does."
            found.append((profile.name, costs_of_profile(profile.cost), note))
    for tune in tunes:
        note = "Medians of replicated steps; lines are their spread. The profile has the model."
        found.append((tune.name, costs_of_surface(tune.surface), note))
    kept = [each for each in found if each[1]]
    if not kept:
        return None
    return Section(
        "cost",
        "What a step costs",
        (
            "The time of a step by the tokens that go through the target: the running requests "
            "themselves and the draft tokens to verify. The flatter a curve, the cheaper it is to "
            "verify one more.",
        ),
        tuple(
            _chart(f"cost-{number}", name, costs, note, len(kept) > 1)
            for number, (name, costs, note) in enumerate(kept)
        ),
    )


def _chart(name: str, source: str, costs: tuple[LoadCost, ...], note: str, is_named: bool) -> Chart:
    most = sorted(costs, key=lambda each: -sum(point.steps for point in each.measured))
    drawn = tuple(sorted(most[:MOST_LOADS], key=lambda each: each.octave))
    first = MOST_LOADS - len(drawn)
    roles = [SCALE[first + index] for index in range(len(drawn))]
    keys = [
        Key(f"{octave_name(each.octave)} running", role, "line")
        for each, role in zip(drawn, roles, strict=True)
    ]
    return chart(
        name,
        source if is_named else "",
        "Step time by tokens in the target's forward, measured and modeled, for "
        f"{', '.join(key.label for key in keys)}" + (f", {source}" if is_named else ""),
        lambda sheet: _draw(sheet, drawn, roles),
        330,
        _table(costs),
        keys=(*keys, Key("with drafts", "muted", "dot"), Key("plain", "muted", "ring")),
        note=note,
    )


def _draw(sheet: Sheet, costs: tuple[LoadCost, ...], roles: list[str]) -> None:
    axes = sheet.axes()
    for cost, role in zip(costs, roles, strict=True):
        color = paint(role)
        if cost.line:
            xs = [x for x, _ in cost.line]
            ys = [1e3 * y for _, y in cost.line]
            axes.plot(xs, ys, color=color, alpha=0.9, linewidth=1.5)
        for is_plain in (True, False):
            points = [each for each in cost.measured if each.is_plain == is_plain]
            if not points:
                continue
            xs = [each.tokens for each in points]
            axes.vlines(
                xs, [1e3 * each.low for each in points], [1e3 * each.high for each in points],
                color=color, alpha=0.45, linewidth=2,
            )  # fmt: skip
            (drawn,) = axes.plot(
                xs, [1e3 * each.seconds for each in points], "o", color=color, markersize=6,
                markerfacecolor=paint("surface") if is_plain else color, markeredgewidth=1.6,
            )  # fmt: skip
            sheet.mark(
                drawn,
                [
                    f"{octave_name(cost.octave)} running, {each.tokens:.0f} tokens: "
                    f"{duration(each.seconds)}"
                    + ("" if each.modeled is None else f", modeled {duration(each.modeled)}")
                    for each in points
                ],
            )
    _scale(sheet, costs)
    axes.set_ylabel("step time, ms")
    axes.set_xlabel("tokens through the target (logarithmic)")


def _scale(sheet: Sheet, costs: tuple[LoadCost, ...]) -> None:
    axes = sheet.figure.axes[0]
    tokens = [each.tokens for cost in costs for each in cost.measured]
    tokens += [x for cost in costs for x, _ in cost.line]
    axes.set_xscale("log", base=2)
    powers = [1 << power for power in range(14)]
    low, high = min(tokens) / 1.2, max(tokens) * 1.2
    ticks = [power for power in powers if low <= power <= high][:: 2 if sheet.is_narrow else 1]
    fixed(axes.xaxis, ticks, [f"{tick:g}" for tick in ticks])
    axes.set_xlim(low, high)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_locator(MaxNLocator(6))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _table(costs: tuple[LoadCost, ...]) -> DataTable:
    rows = []
    for cost in costs:
        for each in cost.measured:
            off = None if each.modeled is None else each.modeled / each.seconds - 1.0
            rows.append(
                (
                    octave_name(cost.octave),
                    "plain" if each.is_plain else "with drafts",
                    f"{each.tokens:.0f}",
                    count(each.steps),
                    duration(each.seconds),
                    "–" if each.modeled is None else duration(each.modeled),
                    "–" if off is None else f"{100 * off:+.1f} %".replace("-", "−"),
                )
            )
    return DataTable(
        "By running requests",
        ("running", "step", "tokens", "steps", "measured", "modeled", "difference"),
        tuple(rows),
    )
