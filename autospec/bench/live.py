"""What is shown while a measurement runs: a live panel on a terminal, else lines now and then."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from autospec.bench.phases import (
    ADAPTIVE,
    PLAIN,
    Block,
    BlockResult,
    Choice,
    Measurement,
    add_results,
    shares,
    tokens_per_second,
)
from autospec.bench.serving import StepView

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
_LINE_SECONDS = 15.0
_BAR = 24


class View(Protocol):
    """Told what happens, in order; nothing it does is inside a timed step. ``share`` is how far
    the arm is in its block."""

    def begin(self, block: Block) -> None: ...
    def step(self, arm: str, step: StepView, share: float) -> None: ...
    def end(self, block: Block, results: Mapping[str, BlockResult]) -> None: ...
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


class _Round:
    """How far each arm is in the block that all of them serve, and how fast it was in it."""

    def __init__(self, measurement: Measurement, block: Block) -> None:
        self.block = block
        self.phase = measurement.phases[block.phase]
        self.shares = dict.fromkeys(measurement.arms, 0.0)
        self.recent: dict[str, list[StepView]] = {arm: [] for arm in measurement.arms}
        self._tokens = dict.fromkeys(measurement.arms, 0)
        self._seconds = dict.fromkeys(measurement.arms, 0.0)

    def add(self, arm: str, step: StepView, share: float) -> None:
        self.shares[arm] = share
        self._tokens[arm] += step.tokens
        self._seconds[arm] += step.seconds
        self.recent[arm] = [*self.recent[arm][1 - _RECENT_STEPS :], step]

    @property
    def share(self) -> float:
        """How far they are, all together."""
        return sum(self.shares.values()) / len(self.shares)

    def result(self, arm: str) -> BlockResult:
        """What an arm did so far, as far as its speed goes."""
        return BlockResult(self._tokens[arm], self._seconds[arm], 0, 0)


class _Lines:
    """One line for every block and arm, and one now and then while they are served."""

    def __init__(self, console: Console, measurement: Measurement, blocks: int) -> None:
        self._console = console
        self._measurement = measurement
        self._blocks = blocks
        self._done = 0
        self._phase = -1
        self._round: _Round | None = None
        self._began = self._told = time.monotonic()

    def __enter__(self) -> _Lines:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def begin(self, block: Block) -> None:
        self._round = _Round(self._measurement, block)
        self._told = time.monotonic()
        if block.phase == self._phase:
            return
        self._phase = block.phase
        phases = self._measurement.phases
        phase = phases[block.phase]
        say(
            self._console,
            f"phase {block.phase + 1}/{len(phases)}: load {phase.load}, {phase.workload}",
        )

    def step(self, arm: str, step: StepView, share: float) -> None:
        assert self._round is not None
        self._round.add(arm, step, share)
        if time.monotonic() - self._told >= _LINE_SECONDS:
            speeds = ", ".join(
                f"{name} {tokens_per_second(self._round.result(name)) or 0.0:.1f}"
                for name in self._measurement.arms
            )
            self._say(f"so far {speeds} tokens/s")

    def end(self, block: Block, results: Mapping[str, BlockResult]) -> None:
        for arm in self._measurement.arms:
            speed = tokens_per_second(results[arm]) or 0.0
            text = f"{arm:<16} {speed:7.1f} tokens/s  {drafting_text(results[arm].choices)}"
            self._say(text.rstrip())
        self._done += 1

    def _say(self, text: str) -> None:
        assert self._round is not None
        self._told = time.monotonic()
        elapsed = clock_text(self._told - self._began)
        share = (self._done + self._round.share) / self._blocks
        say(
            self._console,
            f"  [{elapsed} {100 * share:3.0f}%] round {self._round.block.round + 1}/"
            f"{self._round.phase.rounds}  {text}",
        )


class _Panel:
    """A panel that is redrawn between steps, at most a few times a second."""

    def __init__(self, console: Console, title: str, measurement: Measurement, blocks: int) -> None:
        self._title = title
        self._measurement = measurement
        self._shown = ADAPTIVE if ADAPTIVE in measurement.arms else measurement.arms[-1]
        self._blocks = blocks
        self._done = 0
        self._began = time.monotonic()
        self._drawn = 0.0
        self._round: _Round | None = None
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> _Panel:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def begin(self, block: Block) -> None:
        self._round = _Round(self._measurement, block)
        self._draw()

    def step(self, arm: str, step: StepView, share: float) -> None:
        assert self._round is not None
        self._round.add(arm, step, share)
        if time.monotonic() - self._drawn >= _REFRESH_SECONDS:
            self._draw()

    def end(self, block: Block, results: Mapping[str, BlockResult]) -> None:
        self._done += 1

    def _draw(self) -> None:
        self._drawn = time.monotonic()
        if self._round is None:
            return
        now = self._round
        parts: list[Table | Text] = [
            self._head(now), Text(), self._arms(now), Text(), self._now(now.recent[self._shown])
        ]  # fmt: skip
        done = self._finished(now.block.phase)
        if done is not None:
            parts += [Text(), done]
        self._live.update(Panel(Group(*parts), title=self._title, padding=(0, 1)), refresh=True)

    def _head(self, now: _Round) -> Table:
        head = Table.grid(expand=True, padding=(0, 2))
        head.add_column()
        head.add_column(justify="right")
        text = Text.assemble(
            f"phase {now.block.phase + 1}/{len(self._measurement.phases)}   load ",
            (str(now.phase.load), "bold"),
            "   workload ",
            (now.phase.workload, "bold"),
            f"   round {now.block.round + 1}/{now.phase.rounds}",
        )
        progress = Table.grid(padding=(0, 1))
        progress.add_row(
            clock_text(time.monotonic() - self._began),
            ProgressBar(total=self._blocks, completed=self._done + now.share, width=16),
        )
        head.add_row(text, progress)
        return head

    def _arms(self, now: _Round) -> Table:
        earlier = self._measurement.results
        speeds = {
            arm: tokens_per_second(add_results([*earlier[arm][now.block.phase], now.result(arm)]))
            or 0.0
            for arm in self._measurement.arms
        }
        greatest = max(speeds.values())
        plain = speeds.get(PLAIN, 0.0)
        table = Table.grid(padding=(0, 2))
        table.add_column(width=18)
        table.add_column(justify="right", width=14)
        table.add_column(justify="right", width=6)
        table.add_column()
        for arm, speed in speeds.items():
            is_shown = arm == self._shown
            table.add_row(
                Text("  " + arm, style="bold" if is_shown else ""),
                f"{speed:.1f} tokens/s" if speed else "",
                f"{speed / plain:.2f}x" if plain and speed else "",
                Text(bar(speed, greatest), style="green" if is_shown else "blue"),
            )
        return table

    def _now(self, recent: Sequence[StepView]) -> Table:
        choices: Counter[Choice] = Counter()
        for step in recent:
            choices.update(step.choices)
        seconds = sum(step.seconds for step in recent)
        tokens = sum(step.tokens for step in recent)
        table = Table.grid(padding=(0, 2))
        table.add_column(width=14)
        table.add_column()
        if recent:
            last = recent[-1]
            speed = tokens / seconds if seconds else 0.0
            table.add_row(
                f"  {self._shown}", f"{last.running} running, {last.mode}, {speed:.1f} tokens/s now"
            )
            table.add_row("  who drafts", _drafting_bars(choices))
        return table

    def _finished(self, phases: int) -> Table | None:
        """The first ``phases`` phases, which are done."""
        if not phases:
            return None
        table = Table("done", "load", "workload", box=None, padding=(0, 2), header_style="dim")
        for arm in self._measurement.arms:
            table.add_column(arm, justify="right")
        for index in range(phases):
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
