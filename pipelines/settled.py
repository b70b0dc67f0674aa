"""Files that appear whole or not at all, and are on the disk when they do."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path


def settle(path: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` make a file beside ``path``, which takes its place once it is on the disk.

    Raises:
        OSError: the disk refuses.
    """
    part = path.with_name(f"{path.name}.part")
    write(part)
    with part.open("rb") as file:
        os.fsync(file.fileno())
    part.replace(path)
