"""What workers that ended left in their files, for this one to deliver."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Collection
from pathlib import Path
from typing import Final, NamedTuple

from decoder.telemetry.spill import Record, Spill, SpillError, former, release

log = logging.getLogger(__name__)

EVERY_S: Final = 60.0
"""How often files are looked for."""


class Left(NamedTuple):
    """A record of a former life, the file it is from, and the key it has on the topic."""

    record: Record
    spill: Spill
    key: str


class FormerLives:
    """The files in ``folder`` whose workers have ended, one after the other."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._held: list[tuple[Spill, str, int]] = []
        self._looked_at = -EVERY_S

    def oldest(self, partitions: Collection[int]) -> Left | None:
        """The record to deliver next; None where there is none. It stays in its file until it is
        removed. One for none of ``partitions`` is lost, with a word in the log.
        """
        if not self._held and time.monotonic() >= self._looked_at + EVERY_S:
            self._looked_at = time.monotonic()
            self._held = list(former(self._folder))
        while self._held:
            spill = self._held[0][0]
            try:
                for number, partition in spill.heads(1):
                    if partition in partitions:
                        return Left(spill.get(number), spill, spill.key)
                    log.warning("a former life's events are lost: partition %d is gone", partition)
                    spill.remove(number)
                if spill.rows:
                    continue
            except SpillError as error:
                log.warning("%s, of a former life, is damaged and lost: %s", spill.path, error)
                spill.rows = 0
            self._leave(*self._held.pop(0))
        return None

    def close(self) -> None:
        """Leave the files to whoever comes next."""
        while self._held:
            self._leave(*self._held.pop(0))

    def _leave(self, spill: Spill, life: str, lock: int) -> None:
        try:
            spill.close()
            release(self._folder, life)
        except SpillError as error:
            log.warning("%s was not closed: %s", spill.path, error)
        os.close(lock)
