"""Trace files as sets of generations, as far as their licence allows it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from decoder.contracts.errors import TraceError
from pipelines.progress import Step
from pipelines.replay.traces import Trace, read, session_of

ALLOWED: Final = ("MIT", "Apache-2.0")
"""What a row's ``license`` may say. A licence of the code alone ("Apache-2.0 (code), ... (data)")
is another text, and none of these."""


CONTEXT: Final = 16_384
"""Tokens that a prompt and its output may have."""


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


def read_sets(
    paths: Sequence[Path], tokenizer: Any, licences: Sequence[str] | None, step: Step
) -> list[TraceSet]:
    """Of each of ``paths`` the generations whose whole session is under one of ``licences``; files
    without any are left out.

    Args:
        licences: None takes all.

    Raises:
        TraceError: a file cannot be read.
    """
    found = []
    for path in paths:
        reading = read(path, tokenizer, CONTEXT, partial(step, f"reading {path.name}"))
        named, traces = licences_of(path), reading.traces
        if licences is not None:
            traces = [t for t in traces if named[t.session] <= set(licences)]
        if traces:
            of_them = set[str]().union(*(named[t.session] for t in traces))
            found.append(TraceSet(path.stem, tuple(sorted(of_them)), tuple(traces)))
    return found
