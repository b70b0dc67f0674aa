"""The requests of a scenario: sessions of recordings, drawn by seed, changed as segments say.

Half of the sessions of each set, by a hash of their names, are for serving; policies are trained on
the other half. No session is on both sides.
"""

from __future__ import annotations

import fnmatch
import tomllib
import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Final, Literal

import numpy as np

from decoder.contracts.errors import TraceError
from decoder.contracts.features import FloatArray
from pipelines.drift import alterations
from pipelines.drift.alterations import Draw
from pipelines.drift.scenario import Drafter, Scenario, Segment
from pipelines.replay.split import fraction
from pipelines.replay.traces import Trace

KINDS: Final[Mapping[str, list[str]]] = tomllib.loads(
    (Path(__file__).parent / "kinds.toml").read_text(encoding="utf-8")
)
TURNS: Final = 8
"""First turns of a session that are used, so that no single dialogue is most of a segment."""
SIDE_BY_SIDE: Final = 4
"""Sessions whose turns are interleaved, as those of several users are; at least as many as
requests run at a time."""
HONEST, HOSTILE = "honest", "hostile"
BROKEN: Final = 4
"""A hostile tenant's prompts hold its outputs with one of so many tokens wrong."""
Side = Literal["serve", "train"]


@dataclass(frozen=True)
class Library:
    """Recordings by the stem of their file, and what is needed to change them."""

    sets: Mapping[str, Sequence[Trace]]
    token_classes: FloatArray
    model_len: int  # tokens of a model draft

    def sessions(self, segment: Segment, side: Side, draw: Draw) -> dict[str, list[list[Trace]]]:
        """By set, the sessions of ``side`` that a segment is made of, in random order.

        Raises:
            TraceError: none of its kinds is here.
        """
        stems = [s for kind in segment.kinds for s in KINDS.get(kind, [kind]) if s in self.sets]
        found: dict[str, list[list[Trace]]] = {}
        for stem in dict.fromkeys(stems):
            by_name: dict[str, list[Trace]] = {}
            for trace in self.sets[stem]:
                serves = fraction(trace.session, "drift") < 0.5
                if serves == (side == "serve") and fnmatch.fnmatchcase(
                    trace.session, segment.sessions
                ):
                    by_name.setdefault(trace.session, []).append(trace)
            if by_name:
                names = list(by_name)
                found[stem] = [by_name[names[i]][:TURNS] for i in draw.permutation(len(names))]
        if not found:
            raise TraceError(f"no recordings of kind {' or '.join(segment.kinds)} are here.")
        return found


@dataclass(frozen=True)
class Request:
    """One request of a scenario; ``segment`` is the one in force when it comes."""

    trace: Trace
    segment: int
    tenant: str = HONEST


@dataclass(frozen=True)
class Traffic:
    """All requests of a scenario in their order. ``begins`` are the first of each segment."""

    requests: list[Request]
    begins: list[int]
    counted: list[bool] = field(default_factory=list)
    """Whether a request is one that speed is measured on: not a hostile one."""


def traffic(scenario: Scenario, library: Library, seed: int) -> Traffic:
    """What ``scenario`` sends, the same for the same seed.

    Raises:
        TraceError: one of its kinds of text is not in the library.
    """
    requests: list[Request] = []
    begins: list[int] = []
    used: set[str] = set()
    before: Iterator[tuple[Trace, str]] | None = None
    for index, segment in enumerate(scenario.segments):
        draw = np.random.default_rng([seed, index, zlib.crc32(scenario.name.encode())])
        stream = _stream(segment, library, "serve", draw, seed, used)
        begins.append(len(requests))
        for place in range(segment.generations):
            fades = before is not None and draw.random() * segment.ramp > place
            drawn = next(before, None) if fades and before is not None else None
            drawn = drawn or next(stream, None)
            if drawn is None:
                break
            requests.append(Request(drawn[0], index, drawn[1]))
        before = stream
    return Traffic(requests, begins, [r.tenant == HONEST for r in requests])


def lessons(segments: Sequence[Segment], library: Library, seed: int, most: int) -> list[Trace]:
    """Up to ``most`` honest generations like those of ``segments``, but of other sessions."""
    found: list[Trace] = []
    used: set[str] = set()
    for index, segment in enumerate(segments):
        draw = np.random.default_rng([seed, index, 1])
        stream = _stream(segment, library, "train", draw, seed, used)
        honest = (trace for trace, tenant in stream if tenant == HONEST)
        found += islice(honest, max(1, most // len(segments)))
    return found


def _stream(
    segment: Segment, library: Library, side: Side, draw: Draw, seed: int, used: set[str]
) -> Iterator[tuple[Trace, str]]:
    """Requests and their tenants, until the recordings end.

    A session comes once only, or the suffix cache would know its outputs: ``used`` holds the names
    of those that came. Mutates it.
    """
    by_set = library.sessions(segment, side, draw)
    sets = list(by_set)
    order = iter(_in_turn([by_set[name] for name in sets]))
    pool = [turns[0] for sessions in by_set.values() for turns in sessions]
    if segment.templates:
        picked = [pool[i] for i in draw.permutation(len(pool))[: segment.templates]]
        made = alterations.filled_in(picked, segment.generations, library.token_classes, draw)
        order = iter([[trace] for trace in made])
    open_sessions: deque[deque[tuple[Trace, str]]] = deque()
    while True:
        while len(open_sessions) < max(SIDE_BY_SIDE, segment.concurrency):
            turns = next((t for t in order if t[0].session not in used), None)
            if turns is None:
                break
            used.add(turns[0].session)
            turns = _altered(turns, segment, library, pool, draw, seed)
            tenant = HOSTILE if draw.random() < segment.hostile else HONEST
            open_sessions.append(deque(_sent(turns, tenant, segment, library, draw)))
        if not open_sessions:
            return
        session = open_sessions.popleft()
        yield session.popleft()
        if session:
            open_sessions.append(session)


def _in_turn(sets: Sequence[Sequence[list[Trace]]]) -> Iterator[list[Trace]]:
    """Sessions of each set in turn, until all are used."""
    for place in range(max(map(len, sets))):
        for sessions in sets:
            if place < len(sessions):
                yield sessions[place]


def _altered(
    turns: Sequence[Trace],
    segment: Segment,
    library: Library,
    pool: Sequence[Trace],
    draw: Draw,
    seed: int,
) -> list[Trace]:
    made = list(turns)
    if segment.renamed:
        # One target writes alike all along, to those who train and to those who serve.
        target = np.random.default_rng(seed)
        made = alterations.changed(
            made, alterations.renamed(segment.renamed, library.token_classes, target)
        )
    if segment.diverging:
        made = alterations.changed(made, alterations.diverging(segment.diverging, pool, draw))
    return made


def _sent(
    turns: Sequence[Trace], tenant: str, segment: Segment, library: Library, draw: Draw
) -> Iterator[tuple[Trace, str]]:
    for turn in turns:
        trace = turn
        breaks = BROKEN if tenant == HOSTILE else segment.breaks
        if breaks:
            trace = alterations.misleading(trace, breaks, library.token_classes, draw)
        if segment.drafter is not None or trace.model_accepted is None:
            drafter = segment.drafter or Drafter()
            trace = alterations.foreseen(trace, drafter, library.model_len, draw)
        yield trace, tenant
