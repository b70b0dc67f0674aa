"""Recordings as requests of a suffix cache, one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from decoder.drafting.suffix import SuffixCache
from pipelines.lab.replay.traces import Ids, Trace

UNLIMITED: Final = 1 << 20
"""Context length of a replay: a recorded output has room, or it would not have been recorded."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A recording whose request is under way in a suffix cache, under ``name``."""

    index: int
    name: str
    trace: Trace
    prompt: Ids
    output: list[int]
    text: Ids  # prompt and output, contiguous

    @classmethod
    def of(cls, index: int, trace: Trace) -> Turn:
        """Recording number ``index``."""
        prompt, output = np.array(trace.prompt, np.int32), np.asarray(trace.output, np.int32)
        text = np.concatenate([prompt, output])
        return cls(index, str(index), trace, prompt, output.tolist(), text)


def turns(traces: Sequence[Trace], cache: SuffixCache) -> Iterator[Turn]:
    """Each recording in its order; its request begins before and stops after it is handed out."""
    for index, trace in enumerate(traces):
        turn = Turn.of(index, trace)
        cache.start(turn.name, turn.prompt, "")
        cache.index(None)
        yield turn
        cache.stop(turn.name)
