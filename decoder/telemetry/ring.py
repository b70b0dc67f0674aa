"""Ring buffer of draft events in shared memory: rows of fixed width, one for each event.

The decoding process writes rows and never waits: when the ring is full, the newest event is dropped
and counted. The exporter reads slices. A row is freed once the exporter has settled it, so an
exporter that dies loses nothing. Its progress is double-buffered: a reader sees a consistent
snapshot, wherever a process was killed.

The memory is anonymous: it leaves no file, and is freed with the last process that maps it. Pages
once written stay allocated, since allocating one again costs more than writing a row.
"""

from __future__ import annotations

import mmap
import os
import struct
import weakref
from functools import cache
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from decoder.contracts.errors import EventRefused
from decoder.contracts.events import EventBatch, Origin
from decoder.contracts.fields import NUMBERS, ROW, STRINGS

_WIDTH: Final = ROW.itemsize

MAX_STRINGS, STRING_BYTES = 256, 64
BLOCK: Final = 1 << 20
HEAD, SETTLED, FULL, UNREADABLE, BEAT, TURN = range(6)
"""Indices of ``control``: rows written and rows settled since the ring was made, events lost to a
full ring or because no row could be made of them, turns of the exporter, and progress writes."""
_STRINGS_AT, _BLOCKS_AT = 4096, 4096 + MAX_STRINGS * STRING_BYTES
_ROWS_AT: Final = _BLOCKS_AT + 2 * BLOCK


class DeliveryCounters(msgspec.Struct):
    """Events of one life (incarnation) by outcome, and rounds of trials. Mutable."""

    sent: int = 0
    in_doubt: int = 0
    failed: int = 0
    dropped: dict[str, int] = {}
    refused: dict[str, int] = {}
    rounds_sent: int = 0
    rounds_dropped: int = 0

    @property
    def settled(self) -> int:
        """Events whose outcome is final."""
        lost = sum(self.dropped.values()) + sum(self.refused.values()) + self.failed
        return self.sent + self.in_doubt + lost


class DeliveryProgress(DeliveryCounters):
    """The counters, and the position from which another exporter can resume.

    Rows ``settled`` to ``end`` (exclusive) are in flight, as the record with number ``sequence``.
    Later records have at most ``limit`` events. All go to one ``partition``; -1 where it is not
    known yet. A restarted exporter encodes the same record again, so readers detect a duplicate.
    """

    end: int = 0
    limit: int = 0
    partition: int = -1
    sequence: int = 0


class DeliveryReport(DeliveryCounters):
    """The outcomes of all events of a worker's life; its status has them by the same names."""

    made: int = 0
    waiting: int = 0
    deaths: int = 0


@cache
def packer(kind: np.dtype[Any]) -> struct.Struct:
    """The packer of one row of ``kind``, in the order of its fields."""
    codes = {"i4": "i", "i8": "q", "f8": "d"}
    parts = [kind[name].str.lstrip("<|") for name in kind.names or ()]
    return struct.Struct("<" + "".join(codes.get(p) or p[1:] + "s" for p in parts))


class Ring:
    """``size`` rows. ``control`` is int64, ``rows`` of dtype :data:`ROW` [size], ``fd`` the memory.

    One thread writes, and one process reads.
    """

    def __init__(self, size: int, fd: int | None = None) -> None:
        """Make a ring, or attach to the one behind ``fd``.

        Raises:
            OSError: there is no such memory.
        """
        self.size = size
        self.fd = os.memfd_create("hvd-events") if fd is None else fd
        weakref.finalize(self, os.close, self.fd)
        if fd is None:
            os.ftruncate(self.fd, _ROWS_AT + size * _WIDTH)
        self._memory = mmap.mmap(self.fd, _ROWS_AT + size * _WIDTH)
        self.control = np.frombuffer(self._memory, np.int64, _STRINGS_AT // 8)
        self._interned = np.frombuffer(self._memory, f"S{STRING_BYTES}", MAX_STRINGS, _STRINGS_AT)
        self.rows = np.frombuffer(self._memory, ROW, size, _ROWS_AT)
        self._codes: dict[str, int] = {"": 0}

    def __len__(self) -> int:
        return int(self.control[HEAD] - self.control[SETTLED])

    def intern(self, text: str) -> int:
        """The interned id of ``text`` in this ring.

        Raises:
            ValueError: it is too long, no UTF-8, or there are too many strings.
        """
        code = self._codes.get(text)
        if code is None:
            code, encoded = len(self._codes), text.encode()
            if code == MAX_STRINGS or len(encoded) > STRING_BYTES:
                raise ValueError(f"no room to intern {text!r}")
            self._interned[code] = encoded
            self._codes[text] = code
        return code

    def slice(self, first: int, end: int) -> NDArray[Any]:
        """A copy of rows ``first`` to ``end`` (exclusive), of dtype :data:`ROW`."""
        copied: NDArray[Any] = self.rows[self.indices(first, end)]
        return copied

    def indices(self, first: int, end: int) -> NDArray[np.int64]:
        """Indices in ``rows`` of rows ``first`` to ``end`` (exclusive)."""
        return np.arange(first, end) % self.size

    def write_progress(self, progress: DeliveryProgress) -> None:
        """Publish ``progress`` atomically and free settled rows. For one process at a time."""
        encoded, counts = msgspec.json.encode(progress), self.control
        at = _BLOCKS_AT + int(counts[TURN] + 1) % 2 * BLOCK
        self._memory[at : at + 4 + len(encoded)] = struct.pack("<I", len(encoded)) + encoded
        counts[TURN] += 1
        counts[SETTLED] = progress.settled

    def progress(self) -> DeliveryProgress:
        """The progress published last; for any process, at any time."""
        while (turn := int(self.control[TURN])) >= 0:
            at = _BLOCKS_AT + turn % 2 * BLOCK
            (size,) = struct.unpack_from("<I", self._memory, at)
            encoded = self._memory[at + 4 : at + 4 + size]
            if turn == self.control[TURN]:
                break
        if not encoded:
            return DeliveryProgress()
        return msgspec.json.decode(encoded, type=DeliveryProgress)

    def batch(self, rows: NDArray[Any], origin: Origin, sequence: int) -> EventBatch:
        """The events of ``rows``, which are not checked.

        Raises:
            EventRefused: a row is no event.
        """
        numbers = {field.name: rows[field.name] for field in NUMBERS}
        names = dict[str, list[str]]()
        try:
            words = [word.decode(errors="replace") for word in self._interned.tolist()]
            for field in STRINGS:
                column = rows[field.name].tolist()
                names[field.name] = (
                    [words[code] for code in column]
                    if field.interned
                    else [text.decode() for text in column]
                )
        except (ValueError, IndexError) as error:  # the shared memory was overwritten
            raise EventRefused(f"a row is no event: {error}") from error
        return EventBatch(origin, sequence, numbers, names, rows["features"])
