"""Trace files as sets of generations, as far as their licence allows it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from decoder.contracts.errors import TraceError
from pipelines.progress import Step
from pipelines.replay.tokenise import session_of
from pipelines.replay.traces import Trace, read

ALLOWED: Final = ("MIT", "Apache-2.0")
"""What a row's ``license`` may say. A licence of the code alone ("Apache-2.0 (code), ... (data)")
is another text, and none of these."""


@dataclass(frozen=True)
class TraceSet:
    """The usable generations of a file, in its order, and the licences their rows name."""

    name: str
    licences: tuple[str, ...]
    traces: tuple[Trace, ...]


def files_of(paths: Sequence[Path]) -> list[Path]:
    """``paths`` with each directory replaced by its trace files, by name.

    Raises:
        TraceError: a directory holds none.
    """
    found: list[Path] = []
    for path in paths:
        inside = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
        if not inside:
            raise TraceError(f"no *.jsonl in {path}: name a folder of trace files, or files.")
        found += inside
    return found


def licences_of(path: Path) -> dict[str, set[str]]:
    """What the rows of each session of ``path`` name as ``license``; "" where they name none."""
    found: dict[str, set[str]] = {}
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                record = json.loads(line)
            except ValueError:  # read() has told of it
                continue
            if isinstance(record, dict):
                licence = str(record.get("license") or "")
                found.setdefault(session_of(record, number), set()).add(licence)
    return found


def read_set(
    path: Path, tokenizer: Any, licences: Sequence[str] | None, context: int, step: Step
) -> TraceSet:
    """The generations of ``path`` whose whole session is under one of ``licences``.

    Args:
        licences: None takes all.
        context: tokens that prompt and output may have together.

    Raises:
        TraceError: it cannot be read.
    """
    reading = read(
        path, tokenizer, context, lambda done, whole: step(f"reading {path.name}", done, whole)
    )
    named = licences_of(path)
    traces = reading.traces
    if licences is not None:
        traces = [t for t in traces if named[t.session] <= set(licences)]
    of_them: set[str] = set().union(*(named[t.session] for t in traces)) if traces else set()
    return TraceSet(path.stem, tuple(sorted(of_them)), tuple(traces))
