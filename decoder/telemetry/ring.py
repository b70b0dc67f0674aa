"""Draft events in memory that two processes share: a ring of rows of fixed width, one an event.

The decoding process writes rows and never waits: where there is no room, the newest is counted as
lost. The exporter reads slices; a row's place is free again once the exporter has settled it, so an
exporter that dies loses nothing. Its progress is double-buffered: a reader sees a consistent
snapshot, wherever a process was killed.

The memory has no name: no file is left behind, and it ends with the last process that holds it.
What was written once stays taken, ``size`` rows at most: to take it anew costs more than a row.
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
from decoder.telemetry.delivery import DeliveryProgress

_WIDTH: Final = ROW.itemsize

WORDS, LETTERS = 256, 64
BLOCK: Final = 1 << 20
HEAD, SETTLED, FULL, UNREADABLE, BEAT, TURN = range(6)
"""Of ``control``: rows written and rows settled since the ring was made, events lost for want of
room or since no row could be made of them, turns of the exporter, and blocks said."""
_WORDS_AT, _BLOCKS_AT = 4096, 4096 + WORDS * LETTERS
_ROWS_AT: Final = _BLOCKS_AT + 2 * BLOCK


@cache
def packer(kind: np.dtype[Any]) -> struct.Struct:
    """Packs the values of one row of ``kind``, in the order of its fields."""
    codes = {"i4": "i", "i8": "q", "f8": "d"}
    parts = [kind[name].str.lstrip("<|") for name in kind.names or ()]
    return struct.Struct("<" + "".join(codes.get(p) or p[1:] + "s" for p in parts))


class Ring:
    """``size`` rows. ``control`` is int64, ``rows`` of dtype :data:`ROW` [size], ``fd`` the memory.

    One thread writes, and one process takes.
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
        self.control = np.frombuffer(self._memory, np.int64, _WORDS_AT // 8)
        self._spelled = np.frombuffer(self._memory, f"S{LETTERS}", WORDS, _WORDS_AT)
        self.rows = np.frombuffer(self._memory, ROW, size, _ROWS_AT)
        self._codes: dict[str, int] = {"": 0}

    def __len__(self) -> int:
        return int(self.control[HEAD] - self.control[SETTLED])

    # --- who writes

    def word(self, text: str) -> int:
        """The number that stands for ``text`` in this ring.

        Raises:
            ValueError: it is too long, no UTF-8, or there are too many words.
        """
        code = self._codes.get(text)
        if code is None:
            code, told = len(self._codes), text.encode()
            if code == WORDS or len(told) > LETTERS:
                raise ValueError(f"no room for the word {text!r}")
            self._spelled[code] = told
            self._codes[text] = code
        return code

    # --- who takes

    def slice(self, first: int, end: int) -> NDArray[Any]:
        """Rows from number ``first`` to before ``end``, of dtype :data:`ROW`: a copy."""
        found: NDArray[Any] = self.rows[self.places(first, end)]
        return found

    def places(self, first: int, end: int) -> NDArray[np.int64]:
        """Where these lie in ``rows``."""
        return np.arange(first, end) % self.size

    def write_progress(self, progress: DeliveryProgress) -> None:
        """Publish what was settled, all at once, and free the rows. For one process at a time."""
        told, counts = msgspec.json.encode(progress), self.control
        at = _BLOCKS_AT + int(counts[TURN] + 1) % 2 * BLOCK
        self._memory[at : at + 4 + len(told)] = struct.pack("<I", len(told)) + told
        counts[TURN] += 1
        counts[SETTLED] = progress.settled

    def progress(self) -> DeliveryProgress:
        """What was published last; for any process, at any time."""
        while (turn := int(self.control[TURN])) >= 0:
            at = _BLOCKS_AT + turn % 2 * BLOCK
            (size,) = struct.unpack_from("<I", self._memory, at)
            told = self._memory[at + 4 : at + 4 + size]
            if turn == self.control[TURN]:
                break
        return msgspec.json.decode(told, type=DeliveryProgress) if told else DeliveryProgress()

    # --- what a row says

    def batch(self, rows: NDArray[Any], origin: Origin, sequence: int) -> EventBatch:
        """The events of ``rows``, as they are.

        Raises:
            EventRefused: a row is no event.
        """
        numbers = {field.name: rows[field.name] for field in NUMBERS}
        names = dict[str, list[str]]()
        try:
            words = [word.decode(errors="replace") for word in self._spelled.tolist()]
            for field in STRINGS:
                column = rows[field.name].tolist()
                names[field.name] = (
                    [words[code] for code in column]
                    if field.interned
                    else [text.decode() for text in column]
                )
        except (ValueError, IndexError) as error:  # memory that somebody wrote over
            raise EventRefused(f"a row is no event: {error}") from error
        return EventBatch(origin, sequence, numbers, names, rows["features"])
