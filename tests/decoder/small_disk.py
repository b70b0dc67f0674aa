"""A program on a disk of its own that is full, or soon will be."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
unshare --user --map-root-user --mount sh -c 'mount -t tmpfs -o size=%dk none "$0" || exit 77
dd if=/dev/zero of="$0/filled" bs=4k count=%d 2>/dev/null
"$@"; code=$?; ls "$0"; exit $code' "$@"
"""


def on_small_disk(
    folder: Path, variable: str, program: Path | str, kib: int, filled: int
) -> subprocess.CompletedProcess[str]:
    """Run a file, or Python text, with ``variable`` naming ``folder``, a disk of so many KiB.

    Args:
        filled: of them, in parts of 4 KiB, by a file ``filled``; what else is there in the end is
            told behind what the program says.
    """
    run = [str(program)] if isinstance(program, Path) else ["-c", program]
    done = subprocess.run(
        ["sh", "-c", SCRIPT % (kib, filled), "sh", str(folder), sys.executable, *run],
        env={**os.environ, variable: str(folder)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if "unshare:" in done.stderr or done.returncode == 77:
        pytest.skip("this machine lets nobody mount a small disk")
    return done
