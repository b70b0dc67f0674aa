"""Records that wait in a file while the broker is away: one SQLite file a life, one row a record.

SQLite does what a queue in a file needs and is easily got wrong: a write that was cut short is
rolled back, room is used again, and a full disk is an error like any other. What it does not check,
the content, zstd does. Only numbers are in it: what would have been on the topic.

The file of a life that ended before it was empty is found by whichever worker of the same user,
machine and broker comes next, and delivered as it is: a record names its worker and life, and its
number within them, so readers know one that they have had. A lock, held by the worker's process as
long as it lives, says whose file is still in use.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import sqlite3
import time
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import zstandard

from decoder.telemetry.books import Books

log = logging.getLogger(__name__)

LOCK, FILE = ".lock", ".records"
KEPT_DAYS: Final = 7
"""What nobody fetched by then is not kept on a machine for ever."""
LEVEL: Final = 1
"""Of zstd: 240 bytes an event instead of 670, in 2 us."""
SpillError = (OSError, sqlite3.Error, zstandard.ZstdError, UnicodeDecodeError)
"""What may go wrong with a file; the last where SQLite's own names in it are damaged."""


def is_damage(error: Exception) -> bool:
    """Whether the file itself is at fault, and not the disk, the system or another's lock, which
    may be better the next time.
    """
    if isinstance(error, sqlite3.OperationalError):  # an error of this kind: it has other tables
        return getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) == sqlite3.SQLITE_ERROR
    return isinstance(error, sqlite3.DatabaseError | zstandard.ZstdError | UnicodeDecodeError)


class Record(NamedTuple):
    """``rows`` encoded events. ``id`` grows in the order in which records were made."""

    id: int
    partition: int
    sequence: int
    rows: int
    value: bytes


class Cut(NamedTuple):
    """A record of ``partition`` came in two: ids from ``first`` to before ``past`` moved up."""

    partition: int
    first: int
    past: int


