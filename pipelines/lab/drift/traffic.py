"""Scenarios: what traffic there is, and how it changes; and the requests that they come to.

A scenario is a file, a sequence of segments. What differs between a segment and the one before it
is the change that the policies meet; ``history`` is the traffic that those trained beforehand knew.
Its requests are sessions of recordings, drawn by seed, changed as segments say.

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
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from decoder.contracts.errors import SettingsError, TraceError
from decoder.contracts.features import FloatArray
from decoder.policy.pricing import MAX_TOKENS, CostTable
from pipelines.lab.drift.changes import (
    Drafter,
    Draw,
    filled_in,
    foreseen,
    misleading,
    renamed,
    sampled,
)
from pipelines.lab.replay.traces import fraction
from pipelines.replay.engine import Trace

KINDS: Final[Mapping[str, list[str]]] = tomllib.loads(
    (Path(__file__).parent / "kinds.toml").read_text(encoding="utf-8")
)
TURNS: Final = 8
"""First turns of a session that are used, so that no single dialogue is most of a segment."""
SIDE_BY_SIDE: Final = 4
"""Sessions whose turns are interleaved, as those of several users are."""
Side = Literal["serve", "train"]

HONEST, BROKEN = "honest", "broken"
"""Tenants; the second has the sessions of ``Segment.broken``."""


SHIPPED: Final = Path(__file__).parent / "scenarios"
PLAIN_US: Final = 20_000.0
"""A step of one token on the machine that scenarios begin on."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Machine(_Part):
    """What steps cost, in steps of one token on the machine that scenarios begin on.

    A token that is verified costs ``token``; the drafter takes ``draft`` each time it runs and
    ``draft_token`` for each token it makes.
    """

    plain: float = Field(default=1.0, gt=0)
    token: float = Field(default=0.006, ge=0)
    draft: float = Field(default=0.02, ge=0)
    draft_token: float = Field(default=0.03, ge=0)

    @property
    def costs(self) -> CostTable:
        """The same in microseconds."""
        last = self.plain + self.token * (MAX_TOKENS - 1)
        return CostTable(
            "scenario",
            (1, MAX_TOKENS),
            (PLAIN_US * self.plain, PLAIN_US * last),
            draft_us=PLAIN_US * self.draft,
            draft_token_us=PLAIN_US * self.draft_token,
        )


class Segment(_Part):
    """A stretch of traffic that stays the same.

    ``kinds`` are kinds of text (``kinds.toml``) or trace files by their stems. Without ``drafter``
    recordings keep the model arm they were made with; those that have none take the usual one.
    """

    kinds: tuple[str, ...] = Field(min_length=1)
    generations: int = Field(ge=1, le=100_000)
    machine: Machine = Machine()
    drafter: Drafter | None = None
    templates: int = Field(
        default=0, ge=0, description="generations repeated with changed arguments"
    )
    breaks: int = Field(
        default=0, ge=0, description="prompts hold the output, every so many tokens of it wrong"
    )
    broken: float = Field(
        default=1.0, gt=0, le=1, description="share of sessions with such prompts, another tenant's"
    )
    verbatim: float = Field(
        default=0.0, ge=0, le=1, description="share of requests whose prompts hold the output whole"
    )
    renamed: int = Field(
        default=0, ge=0, description="prompts hold the output, so many token types of it renamed"
    )
    sampled: float = Field(
        default=0.0, ge=0, lt=1, description="chance that an output token is another, at random"
    )

    def changes_from(self, before: Segment) -> list[str]:
        """Names of what differs."""
        return [
            name
            for name in type(self).model_fields
            if name != "generations" and getattr(self, name) != getattr(before, name)
        ]


