"""``hvd bench sessions`` from the shell: what it refuses, and a run on real servers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[4]


def sessions(
    folder: Path, *arguments: str, seconds: float = 120
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pipelines.cli", "bench", "sessions", *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=seconds,
        cwd=folder,
        env={**os.environ, "COLUMNS": "100", "NO_COLOR": "1", "PYTHONPATH": str(REPOSITORY)},
    )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--check", "--dtype", "bfloat16"), "give --dtype float32"),
        (("--check", "--dtype", "float32", "--configs", "hybrid"), "name none with --configs"),
        (("--concurrency", "1,none"), "--concurrency '1,none': give positive numbers"),
    ],
)
def test_what_cannot_be_measured_is_said_before_anything_starts(
    tmp_path: Path, arguments: tuple[str, ...], sentence: str
) -> None:
    done = sessions(tmp_path, *arguments)
    assert done.returncode == 2
    assert sentence in done.stderr and "Traceback" not in done.stderr


@pytest.mark.engine
@pytest.mark.long
def test_served_sessions_are_those_of_plain_decoding_and_their_context_is_cached(
    tmp_path: Path,
) -> None:
    small = ("--limit", "2", "--turns", "2", "--max-tokens", "48", "--concurrency", "1,2")
    compared = ("--configs", "none,hybrid", "--dtype", "float32", "--check", "--json", "s.json")
    done = sessions(tmp_path, *small, *compared, seconds=580)
    assert done.returncode == 0, done.stdout + done.stderr
    made = json.loads((tmp_path / "s.json").read_text())
    assert [(r["configuration"], r["concurrency"], r["answers"]) for r in made["records"]] == [
        ("none", 1, 4), ("hybrid", 1, 4), ("none", 2, 8), ("hybrid", 2, 8),
    ]  # fmt: skip
    for record in made["records"]:
        assert record["equal_to_none"] == record["compared_with_none"] == record["answers"]
        assert record["groups"]["warm"]["answers"] == record["answers"] / 2
        # whole blocks only, and a drafter has the last of them read again
        assert record["prompt_tokens_cached_share"] > 0.1, "a turn's context was there before"
    hybrids = [r for r in made["records"] if r["configuration"] == "hybrid"]
    assert all(r["cycles_per_1k"] < 1000 for r in hybrids)
