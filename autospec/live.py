"""What is shown while a measurement runs: a live panel on a terminal, else a line a block."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from types import TracebackType
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from autospec.arms import StepView
from autospec.phases import (
    PLAIN,
    Block,
    BlockResult,
    Choice,
    Measurement,
    add_results,
    shares,
    tokens_per_second,
)

PROPOSER_STYLES = {
    "ngram": "cyan",
    "suffix": "magenta",
    "draft_model": "yellow",
    "mlp_speculator": "blue",
    "medusa": "blue",
    "eagle": "blue",
    "eagle3": "blue",
    "off": "white",
}
_REFRESH_SECONDS = 0.25
_RECENT_STEPS = 24
_BAR = 24


class View(Protocol):
    """Told what happens, in order; nothing it does is inside a timed step."""

    def begin(self, block: Block, arm: str) -> None: ...
    def step(self, step: StepView) -> None: ...
    def end(self, block: Block, arm: str, result: BlockResult) -> None: ...
    def __enter__(self) -> View: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


def open_view(console: Console, title: str, measurement: Measurement, blocks: int) -> View:
    """The view that suits the console."""
    if console.is_terminal:
        return _Panel(console, title, measurement, blocks)
    return _Lines(console, measurement, blocks)


def say(console: Console, text: str) -> None:
    """Print a line as it is: no markup, no colors of rich's own, no wrapping."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def clock_text(seconds: float) -> str:
    """Minutes and seconds."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def bar(value: float, greatest: float, width: int = _BAR) -> str:
    """A bar of at least one cell for a value above 0."""
    if value <= 0.0 or greatest <= 0.0:
        return ""
    return "█" * max(1, round(width * value / greatest))


class _Lines:
    """One line for every block and arm."""

    def __init__(self, console: Console, measurement: Measurement, blocks: int) -> None:
        self._console = console
        self._measurement = measurement
        self._total = blocks * len(measurement.arms)
        self._done = 0
        self._phase = -1
        self._began = time.monotonic()

    def __enter__(self) -> _Lines:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def begin(self, block: Block, arm: str) -> None:
        if block.phase == self._phase:
            return
        self._phase = block.phase
        phases = self._measurement.phases
        phase = phases[block.phase]
        say(
            self._console,
            f"phase {block.phase + 1}/{len(phases)}: load {phase.load}, {phase.workload}",
        )

    def step(self, step: StepView) -> None:
        return None

    def end(self, block: Block, arm: str, result: BlockResult) -> None:
        self._done += 1
        rounds = self._measurement.phases[block.phase].rounds
        elapsed = clock_text(time.monotonic() - self._began)
        speed = tokens_per_second(result) or 0.0
        say(
            self._console,
            f"  [{elapsed} {100 * self._done // self._total:3d}%] round {block.round + 1}/{rounds}"
            f"  {arm:<16} {speed:7.1f} tokens/s  {drafting_text(result.choices)}".rstrip(),
        )


class _Panel:
    """A panel that is redrawn between steps, at most a few times a second."""

    def __init__(self, console: Console, title: str, measurement: Measurement, blocks: int) -> None:
        self._title = title
        self._measurement = measurement
        self._total = blocks * len(measurement.arms)
        self._done = 0
        self._began = time.monotonic()
        self._drawn = 0.0
        self._block: Block | None = None
        self._arm = ""
        self._round: dict[str, BlockResult] = {}  # finished blocks of the round that runs
        self._recent: list[StepView] = []
        self._tokens = 0
        self._seconds = 0.0
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> _Panel:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def begin(self, block: Block, arm: str) -> None:
        if block is not self._block:
            self._round = {}
        self._block, self._arm = block, arm
        self._recent, self._tokens, self._seconds = [], 0, 0.0
        self._draw()

    def step(self, step: StepView) -> None:
        self._recent = [*self._recent[1 - _RECENT_STEPS :], step]
        self._tokens += step.tokens
        self._seconds += step.seconds
        if time.monotonic() - self._drawn >= _REFRESH_SECONDS:
            self._draw()

    def end(self, block: Block, arm: str, result: BlockResult) -> None:
        self._done += 1
        self._round[arm] = result

    def _draw(self) -> None:
        self._drawn = time.monotonic()
        if self._block is None:
            return
        parts: list[Table | Text] = [self._head(), Text(), self._arms(), Text(), self._now()]
        done = self._finished()
        if done is not None:
            parts += [Text(), done]
        self._live.update(Panel(Group(*parts), title=self._title, padding=(0, 1)), refresh=True)

    def _head(self) -> Table:
        assert self._block is not None
        phase = self._measurement.phases[self._block.phase]
        head = Table.grid(expand=True, padding=(0, 2))
        head.add_column()
        head.add_column(justify="right")
        text = Text.assemble(
            f"phase {self._block.phase + 1}/{len(self._measurement.phases)}   load ",
            (str(phase.load), "bold"),
            "   workload ",
            (phase.workload, "bold"),
            f"   round {self._block.round + 1}/{phase.rounds}",
        )
        progress = Table.grid(padding=(0, 1))
        progress.add_row(
            clock_text(time.monotonic() - self._began),
            ProgressBar(total=self._total, completed=self._done, width=16),
        )
        head.add_row(text, progress)
        return head

    def _arms(self) -> Table:
        assert self._block is not None
        earlier = self._measurement.results
        speeds: dict[str, float] = {}
        for arm in self._measurement.arms:
            parts = list(earlier[arm][self._block.phase])
            if arm in self._round:
                parts.append(self._round[arm])
            elif arm == self._arm:
                parts.append(BlockResult(self._tokens, self._seconds, 0, 0))
            speeds[arm] = tokens_per_second(add_results(parts)) or 0.0
        greatest = max(speeds.values())
        table = Table.grid(padding=(0, 2))
        table.add_column(width=18)
        table.add_column(justify="right", width=14)
        table.add_column(justify="right", width=6)
        table.add_column()
        for arm, speed in speeds.items():
            runs = arm == self._arm
            plain = speeds.get(PLAIN, 0.0)
            ratio = f"{speed / plain:.2f}x" if plain and speed else ""
            table.add_row(
                Text(("▶ " if runs else "  ") + arm, style="bold" if runs else ""),
                f"{speed:.1f} tokens/s" if speed else "",
                ratio,
                Text(bar(speed, greatest), style="green" if runs else "blue"),
            )
        return table

    def _now(self) -> Table:
        choices: Counter[Choice] = Counter()
        for step in self._recent:
            choices.update(step.choices)
        seconds = sum(step.seconds for step in self._recent)
        tokens = sum(step.tokens for step in self._recent)
        table = Table.grid(padding=(0, 2))
        table.add_column(width=14)
        table.add_column()
        if self._recent:
            last = self._recent[-1]
            speed = tokens / seconds if seconds else 0.0
            table.add_row("  now", f"{last.running} running, {last.mode}, {speed:.1f} tokens/s")
            table.add_row("  who drafts", _drafting_bars(choices))
        return table

    def _finished(self) -> Table | None:
        done = [
            index
            for index in range(len(self._measurement.phases))
            if self._block is not None and index < self._block.phase
        ]
        if not done:
            return None
        table = Table("done", "load", "workload", box=None, padding=(0, 2), header_style="dim")
        for arm in self._measurement.arms:
            table.add_column(arm, justify="right")
        for index in done:
            phase = self._measurement.phases[index]
            sums = self._measurement.sums(index)
            speeds = [tokens_per_second(sums[arm]) or 0.0 for arm in self._measurement.arms]
            best = max(speeds)
            cells = [
                Text(f"{speed:.1f}", style="bold green" if speed == best else "")
                for speed in speeds
            ]
            table.add_row(str(index + 1), str(phase.load), phase.workload, *cells)
        return table


def _drafting_bars(choices: Counter[Choice]) -> Text:
    text = Text()
    for name, (share, k) in shares(choices).items():
        style = PROPOSER_STYLES.get(name, "green")
        text.append(bar(share, 1.0, _BAR), style=style)
        text.append(f" {name} {share:.0%}" + (f" k {k:.1f}" if k else "") + "   ")
    return text


def drafting_text(choices: Mapping[Choice, int]) -> str:
    """Share and mean k of everyone who drafted, e.g. ``suffix 62% k 5.1, off 38%``."""
    return ", ".join(
        f"{name} {share:.0%}" + (f" k {k:.1f}" if k else "")
        for name, (share, k) in shares(choices).items()
    )