class Spill:
    """The file at ``path``, made when there is something to hold; ``rows`` and ``size`` (bytes) are
    what it holds, ``cuts`` what its records' numbers do not know of, ``sequences`` of each
    partition the number behind its last record's, when the file was opened.

    Raises:
        SpillError: from every method.
    """

    def __init__(self, path: Path, key: str = "") -> None:
        """Open the file if there is one. ``key`` is of its records on the topic."""
        self.path, self.key = path, key
        self.rows = self.size = 0
        self.last = -1  # greatest id
        self.cuts: list[Cut] = []
        self.sequences: dict[int, int] = {}
        self._file: sqlite3.Connection | None = None
        if path.exists():
            try:
                self._read(self._open())
            except SpillError:
                self._let_go()
                raise

    def _read(self, file: sqlite3.Connection) -> None:
        """Take over what the file holds."""
        for (self.key,) in file.execute("SELECT key FROM origin"):
            pass
        told = file.execute("SELECT sum(rows), sum(length(value)), max(id) FROM records")
        rows, size, last = told.fetchone()
        self.rows, self.size = int(rows or 0), int(size or 0)
        self.last = -1 if last is None else last
        self.cuts = [Cut(*told) for told in file.execute("SELECT * FROM cuts") if _whole(told)]
        asked = (
            "SELECT max(id), partition, sequence FROM records"
            " WHERE typeof(partition) = 'integer' AND typeof(sequence) = 'integer'"
            " GROUP BY partition"
        )
        for last, partition, number in file.execute(asked):
            self.sequences[partition] = number + 1 + moved(self.cuts, partition, last)

    def _open(self) -> sqlite3.Connection:
        if self._file is not None:
            return self._file
        self._file = file = sqlite3.connect(self.path, timeout=0.0, isolation_level=None)
        try:
            file.text_factory = partial(str, encoding="utf-8", errors="replace")
            # Not synchronous: what a kernel that dies loses is not worth waiting for a disk.
            file.executescript(
                "PRAGMA page_size = 16384; PRAGMA synchronous = OFF;"
                "PRAGMA locking_mode = EXCLUSIVE;"
                "CREATE TABLE IF NOT EXISTS origin (key TEXT);"
                "CREATE TABLE IF NOT EXISTS records (id INTEGER PRIMARY KEY,"
                " partition INTEGER, sequence INTEGER, rows INTEGER, value BLOB);"
                "CREATE TABLE IF NOT EXISTS cuts (partition INTEGER, first INTEGER, past INTEGER);"
            )
            if file.execute("SELECT count(*) FROM origin").fetchone() == (0,):
                file.execute("INSERT INTO origin VALUES (?)", [self.key])
        except SpillError:
            self._let_go()
            raise
        return file

    def _let_go(self) -> None:
        """Close the file: a connection that is only forgotten keeps its lock for a while."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def put(self, record: Record) -> None:
        """Add a record."""
        packed = zstandard.ZstdCompressor(LEVEL, write_checksum=True).compress(record.value)
        told = (record.id, record.partition, record.sequence, record.rows, packed)
        self._open().execute("INSERT OR REPLACE INTO records VALUES (?, ?, ?, ?, ?)", told)
        self.rows += record.rows
        self.size += len(packed)
        self.last = max(self.last, record.id)

    def cut(self, cut: Cut, oldest: int) -> None:
        """Remember ``cut`` for whoever opens the file after this; no id is below ``oldest``."""
        self._open().execute("DELETE FROM cuts WHERE past <= ?", [oldest])
        self._open().execute("INSERT INTO cuts VALUES (?, ?, ?)", cut)
        self.cuts = [*still(self.cuts, oldest), cut]

    def heads(self, most: int) -> list[tuple[int, int]]:
        """Ids and partitions of the oldest."""
        asked = "SELECT id, partition FROM records ORDER BY id LIMIT ?"
        return self._open().execute(asked, [most]).fetchall() if self.rows else []

    def get(self, record: int) -> Record:
        """The record of that id."""
        found = self._open().execute("SELECT * FROM records WHERE id = ?", [record]).fetchone()
        _check(found)
        number, partition, sequence, rows, packed = found
        value = zstandard.ZstdDecompressor().decompress(packed)
        return Record(number, partition, sequence, rows, value)

    def remove(self, record: int) -> int:
        """Take a record out; how many events it held."""
        asked = "SELECT rows, length(value) FROM records WHERE id = ?"
        found = self._open().execute(asked, [record]).fetchone()
        if found is None:
            return 0
        _check(found)
        self._open().execute("DELETE FROM records WHERE id = ?", [record])
        self.rows -= found[0]
        self.size -= found[1]
        return int(found[0])

    def oldest(self) -> int | None:
        """Id of the oldest record."""
        return next((number for number, _ in self.heads(1)), None)

    def close(self) -> None:
        """Close the file, and remove it if nothing is left in it."""
        self._let_go()
        if not self.rows:
            self.path.unlink(missing_ok=True)


def _check(row: tuple[Any, ...] | None) -> None:
    """What SQLite reads of a damaged page may be of any type, and what it lists not be there."""
    if row is None:
        raise sqlite3.DatabaseError("a row of it cannot be found again")
    *numbers, last = row
    if not _whole(numbers) or not isinstance(last, int | bytes):
        raise sqlite3.DatabaseError("a row of it is damaged")


def _whole(numbers: Iterable[Any]) -> bool:
    return all(isinstance(number, int) for number in numbers)


def still(cuts: Iterable[Cut], oldest: int) -> list[Cut]:
    """Those that may have moved a record whose id is ``oldest`` or above."""
    return [cut for cut in cuts if cut.past > oldest]


def moved(cuts: Iterable[Cut], partition: int, record: int) -> int:
    """By how much the number of a record, by its id, is above the one that it was made with."""
    return sum(cut.partition == partition and cut.first <= record < cut.past for cut in cuts)


def folder_of(root: Path, servers: str) -> Path:
    """Where workers that speak to the same brokers leave their files."""
    return root / hashlib.sha256(servers.encode()).hexdigest()[:16]


def claim(folder: Path, life: str) -> int:
    """Say that the life's file is in use as long as the returned descriptor is open.

    Raises:
        OSError: no file can be made there.
    """
    made = folder / f"{life}.new"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        lock = os.open(made, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:  # another worker left at that moment, and the folder was empty
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(made, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    made.rename(folder / f"{life}{LOCK}")  # nobody sees it before it is locked
    return lock


def release(folder: Path, life: str) -> None:
    """Remove the life's lock, unless its file still holds something, and a folder that is empty."""
    if not (folder / f"{life}{FILE}").exists():
        (folder / f"{life}{LOCK}").unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            folder.rmdir()


