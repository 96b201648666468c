"""The tables and bars at the end of a measurement."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from autospec.bench.live import bar, drafting_text, say
from autospec.bench.phases import (
    ADAPTIVE,
    PLAIN,
    BlockResult,
    Measurement,
    acceptance_length,
    add_results,
    spread,
    tokens_per_second,
)

_FILE_WIDTH = 120


def print_summary(console: Console, measurement: Measurement) -> None:
    """A table per phase, the total, and in a sentence or two what came out."""
    if not console.is_terminal:
        console.width = max(console.width, _FILE_WIDTH)
    for index, phase in enumerate(measurement.phases):
        rounds = len(measurement.results[measurement.arms[0]][index])
        if not rounds:
            continue
        title = f"phase {index + 1}: load {phase.load}, {phase.workload}"
        table = _table(f"{title} ({rounds} rounds)" if rounds > 1 else title)
        for arm, result in measurement.sums(index).items():
            found = spread(measurement.ratios(arm, PLAIN, index))
            ratio = "-" if found is None else f"{found.median:.2f}x"
            if found is not None and rounds > 1 and arm != PLAIN:
                ratio += f" ({found.low:.2f}–{found.high:.2f})"
            _add(table, arm, result, ratio)
        console.print(table)
    totals = measurement.total()
    plain = tokens_per_second(totals[PLAIN]) if PLAIN in totals else None
    table = _table("total: all phases")
    speeds = {arm: tokens_per_second(result) or 0.0 for arm, result in totals.items()}
    for arm, result in totals.items():
        _add(table, arm, result, f"{speeds[arm] / plain:.2f}x" if plain else "-")
    console.print(table)
    for arm, speed in speeds.items():
        style = "green" if arm == ADAPTIVE else "blue"
        drawn = bar(speed, max(speeds.values()), 40)
        console.print(Text.assemble(f"{arm:<16} ", (drawn, style), f" {speed:.1f} tokens/s"))
    console.print()
    for sentence in findings(measurement):
        say(console, sentence)


def findings(measurement: Measurement) -> list[str]:
    """What the total says, in sentences."""
    totals = measurement.total()
    speeds = {arm: tokens_per_second(result) or 0.0 for arm, result in totals.items()}
    found = []
    adaptive = speeds.get(ADAPTIVE)
    if adaptive and speeds.get(PLAIN):
        found.append(
            f"adaptive served everything at {adaptive / speeds[PLAIN]:.2f}x the speed of plain "
            "decoding"
        )
    static = {arm: speed for arm, speed in speeds.items() if arm not in (ADAPTIVE, PLAIN)}
    best = max(static, key=lambda arm: static[arm], default=None)
    if adaptive and best is not None and static[best]:
        found.append(
            f"and at {adaptive / static[best]:.2f}x that of the best single static arm, {best}"
        )
    if PLAIN in totals and len(totals) > 1:
        others = add_results(result for arm, result in totals.items() if arm != PLAIN)
        equal, requests = others.equal_outputs, others.requests
        if equal is not None:
            found.append(
                f"{equal} of {requests} outputs are those of plain decoding token for token"
                + ("" if equal == requests else "; the others differ where rounding decides a tie")
            )
    blocks = sum(len(rounds) for phases in measurement.results.values() for rounds in phases)
    disturbed = sum(result.disturbed for result in totals.values())
    if disturbed:
        found.append(
            f"other processes took processor time during {disturbed} of {blocks} timed blocks: "
            "figures of those rounds say little"
        )
    return found


def _table(title: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("arm", no_wrap=True)
    table.add_column("tokens/s", justify="right")
    table.add_column("to plain", justify="right", no_wrap=True)
    table.add_column("tokens a step", justify="right")
    table.add_column("accepted", justify="right")
    table.add_column("who drafted, share of steps and mean k")
    return table


def _add(table: Table, arm: str, result: BlockResult, ratio: str) -> None:
    speed, length = tokens_per_second(result), acceptance_length(result)
    table.add_row(
        arm,
        "-" if speed is None else f"{speed:.1f}",
        ratio,
        "-" if length is None else f"{length:.2f}",
        f"{result.accepted / result.drafted:.0%}" if result.drafted else "-",
        drafting_text(result.choices) or "nobody",
        style="bold" if arm == ADAPTIVE else "",
    )
