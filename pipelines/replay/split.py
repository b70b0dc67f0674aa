"""Training, warm-up and test, parted by session: no dialogue is on two sides.

A hash of the session's name decides, so that a file that grows, or is read with another limit,
keeps every session where it was.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pipelines.replay.traces import Trace

Part = Literal["train", "warm-up", "test"]


@dataclass(frozen=True)
class Shares:
    """Shares of the sessions, in 0..1; what is left is for testing."""

    train: float = 0.6
    warm_up: float = 0.1


@dataclass(frozen=True)
class Parts:
    """``warm_up`` fills the suffix cache before each of the others, and is never measured."""

    train: list[Trace]
    warm_up: list[Trace]
    test: list[Trace]


def fraction(session: str, salt: str = "") -> float:
    """A number in 0..1 that depends on the name alone."""
    digest = hashlib.blake2b(session.encode(), digest_size=8, key=salt.encode()).digest()
    return int.from_bytes(digest, "big") / 2.0**64


def part_of(session: str, shares: Shares) -> Part:
    """Where a session belongs."""
    at = fraction(session)
    if at < shares.train:
        return "train"
    return "warm-up" if at < shares.train + shares.warm_up else "test"


def split(traces: Sequence[Trace], shares: Shares) -> Parts:
    """Part ``traces``; each part keeps their order."""
    parts: dict[Part, list[Trace]] = {"train": [], "warm-up": [], "test": []}
    for trace in traces:
        parts[part_of(trace.session, shares)].append(trace)
    return Parts(parts["train"], parts["warm-up"], parts["test"])


def limited(parts: Parts, limit: int | None, shares: Shares) -> Parts:
    """About ``limit`` traces of all ``parts``, each by its share, in whole sessions."""
    if limit is None:
        return parts
    test = 1.0 - shares.train - shares.warm_up
    return Parts(
        some_sessions(parts.train, limit * shares.train),
        some_sessions(parts.warm_up, limit * shares.warm_up),
        some_sessions(parts.test, limit * test),
    )


def some_sessions(traces: Sequence[Trace], least: float) -> list[Trace]:
    """Whole sessions, chosen by hash, until they hold ``least`` traces; in their order."""
    sizes: dict[str, int] = {}
    for trace in traces:
        sizes[trace.session] = sizes.get(trace.session, 0) + 1
    chosen: set[str] = set()
    held = 0
    for session in sorted(sizes, key=lambda name: fraction(name, "limit")):
        if held >= least:
            break
        chosen.add(session)
        held += sizes[session]
    return [trace for trace in traces if trace.session in chosen]
