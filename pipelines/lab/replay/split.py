"""Training, warm-up and test, parted by session: no dialogue is on two sides.

A hash of the session's name decides, so that a file that grows, or is read with another limit,
keeps every session where it was.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from pipelines.lab.replay.traces import Trace


class Parts(NamedTuple):
    """``warm_up`` fills the suffix cache before each of the others, and is never measured."""

    train: list[Trace]
    warm_up: list[Trace]
    test: list[Trace]


def fraction(session: str, salt: str = "") -> float:
    """A number in 0..1 that depends on the name alone."""
    digest = hashlib.blake2b(session.encode(), digest_size=8, key=salt.encode()).digest()
    return int.from_bytes(digest, "big") / 2.0**64


def split(
    traces: Sequence[Trace], train: float = 0.6, warm_up: float = 0.1, limit: int | None = None
) -> Parts:
    """``traces`` in parts of about these shares, the rest for testing, each in their order; of all
    of them about ``limit``, in whole sessions."""
    parts = Parts([], [], [])
    for trace in traces:
        at = fraction(trace.session)
        parts[0 if at < train else 1 if at < train + warm_up else 2].append(trace)
    if limit is None:
        return parts
    shares = (train, warm_up, 1.0 - train - warm_up)
    some = (some_sessions(p, limit * share) for p, share in zip(parts, shares, strict=True))
    return Parts(*some)


def some_sessions(traces: Sequence[Trace], least: float) -> list[Trace]:
    """Whole sessions, chosen by hash, until they hold ``least`` traces; in their order."""
    sizes = Counter(trace.session for trace in traces)
    chosen: set[str] = set()
    held = 0
    for session in sorted(sizes, key=lambda name: fraction(name, "limit")):
        if held >= least:
            break
        chosen.add(session)
        held += sizes[session]
    return [trace for trace in traces if trace.session in chosen]
