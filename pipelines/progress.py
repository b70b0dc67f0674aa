"""How far long work is: a bar for who looks at a terminal, elsewhere a line now and then."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Final, Self

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

Step = Callable[[str, int, int], None]
"""Told what is being done, how much of it is done, and how much there is."""

LINE_SECONDS: Final = 30.0
"""Between two lines where no bar can be drawn; what takes less time says nothing."""
PACE_SECONDS: Final = 600.0
"""The time that is left is told by the pace of the last so many."""


class Shown(AbstractContextManager["Shown"]):
    """What is under way, and how much of it is done, on ``console``."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
            speed_estimate_period=PACE_SECONDS,
        )
        self._task = self._bar.add_task("", total=None)
        self._told = console.get_time()

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def step(self, what: str, done: float, whole: float) -> None:
        """Show that ``done`` of ``whole`` is done; less than before, or of another whole, is a new
        stage with a pace of its own.
        """
        task = self._bar.tasks[0]
        if whole != task.total or done < task.completed:
            self._bar.reset(self._task, total=whole)
        self._bar.update(self._task, description=escape(what), completed=done)
        now = self._console.get_time()
        if not self._console.is_terminal and now - self._told >= LINE_SECONDS:
            self._told = now
            self._console.print(
                f"{what}: {self._far(done, whole)}", markup=False, highlight=False, soft_wrap=True
            )

    def _far(self, done: float, whole: float) -> str:
        left = self._bar.tasks[0].time_remaining
        about = f", about {max(1, round(left / 60))} min left" if left else ""
        return f"{done:,.0f} of {whole:,.0f}{about}"
