"""The files that the Prometheus client maps, with room asked for before anything is written.

The client lets them grow without that: the kernel ends a process (SIGBUS) that writes into one when
the disk, or ``/dev/shm``, is full. A file for which there is no more room stays as it is, and its
process goes on in memory, where no page finds it, until it is started again.
"""

from __future__ import annotations

import mmap
import os
from io import BytesIO
from pathlib import Path
from typing import Final

from prometheus_client import mmap_dict, values

from decoder.limited_log import LimitedLog

FOLDER_VARIABLE: Final = "PROMETHEUS_MULTIPROC_DIR"
FIRST: Final = 1 << 16
"""Bytes that the client gives a file at first; it doubles them."""
ENTRY: Final = 32
"""Bytes of an entry, at most, beside its key."""

MOST: Final = 1 << 26
"""Bytes of one in memory, which are taken as they are written."""

_LIMITED_LOG: Final = LimitedLog()


def _reserve(path: Path, size: int) -> bool:
    """Whether there is room for so many bytes of ``path``, which is then taken."""
    empty = False
    try:
        with path.open("ab") as file:
            empty = not file.tell()
            os.posix_fallocate(file.fileno(), 0, max(size, file.tell()))
    except OSError as error:
        if empty:  # a file without a head is one that no page can be made of
            path.unlink(missing_ok=True)
        _LIMITED_LOG.warning("metrics were not published: %s. Make room for them, or name another "
                            "folder with %s, and start this process again.",
                            error, FOLDER_VARIABLE)  # fmt: skip
        return False
    return True


class Mapped(mmap_dict.MmapedDict):
    """The client's dictionary in a file, or in memory once that cannot be written."""

    def __init__(self, filename: str, read_mode: bool = False) -> None:
        self._home = Path(filename)
        self._away = not _reserve(self._home, FIRST)
        if not self._away:
            super().__init__(filename, read_mode)  # type: ignore[no-untyped-call]
            return
        self._f, self._positions, self._used = BytesIO(), dict[str, int](), 8
        self._go_on_in_memory(b"")

    def _init_value(self, key: str) -> None:
        size = self._capacity
        while self._used + len(key.encode()) + ENTRY > size:
            size *= 2
        if not self._away and size > self._capacity and not _reserve(self._home, size):
            self._away = True
            self._go_on_in_memory(self._m[: self._used])
        super()._init_value(key)  # type: ignore[no-untyped-call]

    def _go_on_in_memory(self, held: bytes) -> None:
        self._m, self._capacity = mmap.mmap(-1, MOST), MOST
        self._m[: len(held)] = held


def install() -> None:
    """Have all metrics of this process kept so."""
    values.MmapedDict = Mapped  # type: ignore[attr-defined]
