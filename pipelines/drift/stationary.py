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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from typing import Any, Final

import numpy as np

from decoder.contracts.bundle import Policy
from decoder.contracts.errors import TraceError
from decoder.contracts.events import DraftEvent
from decoder.settings import WorkerSettings
from learner.rows import Rows, from_events
from pipelines.drift.learning import Learning
from pipelines.drift.results import Results, key_of
from pipelines.drift.scenario import Scenario, Segment
from pipelines.drift.stream import Conditions, Worker, decode
from pipelines.drift.study import Recordings
from pipelines.drift.traffic import KINDS, SIDE_BY_SIDE, Library, Request, lessons, traffic
from pipelines.progress import Step
from pipelines.replay.bundles import digest_of

MOST: Final = 1_000
"""Generations of a kind, half from each side of the recordings: there are hardly more."""
LENGTH: Final = 250_000
"""Rows of a stream: what an interrupt loses."""
TELL: Final = 10_000

Sessions = Sequence[Sequence[Rows]]
"""Of each session the drafts of its requests, in their order."""


@dataclass(frozen=True)
class Stream:
    """One stream: rows, the sessions and different rows that they were drawn from, alarms by
    kind of draft, and the learner's processor time a row in microseconds."""

    kind: str
    seed: int
    rows: int
    sessions: int
    different: int
    requests: int
    cache: int
    model: int
    promotions: int
    us_a_row: float = field(compare=False)


def sessions_of(kind: str, library: Library, first: Policy, settings: WorkerSettings) -> Sessions:
    """What ``first`` meets on text of ``kind``.

    Raises:
        TraceError: there is none.
    """
    scenario = _scenario(kind)
    segment = scenario.known
    requests = traffic(scenario, library, 0).requests
    requests += [Request(trace, 0) for trace in lessons([segment], library, 0, MOST // 2)]
    found: dict[str, list[Rows]] = {}

    def told(index: int, events: list[DraftEvent]) -> None:
        rows = from_events(events)
        if len(rows):
            found.setdefault(requests[index].trace.session, []).append(rows)

    conditions = [Conditions(segment.machine.costs)]
    decode(requests, conditions, first, Worker(settings), library.token_classes, told)
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
    names = draw.integers(0, 2**64, 1 + len(session), np.uint64)
    return [
        replace(
            rows,
            session=np.full(len(rows), names[0]),
            request=np.full(len(rows), names[1 + place]),
        )
        for place, rows in enumerate(session)
    ]


def stream(
    kind: str,
    seed: int,
    sessions: Sessions,
    first: Policy,
    length: int,
    tell: Callable[[int], None],
) -> Stream:
    """Feed at least ``length`` rows of ``sessions`` to a new scope; who wins is served.

    Args:
        tell: told now and then how many rows are done.
    """
    learning = Learning.begun(first)
    requests = resampled(sessions, np.random.default_rng([seed, len(sessions)]))
    done = told = 0
    spent = 0.0
    for index in count():
        rows = next(requests)
        began = time.process_time()
        learning.take(index, rows)
        spent += time.process_time() - began
        done += len(rows)
        if done - told >= TELL:
            told = done
            tell(done)
        if done >= length:
            break
    different = sum(len(rows) for session in sessions for rows in session)
    alarms = learning.scope.alarms
    return Stream(
        kind, seed, done, len(sessions), different, index + 1, alarms["cache"], alarms["model"],
        len(learning.promotions), 1e6 * spent / done,
    )  # fmt: skip


def measure(
    rows: int,
    recordings: Recordings,
    results: Results[Stream],
    first: Policy,
    step: Step,
) -> list[Stream]:
    """About ``rows`` rows in streams of ``LENGTH``, of each kind of text that is here; keeps each.

    Raises:
        TraceError: there are no recordings of any kind.
    """
    settings = WorkerSettings.load()
    here = [kind for kind in KINDS if recordings.has(kind)]
    if not here:
        raise TraceError("no recordings of any kind are here: name a folder with --traces.")
    held: dict[str, Sessions] = {}
    found: list[Stream] = []
    for number in range(-(-rows // LENGTH)):
        kind, seed = here[number % len(here)], number // len(here)
        before = number * LENGTH
        key = key_of(kind, str(seed), str(LENGTH), recordings.digest, digest_of(first))
        kept = results.get(key)
        if kept is None:
            if kind not in held:
                step(f"decoding {kind}", before, rows)
                library = recordings.library(_scenario(kind), settings.model_draft_tokens)
                held[kind] = sessions_of(kind, library, first, settings)

            def tell(done: int, kind: str = kind, before: int = before) -> None:
                step(f"rows of {kind}", before + done, rows)

            kept = stream(kind, seed, held[kind], first, LENGTH, tell)
            results.put(key, kept)
        found.append(kept)
    return found


def _scenario(kind: str) -> Scenario:
    return Scenario(name="stationary", segments=(Segment(kinds=(kind,), generations=MOST // 2),))


def totals(found: Sequence[Stream]) -> dict[str, Any]:
    """All figures, plain JSON."""
    whole = sum(each.rows for each in found)
    alarms = {
        "cache": sum(each.cache for each in found),
        "model": sum(each.model for each in found),
    }
    return {
        "rows": whole,
        "alarms": alarms,
        "per_ten_million": 1e7 * sum(alarms.values()) / whole if whole else None,
        "us_a_row": sum(each.us_a_row * each.rows for each in found) / whole if whole else None,
        "streams": [asdict(each) for each in found],
    }
