"""The carrier: a process beside the decoding one, which makes records of events and ships them.

Its parent writes frames to its input and reads what it reports from its output, a line each. It
ends when its parent does, or closes the input; signals that are meant for the parent do not end it,
for then there are last events to send.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import BinaryIO, Final

import msgspec
import psutil

from decoder.contracts.events import Origin
from decoder.contracts.settings import KafkaSettings
from decoder.telemetry.books import Books
from decoder.telemetry.frames import HEAD, Frame, Hello
from decoder.telemetry.shedding import Shedding
from decoder.telemetry.shipper import Inbox, Shipper
from decoder.telemetry.spill import SpillError, bound, expire

HELD: Final = 256
"""Frames that may wait to be taken: behind a shipper that hangs they wait in the parent, where they
are bounded too, and counted."""
NICENESS: Final = 5
"""Where processors are few, decoding goes first."""
WATCH_S: Final = 1.0
SAY_S: Final = 10.0
"""The parent hears the books so often though nothing changed: it ends a carrier that hangs."""


def _read(stream: BinaryIO) -> Frame | None:
    """The next frame; None at the end, also where the last was cut short."""
    head = stream.read(HEAD.size)
    if len(head) < HEAD.size:
        return None
    size, kind, rows = HEAD.unpack(head)
    payload = stream.read(size)
    return Frame(kind.decode(), rows, payload) if len(payload) == size else None


def _fill(inbox: Inbox, stream: BinaryIO) -> None:
    while (found := _read(stream)) is not None:
        inbox.frames.append(found)
        inbox.wake.set()
        while len(inbox.frames) > HELD:
            time.sleep(0.01)
    inbox.closed = True
    inbox.wake.set()


def _watch(inbox: Inbox, parent: int) -> None:
    """Close the inbox when the parent is gone though somebody still holds its end of the pipe."""
    while os.getppid() == parent:
        time.sleep(WATCH_S)
    inbox.closed = True
    inbox.wake.set()


class _Lines(logging.Handler):
    """Passes what is logged to the parent, whose log it belongs into."""

    def emit(self, record: logging.LogRecord) -> None:
        _say(b"L", json.dumps([record.name, record.levelno, self.format(record)]).encode())


_SAYING = threading.Lock()


def _say(kind: bytes, line: bytes) -> None:
    with _SAYING, contextlib.suppress(OSError):  # without a parent there is nobody to tell
        os.write(sys.stdout.fileno(), kind + line + b"\n")


def main() -> None:
    """Carry until the input ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    parent = os.getppid()
    with contextlib.suppress(OSError, psutil.Error):
        os.nice(NICENESS)
        # An engine pins its threads, and what they start, to their processors; not its own parent.
        above = psutil.Process(parent).ppid()
        os.sched_setaffinity(0, os.sched_getaffinity(above or parent))
    logging.basicConfig(level=logging.INFO, handlers=[_Lines()], format="%(message)s")
    logging.getLogger("kafka").setLevel(logging.CRITICAL)
    stream = sys.stdin.buffer
    told = _read(stream)
    if told is None:
        return
    hello = msgspec.json.decode(told.payload, type=Hello)
    origin = Origin(hello.scope, hello.worker, hello.life, hello.target, hello.drafter)
    said, said_at = b"", 0.0

    def report(books: Books) -> None:
        nonlocal said, said_at
        line, now = msgspec.json.encode(books), time.monotonic()
        if line != said or now >= said_at + SAY_S:
            said, said_at = line, now
            _say(b"B", line)

    folder = Path(hello.folder) if hello.folder else None
    kafka = KafkaSettings(**hello.kafka)
    if folder is not None:
        with contextlib.suppress(*SpillError):
            expire(folder.parent, hello.books)
            bound(folder, hello.most, hello.books)
    shipper = Shipper(
        kafka, origin, hello.books, report, folder, hello.most, Shedding(hello.per_second)
    )
    inbox = Inbox()
    for work, *arguments in ((_fill, inbox, stream), (_watch, inbox, parent)):
        threading.Thread(target=work, args=arguments, daemon=True).start()
    shipper.run(inbox)
    os._exit(0)  # a reader of a pipe that somebody else still holds would keep the process


if __name__ == "__main__":
    main()
