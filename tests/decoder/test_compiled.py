"""Compiled functions compute what their source says, wherever it lies."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from decoder.compiled import REAL, compiled


def test_a_function_that_can_be_kept_nowhere_is_compiled_all_the_same() -> None:
    """numba keeps nothing of a source without a file, as of one in a place that is read only."""
    made: dict[str, Callable[..., Any]] = {}
    exec("def plus(a, b):\n    return a + b", made)
    assert compiled((REAL, REAL))(made["plus"])(1.5, 2.0) == 3.5


FULL = """
unshare --user --map-root-user --mount sh -c 'mount -t tmpfs -o size=8k none "$0" || exit 77
dd if=/dev/zero of="$0/filled" bs=4k count=2 2>/dev/null
"$@"' "$@"
"""
LOOPS = """
import numpy as np
from decoder.core import compiled, loops
made = compiled.compiled()(lambda a, b: a + b)  # when it is called, as most are
print("alive", made(1, 2))
"""


def test_a_full_disk_keeps_nothing_and_stops_nothing(tmp_path: Path) -> None:
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    script = tmp_path.with_suffix(".py")
    script.write_text(LOOPS)
    done = subprocess.run(
        ["sh", "-c", FULL, "sh", str(tmp_path), sys.executable, str(script)],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if not done.stdout and ("unshare:" in done.stderr or done.returncode == 77):
        pytest.skip("this machine lets nobody mount a small disk")
    assert done.stdout == "alive 3\n", done
