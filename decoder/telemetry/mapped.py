"""Memory-mapped files of the Prometheus client, with disk space reserved before each write.

The client reserves none: when the disk or ``/dev/shm`` is full, the kernel ends a process that
writes into such a file (SIGBUS). Here a file that cannot grow stays as it is. Its process keeps its
metrics in memory, unpublished, until it is restarted.
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
INITIAL_BYTES: Final = 1 << 16
"""Initial size of a client's file in bytes; the client doubles it."""
ENTRY_BYTES: Final = 32
"""Most bytes of an entry, without its key."""

MEMORY_BYTES: Final = 1 << 26
"""Bytes of a map in memory, allocated as they are written."""

_LIMITED_LOG: Final = LimitedLog()


def _reserve(path: Path, size: int) -> bool:
    """Reserve ``size`` bytes for ``path``; False where there is no room."""
    empty = False
    try:
        with path.open("ab") as file:
            empty = not file.tell()
            os.posix_fallocate(file.fileno(), 0, max(size, file.tell()))
    except OSError as error:
        if empty:  # the client cannot read a file without a header
            path.unlink(missing_ok=True)
        _LIMITED_LOG.warning("metrics were not published: %s. Make room for them, or name another "
                            "folder with %s, and start this process again.",
                            error, FOLDER_VARIABLE)  # fmt: skip
        return False
    return True


class Mapped(mmap_dict.MmapedDict):
    """The client's dictionary in a file, or in memory once the file cannot grow."""

    def __init__(self, filename: str, read_mode: bool = False) -> None:
        self._path = Path(filename)
        self._in_memory = not _reserve(self._path, INITIAL_BYTES)
        if not self._in_memory:
            super().__init__(filename, read_mode)  # type: ignore[no-untyped-call]
            return
        self._f, self._positions, self._used = BytesIO(), dict[str, int](), 8
        self._move_to_memory(b"")

    def _init_value(self, key: str) -> None:
        size = self._capacity
        while self._used + len(key.encode()) + ENTRY_BYTES > size:
            size *= 2
        if not self._in_memory and size > self._capacity and not _reserve(self._path, size):
            self._in_memory = True
            self._move_to_memory(self._m[: self._used])
        super()._init_value(key)  # type: ignore[no-untyped-call]

    def _move_to_memory(self, content: bytes) -> None:
        self._m, self._capacity = mmap.mmap(-1, MEMORY_BYTES), MEMORY_BYTES
        self._m[: len(content)] = content


def install() -> None:
    """Use :class:`Mapped` for all metrics of this process."""
    values.MmapedDict = Mapped  # type: ignore[attr-defined]
