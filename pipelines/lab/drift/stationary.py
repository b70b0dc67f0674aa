"""How often the detector speaks where nothing changes: sessions resampled, as long as one likes.

One kind of text is decoded once, as a study decodes it, by the first policy. What its drafts told
then comes again and again: sessions drawn with replacement, each time under a name of its own, a
few side by side, into the learner's own scope as a worker's would. Only drafts, features and labels
come again; networks, contest and detector do all their work, so nothing is assumed of them. What
that leaves out: a session drawn twice is known to the network that remembers it, which favours
the careful one, and so fewer alarms.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch

from decoder.contracts.bundle import Policy
from decoder.contracts.errors import TraceError
from decoder.settings import WorkerSettings
from learner.rows import Rows
from pipelines import machine
from pipelines.lab.drift.scenario import Scenario, Segment
from pipelines.lab.drift.stream import Learning, Worker, decode
from pipelines.lab.drift.study import Recordings
from pipelines.lab.drift.traffic import KINDS, SIDE_BY_SIDE, Request, lessons, traffic
from pipelines.progress import Step

MOST: Final = 1_000
"""Generations of a kind, half from each side of the recordings: there are hardly more."""
LENGTH: Final = 250_000
"""Rows of a stream."""

ALARMS: Final = ("cache", "model")
"""Kinds of drafts of which the learner raises them."""

Sessions = Sequence[Sequence[Rows]]
"""Of each session the drafts of its requests, in their order."""


def sessions_of(kind: str, recordings: Recordings, first: Policy) -> Sessions:
    """What ``first`` meets on text of ``kind``.

    Raises:
        TraceError: there is none.
    """
    segment, settings = Segment(kinds=(kind,), generations=MOST // 2), WorkerSettings.load()
    scenario = Scenario(name="stationary", segments=(segment,))
    library = recordings.library(scenario, settings.model_draft_tokens)
    requests = traffic(scenario, library, 0).requests
    requests += [Request(trace, 0) for trace in lessons([segment], library, 0, MOST // 2)]
    found: dict[str, list[Rows]] = {}

    def told(index: int, rows: Rows) -> None:
        if len(rows):
            found.setdefault(requests[index].trace.session, []).append(rows)

    costs = [segment.machine.costs]
    decode(requests, costs, first, Worker(settings), library.token_classes, told)
    return list(found.values())


def resampled(sessions: Sessions, draw: np.random.Generator) -> Iterator[Rows]:
    """Requests without an end, as those of ``SIDE_BY_SIDE`` users whose sessions are drawn anew."""
    under_way: deque[Iterator[Rows]] = deque()
    while True:
        while len(under_way) < SIDE_BY_SIDE:
            under_way.append(iter(_renamed(sessions[int(draw.integers(len(sessions)))], draw)))
        session = under_way.popleft()
        request = next(session, None)
        if request is not None:
            yield request
            under_way.append(session)


def _renamed(session: Sequence[Rows], draw: np.random.Generator) -> list[Rows]:
    name, *requests = draw.integers(0, 2**64, 1 + len(session), np.uint64)
    return [
        replace(rows, session=np.full(len(rows), name), request=np.full(len(rows), request))
        for rows, request in zip(session, requests, strict=True)
    ]


def stream(
    kind: str, seed: int, sessions: Sessions, first: Policy, length: int, step: Step
) -> dict[str, Any]:
    """Feed at least ``length`` rows of ``sessions`` to a new scope; who wins is served.

    Returns:
        plain JSON: rows, alarms by kind of draft, and the learner's processor time a row in
        microseconds.
    """
    learning = Learning.begun(first)
    requests = resampled(sessions, np.random.default_rng([seed, len(sessions)]))
    done, spent, index = 0, 0.0, 0
    while done < length:
        rows = next(requests)
        began = time.process_time()
        learning.told(index, rows)
        spent += time.process_time() - began
        done, index = done + len(rows), index + 1
        step(f"rows of {kind}", done, length)
    return {
        "kind": kind,
        "seed": seed,
        "rows": done,
        **{arm: learning.scope.alarms[arm] for arm in ALARMS},
        "promotions": len(learning.promotions),
        "us_a_row": 1e6 * spent / done,
    }


def measure(rows: int, recordings: Recordings, first: Policy, step: Step) -> dict[str, Any]:
    """Figures, plain JSON, of about ``rows`` rows in streams of ``LENGTH``, of each kind of text
    that is here in turn. Sets torch to one thread.

    Raises:
        TraceError: there are no recordings of any kind.
    """
    torch.set_num_threads(1)
    here = [kind for kind in KINDS if recordings.has(kind)]
    if not here:
        raise TraceError("no recordings of any kind are here: name a folder with --traces.")
    streams, found = -(-rows // LENGTH), list[dict[str, Any]]()
    for place, kind in enumerate(here[:streams]):
        step(f"decoding {kind}", 0, 1)
        held = sessions_of(kind, recordings, first)
        for seed in range(len(range(place, streams, len(here)))):
            found.append(stream(kind, seed, held, first, LENGTH, step))
    whole = sum(each["rows"] for each in found)
    alarms = {arm: sum(each[arm] for each in found) for arm in ALARMS}
    return {
        "rows": whole,
        "alarms": alarms,
        "per_ten_million": 1e7 * sum(alarms.values()) / whole,
        "us_a_row": sum(each["us_a_row"] * each["rows"] for each in found) / whole,
        "streams": found,
        "machine": machine.description(),
    }
