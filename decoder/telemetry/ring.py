"""Draft events in memory that two processes share: a ring of rows of fixed width, one an event.

The decoding process writes rows and never waits: where there is no room, the newest is counted as
lost. The carrier reads slices; a row's place is free again once the carrier has settled it, so that
one that dies loses nothing. What it settled it says in one of two blocks and then turns to that
one: whoever looks finds counts of one moment, wherever a process was killed.

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
from decoder.contracts.events import COLUMNS, Origin, encode_columns
from decoder.contracts.features import NUM_FEATURES
from decoder.telemetry.books import Books

OWN: Final = np.dtype([
    ("number", "i8"), ("predicted", "f8"), ("predicted_model", "f8"), ("share", "f8"),
    ("cycle", "i4"), ("position", "i4"), ("draft_len", "i4"), ("drafted_len", "i4"),
    ("verified_len", "i4"), ("accepted", "i4"), ("model_accepted", "i4"),
    ("arm", "i4"), ("label", "i4"), ("censored", "i4"),
])  # fmt: skip
"""Of a row what is the cycle's own; a ``model_accepted`` of -1 is none."""
STEP: Final = np.dtype([
    ("time", "f8"), ("parameter", "f8"), ("draft_us", "f8"), ("step_us", "f8"),
    ("publication", "i8"), ("policy_version", "i4"), ("batch_size", "i4"), ("step_tokens", "i4"),
    ("role", "i4"), ("side", "i4"), ("parameter_name", "i4"),
])  # fmt: skip
"""What the cycles of a step share."""
NAMES: Final = np.dtype([
    ("request", "S24"), ("tenant", "S24"), ("session", "S24"), ("workload", "S32"),
    ("choice", "i4"),
])  # fmt: skip
"""What the cycles of a request share: pseudonyms, and which of its choices it is."""
ROW: Final = np.dtype(
    [*OWN.descr, *STEP.descr, *NAMES.descr, ("features", np.float32, (NUM_FEATURES,))]
)
"""Columns as of a draft event, packed; features of all zeros are those of no draft."""
_WIDTH: Final = ROW.itemsize
SPELLED: Final = ("arm", "label", "censored", "role", "side", "parameter_name")
"""Columns that hold the number of a word; see :meth:`Ring.word`."""

WORDS, LETTERS = 256, 64
BLOCK: Final = 1 << 20
HEAD, SETTLED, FULL, UNREADABLE, BEAT, TURN = range(6)
"""Of ``control``: rows written and rows settled since the ring was made, events lost for want of
room or since no row could be made of them, turns of the carrier, and blocks said."""
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

    def say(self, books: Books) -> None:
        """Say what was settled, all at once, and free the rows. For one process at a time."""
        told, counts = msgspec.json.encode(books), self.control
        at = _BLOCKS_AT + int(counts[TURN] + 1) % 2 * BLOCK
        self._memory[at : at + 4 + len(told)] = struct.pack("<I", len(told)) + told
        counts[TURN] += 1
        counts[SETTLED] = books.settled

    def books(self) -> Books:
        """What was said last; for any process, at any time."""
        while (turn := int(self.control[TURN])) >= 0:
            at = _BLOCKS_AT + turn % 2 * BLOCK
            (size,) = struct.unpack_from("<I", self._memory, at)
            told = self._memory[at + 4 : at + 4 + size]
            if turn == self.control[TURN]:
                break
        return msgspec.json.decode(told, type=Books) if told else Books()

    # --- what a row says

    def columns_of(self, rows: NDArray[Any]) -> tuple[dict[str, list[Any]], NDArray[np.float64]]:
        """Columns of a draft event and features, NaN where there was no draft."""
        words = [word.decode(errors="replace") for word in self._spelled.tolist()]
        told: dict[str, list[Any]] = {}
        for name in COLUMNS:
            column = rows[name].tolist()
            if name in SPELLED:
                column = [words[code] for code in column]
            elif rows.dtype[name].kind == "S":
                column = [text.decode() for text in column]
            told[name] = column
        told["model_accepted"] = [None if n < 0 else n for n in told["model_accepted"]]
        features = np.full((len(rows), NUM_FEATURES), np.nan)
        drafted = rows["draft_len"] > 0
        features[drafted] = rows["features"][drafted]
        return told, features

    def record(self, rows: NDArray[Any], origin: Origin, sequence: int) -> bytes:
        """The Kafka record of ``rows``, as :func:`encode_columns`.

        Raises:
            EventRefused: a row is no event.
        """
        try:
            columns, features = self.columns_of(rows)
        except (ValueError, IndexError) as error:  # memory that somebody wrote over
            raise EventRefused(f"a row is no event: {error}") from error
        return encode_columns(columns, features, origin, sequence)
