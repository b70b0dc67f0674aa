"""The files that the Prometheus client maps, with room asked for before anything is written.

The client lets them grow without that: the kernel ends a process (SIGBUS) that writes into one when
the disk, or ``/dev/shm``, is full. What has no room there is kept in memory, where no page finds
it, until it has.
"""

from __future__ import annotations

import mmap
import os
import sys
import time
from io import BytesIO
from pathlib import Path
from typing import BinaryIO, Final

from prometheus_client import mmap_dict, values

from decoder.complaints import Complaints

FOLDER_VARIABLE: Final = "PROMETHEUS_MULTIPROC_DIR"
FIRST: Final = 1 << 16
"""Bytes that the client gives a file at first; it doubles them."""
ENTRY: Final = 32
"""Bytes of an entry, at most, beside its key."""
RETRY_S: Final = 10.0

_COMPLAINTS: Final = Complaints()


def _reserve(path: Path, size: int) -> bool:
    """Whether there is room for so many bytes of ``path``, which is then taken."""
    empty = False
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            empty = not os.fstat(file).st_size
            os.posix_fallocate(file, 0, max(size, os.fstat(file).st_size))
        finally:
            os.close(file)
    except OSError as error:
        if empty:  # a file without a head is one that no page can be made of
            path.unlink(missing_ok=True)
        _COMPLAINTS.warning("metrics were not published: %s. Make room for them, or name another "
                            "folder with %s.", error, FOLDER_VARIABLE)  # fmt: skip
        return False
    return True


class Mapped(mmap_dict.MmapedDict):
    """The client's dictionary in a file, or in memory while that cannot be written."""

    def __init__(self, filename: str, read_mode: bool = False) -> None:
        self._home = Path(filename)
        self._away = not _reserve(self._home, FIRST)
        if not self._away:
            super().__init__(filename, read_mode)  # type: ignore[no-untyped-call]
            return
        self._positions: dict[str, int] = {}
        self._used, self._capacity, self._m = 8, FIRST, mmap.mmap(-1, FIRST)  # an empty one's
        self._m[:4] = self._used.to_bytes(4, sys.byteorder)
        self._f: BinaryIO = BytesIO()
        self._again = time.monotonic() + RETRY_S

    def write_value(self, key: str, value: float, timestamp: float) -> None:
        """Set the value of ``key``."""
        super().write_value(key, value, timestamp)  # type: ignore[no-untyped-call]
        if self._away and time.monotonic() >= self._again:
            self._again = time.monotonic() + RETRY_S
            if _reserve(self._home, self._capacity):
                file = self._home.open("r+b")
                self._move(file, mmap.mmap(file.fileno(), self._capacity))
                self._away = False

    def _init_value(self, key: str) -> None:
        size = self._capacity
        while self._used + len(key.encode()) + ENTRY > size:
            size *= 2
        if size > self._capacity and (self._away or not _reserve(self._home, size)):
            self._move(BytesIO(), mmap.mmap(-1, size))
            self._away, self._capacity = True, size
            self._again = time.monotonic() + RETRY_S
        super()._init_value(key)  # type: ignore[no-untyped-call]

    def _move(self, file: BinaryIO, there: mmap.mmap) -> None:
        """Go on in ``there``, with what there is."""
        there[: self._capacity] = self._m[: self._capacity]
        self._m.close()
        self._f.close()
        self._f, self._m = file, there


def install() -> None:
    """Have all metrics of this process kept so."""
    values.MmapedDict = Mapped  # type: ignore[attr-defined]
