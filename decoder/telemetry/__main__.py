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


def main() -> None:
    """Carry until the input ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    parent, source = os.getppid(), sys.stdin.fileno()
    with contextlib.suppress(OSError, psutil.Error):
        os.nice(NICENESS)
        # An engine pins its threads, and what they start, to their processors; not its own parent.
        above = psutil.Process(parent).ppid()
        os.sched_setaffinity(0, os.sched_getaffinity(above or parent))
    logging.basicConfig(level=logging.INFO, handlers=[_Lines()], format="%(message)s")
    unread, shipper, until, hasty = b"", None, 0.0, False
    while True:
        wait = 0.0 if shipper is not None and shipper.busy else LINGER_S
        if not until and select.select([source], [], [], 0.01 if hasty else wait)[0]:
            found = os.read(source, 1 << 16)
            *lines, unread = (unread + found).split(b"\n")
            for line in lines:
                if shipper is None:
                    shipper = _shipper(json.loads(line))
                elif line == b"H":
                    hasty = True
                else:
                    shipper.take(line[:1], line[1:])
            until = 0.0 if found else time.monotonic() + CLOSE_TIMEOUT_S
        if os.getppid() != parent and not until:  # somebody else may hold its end of the pipe
            until = time.monotonic() + CLOSE_TIMEOUT_S
        if shipper is None:
            if until:
                return
            continue
        shipper.turn()
        if until and (shipper.idle or time.monotonic() > until):
            break
        if until and not shipper.busy:
            time.sleep(0.01)
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
