"""What a command hands to other programs: JSON on standard output, or files that appear whole."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from decoder.contracts.errors import SettingsError


def print_json(value: Any) -> None:
    """``value`` as JSON on standard output."""
    sys.stdout.write(json.dumps(value, indent=1) + "\n")


def complain(console: Console, sentences: Iterable[str]) -> None:
    """What is amiss, a line each."""
    for sentence in sentences:
        console.print(f"[yellow]{escape(sentence)}[/yellow]", highlight=False, soft_wrap=True)


def write_json(value: Any, path: Path) -> None:
    """Let ``path`` hold ``value`` as JSON.

    Raises:
        SettingsError: it cannot be written.
    """
    write_text(json.dumps(value, indent=1, allow_nan=False) + "\n", path)


def write_text(text: str, path: Path) -> None:
    """Let ``path`` hold ``text``; the folders above it are made.

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
    """Let ``write`` make a file beside ``path``, which takes its place once it is on the disk.

    Raises:
        OSError: the disk refuses.
    """
    part = path.with_name(f"{path.name}.part")
    write(part)
    with part.open("rb") as file:
        os.fsync(file.fileno())
    part.replace(path)
