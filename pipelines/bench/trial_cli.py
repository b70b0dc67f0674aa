"""What ``hvd bench trial`` reads before it measures."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

from decoder.contracts.bundle import ANY_SCOPE
from decoder.contracts.errors import TraceError
from decoder.policy.first import first_policy
from pipelines.bench import trial, trial_live
from pipelines.embedded import load_tokenizer
from pipelines.replay import own
from pipelines.replay.traces import Trace, read


def run(
    files: Sequence[Path], limit: int, runs: int, minutes: float, tick: Callable[[str], None]
) -> tuple[trial.Found, trial_live.Live | None]:
    """Measure; ``minutes`` of real decoding come first, if there are any.

    Raises:
        TraceError: there are no recordings.
        ModelError: the embedded model is not installed.
    """
    traces = _traces(files, limit)
    live, noise = None, None
    if minutes:
        dealt = trial_live.play(minutes, tick)
        live, noise = trial_live.told(dealt, minutes), trial_live.noise_of(dealt)
    return trial.measure(traces, first_policy(ANY_SCOPE), noise, tick, runs), live


def _traces(files: Sequence[Path], limit: int) -> list[Trace]:
    """Recordings of all files in turn; with a model arm if all have one."""
    paths = list(files) or sorted(own.folder().glob("*.jsonl"))
    tokenizer = load_tokenizer(None)
    found = [read(path, tokenizer).traces[:limit] for path in paths]
    mixed = [t for row in itertools.zip_longest(*found) for t in row if t and len(t.output) > 1]
    if not mixed:
        raise TraceError("no recordings: name files with --traces, or run hvd drift --record 60.")
    return mixed
