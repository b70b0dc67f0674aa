"""What passes between the decoding process and its carrier.

Down go frames: a head, then the payload. Up come lines: ``B`` and the books as JSON, ``L`` and a
record for the log.
"""

from __future__ import annotations

import struct
from typing import Any, Final, NamedTuple

import msgspec

from decoder.telemetry.books import Books

HEAD: Final = struct.Struct("<IcI")
"""Of a frame: bytes of the payload, kind, events in it."""
HELLO, EVENTS, STATUS, ROUND = "H", "E", "S", "R"
"""Kinds: a :class:`Hello`, cycles as ``told.py`` has them, a status record, a round of a trial."""


class Frame(NamedTuple):
    """One frame; ``rows`` events where it holds some."""

    kind: str
    rows: int
    payload: bytes

    def encoded(self) -> bytes:
        """As it is written."""
        return HEAD.pack(len(self.payload), self.kind.encode(), self.rows) + self.payload


class Hello(msgspec.Struct):
    """What a carrier is told first: how to reach Kafka, who it speaks for, where the one before it
    ended, the ``folder`` of at most ``most`` bytes of spilled records, "" for none, and how many
    events it may send ``per_second``, 0 for any number.
    """

    kafka: dict[str, Any]
    scope: str
    worker: str
    life: str
    target: str
    drafter: str
    books: Books
    folder: str
    most: int
    per_second: float
