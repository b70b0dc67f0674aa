"""The carrier's process as its parent sees it: begun, written to, listened to, ended."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import msgspec

import decoder
from decoder.telemetry import frames
from decoder.telemetry.books import Books
from decoder.telemetry.frames import Frame, Hello

PIPE_BYTES: Final = 1 << 20
WAIT_S: Final = 0.05
"""Longest wait for a pipe that is full."""
_SET_PIPE_SIZE: Final = 1031  # F_SETPIPE_SZ, which fcntl names on some builds only


class Carrier:
    """A process, running from now on. ``pid`` is its id, ``began`` by the monotonic clock.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, hello: Hello, lock: int | None) -> None:
        """Start it; it inherits ``lock``, which says that its file is in use."""
        root = str(Path(decoder.__file__).parent.parent)
        there = os.environ.get("PYTHONPATH")
        path = os.pathsep.join([root, there] if there else [root])
        self.began = time.monotonic()
        # No child of multiprocessing: the processes of an engine may be daemons, which have none.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "decoder.telemetry"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
            pass_fds=() if lock is None else (lock,),
        )  # fmt: skip
        assert self._process.stdin is not None and self._process.stdout is not None
        self._down, self._up = self._process.stdin, self._process.stdout
        with contextlib.suppress(OSError):
            fcntl.fcntl(self._down, _SET_PIPE_SIZE, PIPE_BYTES)
        os.set_blocking(self._down.fileno(), False)
        os.set_blocking(self._up.fileno(), False)
        self._room = select.poll()  # takes any descriptor, where select.select ends at 1,023
        self._room.register(self._down, select.POLLOUT)
        self._unsent, self._unread = bytearray(), b""
        self.pid = self._process.pid
        self.put(Frame(frames.HELLO, 0, msgspec.json.encode(hello)))

    @property
    def unsent(self) -> int:
        """Bytes that wait to be written."""
        return len(self._unsent)

    @property
    def ended(self) -> bool:
        """Whether it is no more."""
        return self._process.poll() is not None

    def put(self, frame: Frame) -> None:
        """Have ``frame`` written, in its turn."""
        self._unsent += frame.encoded()

    def write(self) -> None:
        """Write as much as the pipe takes, waiting for it ``WAIT_S`` at most."""
        while self._unsent:
            try:
                written = os.write(self._down.fileno(), self._unsent)
                del self._unsent[:written]
            except BlockingIOError:
                if not self._room.poll(WAIT_S * 1e3):
                    return
            except BrokenPipeError:
                return  # it is found dead at the next look

    def hear(self) -> Books | None:
        """What it said last of its books; what it has for the log goes there."""
        with contextlib.suppress(BlockingIOError):
            while found := os.read(self._up.fileno(), 1 << 16):
                self._unread += found
        *lines, self._unread = self._unread.split(b"\n")
        books = None
        for line in lines:
            if line[:1] == b"B":
                books = line[1:]
            elif line[:1] == b"L":
                name, level, text = json.loads(line[1:])
                logging.getLogger(name).log(level, "%s", text)
        return None if books is None else msgspec.json.decode(books, type=Books)

    def dismiss(self) -> None:
        """Nothing more will be put: it sends what it has, and ends."""
        self._down.close()

    def end(self) -> int:
        """End it, if it has not; what it was ended by."""
        if not self.ended:
            self._process.kill()
        for pipe in (self._down, self._up):
            with contextlib.suppress(OSError):
                pipe.close()
        return self._process.wait()
