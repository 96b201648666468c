"""What the guard rails did: probes, holds at plain decoding, steps without the policy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.ticker import MaxNLocator

from autospec.records import Mode
from autospec.report.drawing import Sheet
from autospec.report.page import Chart, DataTable, Section, chart
from autospec.report.readers.journal_run import MODES, JournalRun, ModeSums
from autospec.report.sections.timeline import Timeline, time_label, timeline_of
from autospec.report.theme import ACCENT, BAD, QUIET, WARN, Key, paint
from autospec.report.wording import count, duration, percent, plural, rate

_ROLES: dict[Mode, str] = {
    "plain": QUIET, "speculate": ACCENT, "probe": "s5", "guard": WARN, "fallback": BAD,
}  # fmt: skip
_WORDS: dict[Mode, str] = {
    "plain": "plain by choice",
    "speculate": "speculating",
    "probe": "trying what is not in use",
    "guard": "held at plain decoding by the guard",
    "fallback": "without the policy, after a fault",
}


def rails_section(runs: Sequence[JournalRun]) -> Section | None:
    """None without a journal."""
    if not runs:
        return None
    lead = (
        "The guard compares goodput with what plain decoding would bring, and holds speculation "
        "off while it loses. Probes try what is not in use, so that nothing is given up for good.",
        *(
            sentence if len(runs) == 1 else f"{run.name}: {sentence}"
            for run in runs
            for sentence in rails_sentences(run)
        ),
    )
    return Section(
        "rails",
        "Guard rails",
        lead,
        tuple(_chart(f"rails-{number}", run, len(runs) > 1) for number, run in enumerate(runs)),
    )


def rails_sentences(run: JournalRun) -> tuple[str, ...]:
    """What happened, in words."""
    guard, probe, fallback = run.modes["guard"], run.modes["probe"], run.modes["fallback"]
    sentences = []
    if guard.steps:
        sentences.append(
            f"The guard held speculation off {plural(guard.episodes, 'time')}, for "
            f"{plural(guard.steps, 'step')} in all and {plural(guard.longest, 'step')} at most: "
            f"{percent(_share(guard, run))} of the time."
        )
    else:
        sentences.append("The guard never had to step in.")
    sentences.append(
        f"{plural(probe.steps, 'probe')} took {percent(_share(probe, run))} of the time."
        if probe.steps
        else "There were no probes."
    )
    sentences.append(
        f"{plural(fallback.steps, 'step')} went on without the policy after a fault: see the log."
        if fallback.steps
        else "No step had to go on without the policy."
    )
    return (" ".join(sentences),)


def _share(mode: ModeSums, run: JournalRun) -> float:
    return mode.seconds / run.seconds if run.seconds > 0.0 else 0.0


def _chart(name: str, run: JournalRun, is_named: bool) -> Chart:
    timeline = timeline_of(run)
    seen = tuple(mode for mode in MODES if run.modes[mode].steps)
    return chart(
        name,
        run.name if is_named else "",
        "Share of steps by mode over time" + (f", {run.name}" if is_named else ""),
        lambda sheet: _draw(sheet, timeline, seen),
        190,
        _table(run),
        keys=tuple(Key(_WORDS[mode], _ROLES[mode]) for mode in seen),
    )


def _draw(sheet: Sheet, timeline: Timeline, seen: tuple[Mode, ...]) -> None:
    axes = sheet.axes()
    edges = np.append(timeline.starts, timeline.starts[-1] + timeline.width)
    floor = np.zeros(len(timeline.starts))
    for mode in seen:
        share = np.nan_to_num(timeline.modes[MODES.index(mode)])
        sheet.mark(
            axes.stairs(
                floor + share, edges, baseline=floor, fill=True, color=paint(_ROLES[mode]),
                linewidth=0,
            )
        )  # fmt: skip
        floor = floor + share
    axes.set_ylim(0, 1)
    axes.set_yticks([0, 0.5, 1], ["0 %", "50 %", "100 %"])
    axes.set_xlim(0, edges[-1])
    axes.xaxis.set_major_locator(MaxNLocator(4 if sheet.is_narrow else 8))
    axes.set_xlabel(time_label(timeline))


def _table(run: JournalRun) -> DataTable:
    rows = []
    for mode in MODES:
        sums = run.modes[mode]
        if sums.steps:
            rows.append(
                (
                    f"{mode}: {_WORDS[mode]}",
                    count(sums.steps),
                    duration(sums.seconds),
                    percent(_share(sums, run)),
                    rate(sums.tokens / sums.seconds) if sums.seconds > 0.0 else "–",
                    count(sums.episodes),
                    count(sums.longest),
                )
            )
    return DataTable(
        "By mode",
        ("mode", "steps", "time", "share of time", "tokens/s", "episodes", "longest, steps"),
        tuple(rows),
    )
