"""Output of commands: JSON, files that are written atomically, and progress as a bar or as
lines."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final, Self

from rich import progress
from rich.console import Console
from rich.markup import escape

from decoder.contracts.errors import SettingsError


def print_json(value: Any) -> None:
    """Print ``value`` as JSON."""
    sys.stdout.write(json.dumps(value, indent=1) + "\n")


def complain(console: Console, sentences: Iterable[str]) -> None:
    """Print problems, a line each."""
    for sentence in sentences:
        console.print(f"[yellow]{escape(sentence)}[/yellow]", highlight=False, soft_wrap=True)


def write_json(value: Any, path: Path) -> None:
    """Write ``value`` to ``path`` as JSON.

    Raises:
        SettingsError: it cannot be written.
    """
    write_text(json.dumps(value, indent=1, allow_nan=False) + "\n", path)


def write_text(text: str, path: Path) -> None:
    """Write ``text`` to ``path``; creates its folders.

    Raises:
        SettingsError: it cannot be written.
    """
    try:
        if path.exists() and not path.is_file():  # a device, a pipe
            path.write_text(text, encoding="utf-8")
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path.resolve(), lambda part: part.write_text(text, encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"{path} cannot be written ({error}): choose another place.") from error


def atomic_write(path: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` make a file that replaces ``path`` once it is on disk.

    Raises:
        OSError: the disk refuses.
    """
    part = path.with_name(f"{path.name}.part")
    try:
        write(part)
        with part.open("rb") as file:
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)  # a partial file would fill a full disk


Step = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and how much there is."""

LINE_SECONDS: Final = 30.0  # between two lines if there is no terminal; shorter work prints none
PACE_SECONDS: Final = 600.0  # the remaining time is estimated from the pace of the last seconds


class Shown:
    """Shows progress on ``console``."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            progress.TimeRemainingColumn(),
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

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def step(self, what: str, done: float, whole: float) -> None:
        """Show that ``done`` of ``whole`` is done; less than before, or of another whole, starts a
        new stage."""
        task = self._bar.tasks[0]
        if whole != task.total or done < task.completed:
            self._bar.reset(self._task, total=whole)
        self._bar.update(self._task, description=escape(what), completed=done)
        now = self._console.get_time()
        if not self._console.is_terminal and now - self._told >= LINE_SECONDS:
            self._told = now
            left = self._bar.tasks[0].time_remaining
            about = f", about {max(1, round(left / 60))} min left" if left else ""
            line = f"{what}: {done:,.0f} of {whole:,.0f}{about}"
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)
