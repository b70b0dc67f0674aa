"""The carrier: a process beside the decoding one, which makes records of events and ships them.

Its first line of input says where the ring is and who it speaks for; later ones are ``S`` and a
status, ``R`` and a round of a trial, ``H`` to send what there is at once. It ends when its parent
does, or closes the input; signals that are meant for the parent do not end it, for then there are
last events to send. Its output, a line each, is for the parent's log.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import select
import signal
import sys
import time
from typing import Any, Final

import psutil

from decoder.contracts.events import Origin
from decoder.contracts.settings import KafkaSettings
from decoder.telemetry.ring import Ring
from decoder.telemetry.shedding import Shedding
from decoder.telemetry.shipper import Shipper

NICENESS: Final = 5
"""Where processors are few, decoding goes first."""
LINGER_S: Final = 0.2
"""Time in which events find company; what a dashboard sees lags by twice this much."""
HASTE_S: Final = 0.01
"""The same while the worker closes."""
CLOSE_TIMEOUT_S: Final = 2.0
"""For the last events of a worker that ends."""


class _Lines(logging.Handler):
    """Passes what is logged to the parent, whose log it belongs into; without one, to stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        told = [record.name, record.levelno, self.format(record)]
        try:
            os.write(sys.stdout.fileno(), json.dumps(told).encode() + b"\n")
        except OSError:
            print(told[2], file=sys.stderr)  # noqa: T201


class _Input:
    """Lines of the standard input, as they come. ``ended`` when no more will."""

    def __init__(self) -> None:
        self._unread, self._parent, self.ended = b"", os.getppid(), False

    def lines(self, wait_s: float) -> list[bytes]:
        """Those that come within that time."""
        lines: list[bytes] = []
        if self.ended:
            time.sleep(wait_s)
        elif select.select([sys.stdin], [], [], wait_s)[0]:
            found = os.read(sys.stdin.fileno(), 1 << 16)
            *lines, self._unread = (self._unread + found).split(b"\n")
            self.ended = not found
        # Somebody else may hold the parent's end of the pipe.
        self.ended = self.ended or os.getppid() != self._parent
        return lines


def main() -> None:
    """Carry until the input ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    source, parent = _Input(), os.getppid()
    with contextlib.suppress(OSError, psutil.Error):
        os.nice(NICENESS)
        # An engine pins its threads, and what they start, to their processors; not its own parent.
        above = psutil.Process(parent).ppid()
        os.sched_setaffinity(0, os.sched_getaffinity(above or parent))
    logging.basicConfig(level=logging.INFO, handlers=[_Lines()], format="%(message)s")
    while not (lines := source.lines(LINGER_S)):
        if source.ended:
            return
    shipper, lines = _shipper(json.loads(lines[0])), lines[1:]
    until, linger_s = math.inf, LINGER_S
    while not source.ended or not (shipper.idle or time.monotonic() > until):
        for line in lines:
            if line == b"H":
                linger_s = HASTE_S
            else:
                shipper.take(line[:1], line[1:])
        shipper.turn()
        lines = source.lines(0.0 if shipper.busy else linger_s)
        if source.ended and until == math.inf:
            until, linger_s = time.monotonic() + CLOSE_TIMEOUT_S, HASTE_S
    shipper.close()
    lost, doubtful = shipper.books.failed, shipper.books.in_doubt
    if lost or doubtful:
        logging.error("%d draft events were not sent to Kafka before the worker closed, "
                      "%d may not have been", lost, doubtful)  # fmt: skip
    os._exit(0)  # what the client still has is counted


def _shipper(told: dict[str, Any]) -> Shipper:
    ring = Ring(told["size"], told["fd"])
    kafka = KafkaSettings(**told["kafka"])
    return Shipper(kafka, Origin(*told["origin"]), ring, Shedding(told["per_second"]))


if __name__ == "__main__":
    main()
