"""What workers that ended left in their files, for this one to deliver."""

from __future__ import annotations

import logging
import os
import sqlite3
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final, NamedTuple

import zstandard

from decoder.telemetry.books import Books
from decoder.telemetry.spill import Record, Spill, SpillError, former, is_damage, release

log = logging.getLogger(__name__)

EVERY_S: Final = 60.0
"""How often files are looked for."""


class Left(NamedTuple):
    """A record of a former life, the file it is from, and the key it has on the topic."""

    record: Record
    spill: Spill
    key: str


class FormerLives:
    """The files in ``folder`` whose workers have ended, one after the other; one is open.

    ``books`` count what is lost of them.
    """

    def __init__(self, folder: Path, books: Books) -> None:
        self._folder, self._books = folder, books
        self._held: tuple[Spill, str, int] | None = None
        self._found: Iterator[tuple[Spill, str, int]] = iter(())
        self._looked_at = -EVERY_S

    def oldest(self, partitions: Collection[int]) -> Left | None:
        """The record to deliver next; None where there is none. It stays in its file until it is
        removed. One that is damaged, or for none of ``partitions``, is lost, as the log says.
        """
        while (spill := self._file()) is not None:
            try:
                for number, partition in spill.heads(1):
                    if partition not in partitions:
                        self._lose(spill, number, "partition", f"partition {partition} is gone")
                        continue
                    try:
                        return Left(spill.get(number), spill, spill.key)
                    except zstandard.ZstdError as error:  # this record alone: others may be whole
                        self._lose(spill, number, "damaged", error)
                if spill.rows:
                    continue
            except Exception as error:  # noqa: BLE001 - what others left ends nothing of ours
                self._failed(spill, error)
            self.close()
        return None

    def remove(self, left: Spill, record: int) -> int:
        """Take a record out of the file that it is from; how many events it held. Where that fails
        the file is let go of until the next look, and the record is delivered once more.
        """
        try:
            return _removed(left, record)
        except SpillError as error:
            self._failed(left, error)
            self.close()
            return 0

    def _lose(self, spill: Spill, record: int, reason: str, why: object) -> None:
        rows = _removed(spill, record)
        self._books.lose_former(reason, rows)
        log.warning("%d draft events of a former life are lost: %s", rows, why)

    def _failed(self, spill: Spill, error: Exception) -> None:
        if is_damage(error):
            log.warning("%s, of a former life, is damaged, %d draft events are lost: %s",
                        spill.path, spill.rows, error)  # fmt: skip
            self._books.lose_former("damaged", spill.rows)
            spill.rows = 0
        else:
            log.warning("%s, of a former life, is left alone for now: %s", spill.path, error)

    def _file(self) -> Spill | None:
        """The one that is open, or the next."""
        if self._held is None:
            self._held = next(self._found, None)
        if self._held is None and time.monotonic() >= self._looked_at + EVERY_S:
            self._looked_at = time.monotonic()
            self._found = former(self._folder, self._books)
            self._held = next(self._found, None)
        return self._held[0] if self._held is not None else None

    def close(self) -> None:
        """Leave the open file to whoever comes next."""
        if self._held is None:
            return
        (spill, life, lock), self._held = self._held, None
        try:
            spill.close()
            release(self._folder, life)
        except SpillError as error:
            log.warning("%s was not closed: %s", spill.path, error)
        os.close(lock)


def _removed(spill: Spill, record: int) -> int:
    """As :meth:`Spill.remove`, of a record that is there: else its file is damaged, and would show
    it for ever.
    """
    rows = spill.remove(record)
    if not rows:
        raise sqlite3.DatabaseError("a row of it cannot be found again")
    return rows
