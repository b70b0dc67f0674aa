"""The requests of a scenario: sessions of recordings, drawn by seed, changed as segments say.

Half of the sessions of each set, by a hash of their names, are for serving; policies are trained on
the other half. No session is on both sides.
"""

from __future__ import annotations

import tomllib
import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from pathlib import Path
from typing import Final, Literal

import numpy as np

from decoder.contracts.errors import TraceError
from decoder.contracts.features import FloatArray
from pipelines.lab.drift import alterations
from pipelines.lab.drift.alterations import Draw
from pipelines.lab.drift.scenario import Drafter, Scenario, Segment
from pipelines.lab.replay.split import fraction
from pipelines.lab.replay.traces import Trace

KINDS: Final[Mapping[str, list[str]]] = tomllib.loads(
    (Path(__file__).parent / "kinds.toml").read_text(encoding="utf-8")
)
TURNS: Final = 8
"""First turns of a session that are used, so that no single dialogue is most of a segment."""
SIDE_BY_SIDE: Final = 4
"""Sessions whose turns are interleaved, as those of several users are."""
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
                if serves == (side == "serve"):
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
    tenant: str = "honest"


@dataclass(frozen=True)
class Traffic:
    """All requests of a scenario in their order. ``begins`` are the first of each segment."""

    requests: list[Request]
    begins: list[int]


def traffic(scenario: Scenario, library: Library, seed: int) -> Traffic:
    """What ``scenario`` sends, the same for the same seed.

    Raises:
        TraceError: one of its kinds of text is not in the library.
    """
    requests: list[Request] = []
    begins: list[int] = []
    used: set[str] = set()
    for index, segment in enumerate(scenario.segments):
        draw = np.random.default_rng([seed, index, zlib.crc32(scenario.name.encode())])
        stream = _stream(segment, library, "serve", draw, used)
        begins.append(len(requests))
        requests += [Request(trace, index) for trace in islice(stream, segment.generations)]
    return Traffic(requests, begins)


def lessons(segments: Sequence[Segment], library: Library, seed: int, most: int) -> list[Trace]:
    """Up to ``most`` generations like those of ``segments``, but of other sessions."""
    found: list[Trace] = []
    used: set[str] = set()
    for index, segment in enumerate(segments):
        draw = np.random.default_rng([seed, index, 1])
        stream = _stream(segment, library, "train", draw, used)
        found += islice(stream, max(1, most // len(segments)))
    return found


def _stream(
    segment: Segment, library: Library, side: Side, draw: Draw, used: set[str]
) -> Iterator[Trace]:
    """Requests, until the recordings end.

    A session comes once only, or the suffix cache would know its outputs: ``used`` holds the names
    of those that came. Mutates it.
    """
    by_set = library.sessions(segment, side, draw)
    # Sessions of each set in turn, until all are used.
    order = (turns for some in zip_longest(*by_set.values()) for turns in some if turns)
    if segment.templates:
        pool = [turns[0] for sessions in by_set.values() for turns in sessions]
        picked = [pool[i] for i in draw.permutation(len(pool))[: segment.templates]]
        made = alterations.filled_in(picked, segment.generations, library.token_classes, draw)
        order = ([trace] for trace in made)
    open_sessions: deque[deque[Trace]] = deque()
    while True:
        while len(open_sessions) < SIDE_BY_SIDE:
            turns = next((t for t in order if t[0].session not in used), None)
            if turns is None:
                break
            used.add(turns[0].session)
            open_sessions.append(deque(_sent(turns, segment, library, draw)))
        if not open_sessions:
            return
        session = open_sessions.popleft()
        yield session.popleft()
        if session:
            open_sessions.append(session)


def _sent(
    turns: Sequence[Trace], segment: Segment, library: Library, draw: Draw
) -> Iterator[Trace]:
    for turn in turns:
        trace = turn
        if segment.breaks:
            trace = alterations.misleading(trace, segment.breaks, library.token_classes, draw)
        if segment.drafter is not None or trace.model_accepted is None:
            drafter = segment.drafter or Drafter()
            trace = alterations.foreseen(trace, drafter, library.model_len, draw)
        yield trace