def expire(root: Path, books: Books) -> None:
    """Remove what lives that ended left in any folder of ``root`` more than ``KEPT_DAYS`` ago: no
    worker came to deliver it, and nobody else will. ``books`` count it.
    """
    oldest = time.time() - KEPT_DAYS * 86_400
    for folder in root.iterdir() if root.is_dir() else ():
        for spill, life, lock in former(folder, books):
            try:
                spill.close()
                if spill.path.stat().st_mtime < oldest:
                    books.lose_former("expired", spill.rows)
                    _remove(spill, life, f"waited for a broker for {KEPT_DAYS} days")
            finally:
                os.close(lock)


def bound(folder: Path, most: int, books: Books) -> None:
    """Remove the oldest lives that ended until those left in ``folder`` hold ``most`` bytes of
    records together: a worker that fails again and again while the broker is away would leave a
    file each time. ``books`` count what went.
    """
    left: list[tuple[float, str, int]] = []
    for spill, life, lock in former(folder, books):
        try:
            spill.close()
            left.append((spill.path.stat().st_mtime, life, spill.size))
        finally:
            os.close(lock)
    held, too_many = 0, set[str]()
    for _, life, size in sorted(left, reverse=True):
        held += size
        if held > most:
            too_many.add(life)
    for spill, life, lock in former(folder, books) if too_many else ():
        try:
            spill.close()
            if life in too_many:
                books.lose_former("bound", spill.rows)
                _remove(spill, life, f"are more than the {most >> 20} MiB that may wait")
        finally:
            os.close(lock)


def _remove(spill: Spill, life: str, why: str) -> None:
    log.warning("%d draft events of a former life are lost, they %s: %s", spill.rows, why,
                spill.path)  # fmt: skip
    spill.path.unlink(missing_ok=True)
    release(spill.path.parent, life)


def former(folder: Path, books: Books) -> Iterator[tuple[Spill, str, int]]:
    """Files of lives that ended, each with its life and the descriptor of the lock that is now
    held; what cannot be read is removed with a word in the log, and counted in ``books``. One is
    looked at when it is asked for.
    """
    for path in sorted(folder.glob(f"*{LOCK}")):
        life = path.name.removesuffix(LOCK)
        try:
            lock = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue  # another worker was quicker
        held = False
        try:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # one that was removed meanwhile is nobody's
                held = path.exists() and os.fstat(lock).st_ino == path.stat().st_ino
            if not held:
                continue
            file = folder / f"{life}{FILE}"
            try:
                spill = Spill(file)
            except SpillError as error:
                log.warning("%s, left by a worker that ended, cannot be read: %s", file, error)
                if is_damage(error):
                    books.unread += 1
                    file.unlink(missing_ok=True)
                    release(folder, life)
                held = False
                continue
            if not spill.rows:
                spill.close()
                release(folder, life)
                held = False
                continue
            yield spill, life, lock
        except OSError as error:
            log.warning("%s cannot be looked at: %s", folder, error)
        finally:
            if not held:
                os.close(lock)
