"""Replay: from recorded generations to labelled cache drafts, through the production router.

The paper's Appendix B: every token position of a recorded output is a decoding state; its cache
draft is labelled by agreement with the tokens that follow. The router is the one that serves, fed
one token a cycle, so features, history and labels are those a worker would send, and a history
feature can only see labels resolved by then.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from decoder.contracts.events import DraftEvent
from decoder.contracts.policy import frequency_policy
from decoder.drafting.suffix import SuffixCache
from decoder.router import Committed, DraftRouter, RequestOptions
from decoder.settings import WorkerSettings

log = logging.getLogger(__name__)

UNLIMITED = 1 << 20
"""Context length of a replay: a recorded output has room, or it would not have been recorded."""


@dataclass(frozen=True)
class Trace:
    """One recorded generation as token ids. ``session`` keeps turns of one dialogue together."""

    session: str
    prompt: Sequence[int]
    output: Sequence[int]
    workload: str = ""
    allowed: int = 1024
    """Output tokens the request might have made. Never the recorded length itself: a feature or a
    draft cut by it would tell the label where the output ends."""


@dataclass
class ListSink:
    """Keeps the events: the router's sink where nothing is shipped."""

    events: list[DraftEvent]

    def put(self, event: DraftEvent) -> None:
        """Take one event."""
        self.events.append(event)


def read_token_traces(path: Path) -> Iterator[Trace]:
    """Traces of ``{"prompt": [ids], "output": [ids]}`` lines, as the drafter's data has them.

    A malformed line is skipped with a warning that names file and line.
    """
    for number, line in enumerate(path.open(encoding="utf-8"), start=1):
        try:
            record = json.loads(line)
            yield Trace(str(number), [int(t) for t in record["prompt"]],
                        [int(t) for t in record["output"]])  # fmt: skip
        except (ValueError, KeyError, TypeError) as error:
            log.warning("%s:%d skipped: %s", path, number, error)


def replay(
    traces: Iterable[Trace], token_classes: NDArray[np.float32], settings: WorkerSettings
) -> list[DraftEvent]:
    """Labelled cache drafts of every token position of ``traces``, in their order.

    Outputs of earlier traces are in the suffix cache of later ones, as on a worker.
    """
    sink = ListSink([])
    router = DraftRouter(
        SuffixCache(settings), frequency_policy("replay"), token_classes, sink, False, "replay"
    )
    for index, trace in enumerate(traces):
        if not trace.output:
            continue
        name = f"{trace.session}/{index}"
        allowed = max(trace.allowed, len(trace.output) + 1)
        options = RequestOptions(allowed, UNLIMITED, workload=trace.workload)
        router.start(name, np.asarray(trace.prompt, np.int32), options)
        for token in trace.output:
            router.observe([Committed(name, [token], 0)], step_tokens=1)
            router.choose([name])
        router.stop(name, "stop")
    return sink.events
