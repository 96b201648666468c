"""What a tuning run tried, and what its finalists brought."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.ticker import MaxNLocator

from autospec.report.drawing import Sheet
from autospec.report.page import Chart, DataTable, Section, chart
from autospec.report.readers.tune_run import Trial, TuneRun
from autospec.report.sections.scales import plain_line, speedup_axis
from autospec.report.theme import ACCENT, BAD, INK, Key, paint
from autospec.report.wording import duration, plural, times


def tuning_section(runs: Sequence[TuneRun]) -> Section | None:
    """None without a tuning run."""
    if not runs:
        return None
    charts, tables, lead = [], [], []
    for number, run in enumerate(runs):
        named = f"{run.name}: " if len(runs) > 1 else ""
        lead.append(named + tuning_sentence(run))
        if any(trial.score is not None for trial in run.trials):
            charts.append(_chart(f"trials-{number}", run, len(runs) > 1))
        if run.gains:
            tables.append(
                DataTable(
                    f"{run.name}: finalists against the untuned settings, on held-out requests",
                    ("settings", "goodput", "95 % interval", "kept"),
                    tuple(
                        (
                            arm,
                            times(gain.value),
                            f"{times(gain.low)} to {times(gain.high)}",
                            "yes" if arm == run.kept else "no",
                        )
                        for arm, gain in run.gains.items()
                    ),
                )
            )
    return Section("tuning", "What was tried", tuple(lead), tuple(charts), tuple(tables))


def tuning_sentence(run: TuneRun) -> str:
    """How many trials there were, and how they ended."""
    failed = [trial for trial in run.trials if trial.score is None]
    text = f"{plural(len(run.trials), 'setting')} of the proposers were tried"
    if failed:
        text += f", {len(failed)} of them without a result"
    return text + "; a setting is kept only if it wins on requests that the search never saw."


def best_so_far(trials: Sequence[Trial]) -> tuple[tuple[int, float], ...]:
    """The best speedup up to each trial that had a result."""
    found: list[tuple[int, float]] = []
    for trial in trials:
        if trial.score is not None:
            speedup = math.exp(trial.score)
            found.append((trial.number, max(speedup, found[-1][1]) if found else speedup))
    return tuple(found)


def _chart(name: str, run: TuneRun, is_named: bool) -> Chart:
    keys = [Key("a trial", ACCENT, "dot"), Key("best so far", INK, "line")]
    if any(trial.score is None for trial in run.trials):
        keys.append(Key("no result", BAD, "ring"))
    return chart(
        name,
        run.name if is_named else "",
        "Speedup of each trial over plain decoding, and the best so far"
        + (f", {run.name}" if is_named else ""),
        lambda sheet: _draw(sheet, run.trials),
        240,
        DataTable(
            "Trials in their order",
            ("trial", "speed against plain", "status", "time", "settings"),
            tuple(
                (
                    str(trial.number),
                    "–" if trial.score is None else times(math.exp(trial.score)),
                    trial.status if trial.error is None else f"{trial.status}: {trial.error}",
                    duration(trial.seconds),
                    ", ".join(f"{key} {value}" for key, value in trial.settings.items()),
                )
                for trial in run.trials
            ),
        ),
        keys=tuple(keys),
        note="Geometric mean over the loads, on the requests of the search.",
    )


def _draw(sheet: Sheet, trials: Sequence[Trial]) -> None:
    axes = sheet.axes()
    best = best_so_far(trials)
    axes.step(
        [number for number, _ in best], [speedup for _, speedup in best], where="post",
        color=paint(INK), linewidth=1.3,
    )  # fmt: skip
    ok = [(trial.number, math.exp(trial.score)) for trial in trials if trial.score is not None]
    (dots,) = axes.plot(
        [number for number, _ in ok], [speedup for _, speedup in ok], "o", color=paint(ACCENT),
        markersize=5.5,
    )  # fmt: skip
    sheet.mark(dots, [f"trial {number}: {times(speedup)}" for number, speedup in ok])
    values = [speedup for _, speedup in ok]
    failed = [trial.number for trial in trials if trial.score is None]
    speedup_axis(axes, "y", values, is_narrow=sheet.is_narrow)
    if failed:
        low = axes.get_ylim()[0]
        axes.plot(
            failed, [low * 1.02] * len(failed), "o", color=paint(BAD), markerfacecolor="none",
            markersize=5.5,
        )  # fmt: skip
    plain_line(axes, is_vertical=False)
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.set_xlabel("trial")
    axes.set_ylabel("speed against plain")
