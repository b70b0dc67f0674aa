"""Memory-mapped files of the Prometheus client, with disk space reserved before each write.

The client reserves none: when the disk or ``/dev/shm`` is full, the kernel ends a process that
writes into such a file (SIGBUS). Here a file that cannot grow stays as it is. Its process keeps its
metrics in memory, unpublished, until it is restarted.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Final

from prometheus_client import mmap_dict, values

from decoder.limited_log import LimitedLog

FOLDER_VARIABLE: Final = "PROMETHEUS_MULTIPROC_DIR"
INITIAL_BYTES: Final = 1 << 16
"""Initial size of a client's file in bytes; the client doubles it."""
ENTRY_BYTES: Final = 32
"""Most bytes of an entry, without its key."""
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


def _file_in_memory() -> str:
    return f"/proc/self/fd/{os.memfd_create('hvd-metrics')}"


class Mapped(mmap_dict.MmapedDict):
    """The client's dictionary in a file, or in a file in memory once that cannot grow."""

    def __init__(self, filename: str, read_mode: bool = False) -> None:
        self._path = filename if _reserve(Path(filename), INITIAL_BYTES) else _file_in_memory()
        super().__init__(self._path, read_mode)  # type: ignore[no-untyped-call]

    def _init_value(self, key: str) -> None:
        size = self._capacity
        while self._used + len(key.encode()) + ENTRY_BYTES > size:
            size *= 2
        if size > self._capacity and not _reserve(Path(self._path), size):
            content, self._path = self._m[:], _file_in_memory()
            self._f = open(self._path, "r+b")  # noqa: SIM115, PTH123 - as the client keeps it
            self._f.write(content)
            self._f.flush()
            self._m = mmap.mmap(self._f.fileno(), self._capacity)
        super()._init_value(key)  # type: ignore[no-untyped-call]


def install() -> None:
    """Use :class:`Mapped` for all metrics of this process."""
    values.MmapedDict = Mapped  # type: ignore[attr-defined]
