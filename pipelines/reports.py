"""What a command hands to other programs: JSON on standard output, or in a file."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from decoder.contracts.errors import SettingsError
from pipelines.settled import settle


def print_json(value: Any) -> None:
    """``value`` as JSON on standard output."""
    sys.stdout.write(json.dumps(value, indent=1) + "\n")


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
        settle(path.resolve(), lambda part: part.write_text(text, encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"{path} cannot be written ({error}): choose another place.") from error
