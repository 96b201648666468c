"""The progress bar of a tuning run: time against the budget, and what is being done."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from autospec.tune.budget import Budget


class Meter:
    """Shows the budget being used; a context manager. Off a terminal it says a line at times."""

    def __init__(self, console: Console, budget: Budget) -> None:
        self._console = console
        self._budget = budget
        self._said = -1.0
        self._progress = Progress(
            TextColumn("tuning"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %"),
            TextColumn("{task.fields[left]} left"),
            TextColumn("{task.description}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("", total=budget.seconds, left="")

    def __enter__(self) -> Meter:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def show(self, line: str) -> None:
        """What is being done now; the bar moves to the time used."""
        spent = min(self._budget.spent, self._budget.seconds)
        minutes, seconds = divmod(int(self._budget.left), 60)
        left = f"{minutes}:{seconds:02d}"
        self._progress.update(self._task, completed=spent, description=line, left=left)
        if not self._console.is_terminal and spent - self._said >= 10.0:
            self._said = spent
            self._console.print(f"{left} left: {line}", markup=False, highlight=False)
