"""How a training is shown: a progress bar on a terminal, else a line now and then."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from autospec.bench.live import say
from autospec.training.fit import Report
from autospec.training.trainee import conditional

_LINE_SECONDS = 5.0


class View:
    """Told how far recording and learning are."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown = 0.0
        self._progress = Progress(
            TextColumn("{task.description:<10}"),
            BarColumn(),
            TextColumn("{task.fields[told]}"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._recording = self._progress.add_task("recording", total=1.0, told="")
        self._learning = self._progress.add_task("learning", total=1.0, told="", visible=False)
        self._drafts = ""

    def __enter__(self) -> View:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def recorded(self, tokens: int, wanted: int | None, share_of_time: float) -> None:
        """``tokens`` are there; without a number ``wanted`` the time decides."""
        share = tokens / wanted if wanted else share_of_time
        text = f"{tokens} tokens"
        self._progress.update(self._recording, completed=min(share, 1.0), told=text)
        self._line(f"recording: {text}, {min(share, 1.0):.0%}")

    def learned(self, report: Report, share: float) -> None:
        """A step is done, and about ``share`` of all."""
        if report.survived is not None:
            accepted = " ".join(f"{share:.3f}" for share in conditional(report.survived))
            self._drafts = f"held-out acceptance {accepted}"
            self._shown = 0.0
        of_all = f" of {report.steps}" if report.steps else ""
        text = f"step {report.step}{of_all}, loss {report.loss:.3f}, {self._drafts}"
        self._progress.update(self._learning, completed=min(share, 1.0), told=text, visible=True)
        self._line(f"learning: {text}")

    def _line(self, text: str) -> None:
        if self._console.is_terminal or time.monotonic() - self._shown < _LINE_SECONDS:
            return
        self._shown = time.monotonic()
        say(self._console, text)
