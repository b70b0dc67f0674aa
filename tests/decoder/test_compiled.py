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
from decoder import compiled
from decoder.policy import loops
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


TAKEN = """
from decoder.compiled import REAL, compilable, compiled
PART = 2.0
def plain(a):
    return a / PART
compilable(plain)
@compiled((REAL,))
def part(a):
    return a / PART
"""
TAKING = """
from decoder.compiled import REAL, compiled
from taken import PART, part, plain
@compiled((REAL,))
def taking(a):
    return {}
print(taking(12.0), sum(taking.stats.cache_hits.values()))
"""


@pytest.mark.parametrize("taken", ["part(a)", "plain(a)", "a / PART"])
def test_what_is_kept_on_disk_follows_what_it_takes_from_another_file(
    taken: str, tmp_path: Path
) -> None:
    def run() -> str:
        path = f"{tmp_path}{os.pathsep}{Path(__file__).parents[2]}"
        return subprocess.run(
            [sys.executable, "-m", "taking"], env={**os.environ, "PYTHONPATH": path},
            capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip

    (tmp_path / "taken.py").write_text(TAKEN)
    (tmp_path / "taking.py").write_text(TAKING.format(taken))
    assert [run(), run()] == ["6.0 0\n", "6.0 1\n"]
    (tmp_path / "taken.py").write_text(TAKEN.replace("2.0", "3.0"))
    assert run() == "4.0 0\n"