class Scenario(_Part):
    """Segments, one after another. ``history`` is the first of them if not given.

    ``factor`` stands in for the worker's ``suffix_max_factor``, with which history was made.
    """

    name: str = Field(pattern=r"^[a-z0-9-]+$")
    about: str = ""
    segments: tuple[Segment, ...] = Field(min_length=1)
    history: Segment | None = None
    factor: float | None = Field(default=None, gt=0)

    @property
    def known(self) -> Segment:
        """What a policy trained beforehand was trained on."""
        return self.history or self.segments[0]

    def changes(self, index: int) -> list[str]:
        """What changes where a segment begins; for the first of them, against ``history``."""
        if index:
            return self.segments[index].changes_from(self.segments[index - 1])
        found = self.segments[0].changes_from(self.known)
        return [*found, "factor"] if self.factor else found

    @property
    def later(self) -> tuple[Segment, ...]:
        """What comes after the first change, each kind of segment once; all, if nothing does."""
        found: list[Segment] = []
        for segment in self.segments[1:] or self.segments:
            if all(segment.changes_from(other) for other in found):
                found.append(segment)
        return tuple(found)


def chosen(names: Sequence[str]) -> list[Scenario]:
    """The scenarios called ``names``, shipped ones or files; all that ship if there are none.

    Raises:
        SettingsError: there is no such scenario, or its file is not one.
    """
    shipped = {path.stem: path for path in sorted(SHIPPED.glob("*.toml"))}
    for name in names:
        if name not in shipped and not name.endswith(".toml"):
            known = ", ".join(shipped)
            raise SettingsError(f"no scenario {name!r}: give a .toml file, or one of {known}.")
    return [read(shipped.get(name, Path(name))) for name in names or shipped]


def read(path: Path) -> Scenario:
    """The scenario in ``path``.

    Raises:
        SettingsError: it cannot be read, or is not a scenario; says where and why.
    """
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
        return Scenario.model_validate({"name": path.stem, **found})
    except OSError as error:
        raise SettingsError(f"cannot read scenario {path}: {error.strerror or error}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"scenario {path} is not TOML: {error}.") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise SettingsError(f"scenario {path}: {where}: {first['msg']}.") from error


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
    tenant: str = HONEST


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
        sent = islice(stream, segment.generations)
        requests += [Request(trace, index, tenant) for trace, tenant in sent]
    return Traffic(requests, begins)


def lessons(segments: Sequence[Segment], library: Library, seed: int, most: int) -> list[Trace]:
    """Up to ``most`` generations like those of ``segments``, but of other sessions."""
    found: list[Trace] = []
    used: set[str] = set()
    for index, segment in enumerate(segments):
        draw = np.random.default_rng([seed, index, 1])
        stream = _stream(segment, library, "train", draw, used)
        found += [trace for trace, _ in islice(stream, max(1, most // len(segments)))]
    return found


def _stream(
    segment: Segment, library: Library, side: Side, draw: Draw, used: set[str]
) -> Iterator[tuple[Trace, str]]:
    """Requests and their tenants, until the recordings end.

    A session comes once only, or the suffix cache would know its outputs: ``used`` holds the names
    of those that came. Mutates it.
    """
    by_set = library.sessions(segment, side, draw)
    # Sessions of each set in turn, until all are used.
    order = (turns for some in zip_longest(*by_set.values()) for turns in some if turns)
    if segment.templates:
        pool = [turns[0] for sessions in by_set.values() for turns in sessions]
        picked = [pool[i] for i in draw.permutation(len(pool))[: segment.templates]]
        made = filled_in(picked, segment.generations, library.token_classes, draw)
        order = ([trace] for trace in made)
    open_sessions: deque[deque[tuple[Trace, str]]] = deque()
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
) -> Iterator[tuple[Trace, str]]:
    """The turns of a session as ``segment`` changes them, and the tenant that sends them."""
    classes = library.token_classes
    alone = segment.broken < 1.0  # else nothing is drawn: the other scenarios keep their requests
    broken = not alone or draw.random() < segment.broken
    tenant = BROKEN if alone and broken else HONEST
    for turn in turns:
        trace = turn
        if segment.sampled:
            trace = sampled(trace, segment.sampled, classes, draw)
        if segment.verbatim and draw.random() < segment.verbatim:
            trace = misleading(trace, len(trace.output) + 1, classes, draw)
        elif segment.breaks and broken:
            trace = misleading(trace, segment.breaks, classes, draw)
        elif segment.renamed and broken:
            trace = renamed(trace, segment.renamed, classes, draw)
        if segment.drafter is not None or trace.model_accepted is None:
            drafter = segment.drafter or Drafter()
            trace = foreseen(trace, drafter, library.model_len, draw)
        yield trace, tenant
