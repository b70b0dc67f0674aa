"""The exporter: a process beside the decoding one, which makes records of events and ships them.

Its input is a socket of messages: the first says where the ring is and who it speaks for, later
ones are ``S`` and a status, or ``R`` and a round of a trial. It ends when its parent does, or says
no more; signals that are meant for the parent do not end it, for then there are last events to
send. What it answers is for the parent's log.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import signal
import socket
import sys
import time
from typing import Final

import psutil

from decoder.contracts.events import Origin
from decoder.contracts.settings import KafkaSettings
from decoder.telemetry.exporter import Exporter
from decoder.telemetry.head_sampling import HeadSampler
from decoder.telemetry.ring import Ring

NICENESS: Final = 5
"""Where processors are few, decoding goes first."""
LINGER_S: Final = 0.2
"""Time in which events find company; what a dashboard sees lags by twice this much."""
HASTE_S: Final = 0.01
"""The same once the worker is gone."""
LONGEST: Final = 1 << 14
"""Characters of a line in the log."""


class _Parent(logging.Handler):
    """Hears what the parent says, ``ended`` when it says no more, and passes on what is logged: to
    stderr where no parent is left."""

    def __init__(self) -> None:
        super().__init__()
        self._channel, self._pid, self.ended = socket.socket(fileno=0), os.getppid(), False
        self.hello = self._channel.recv(1 << 20)  # which was there before this process was

    def heard(self, wait_s: float) -> bytes:
        """A message that comes within that time, or nothing."""
        said = b""
        try:
            self._channel.settimeout(wait_s)
            said = self._channel.recv(1 << 20)
            self.ended = self.ended or not said
        except ConnectionResetError:  # it left without hearing all: there may be more to hear
            pass
        except (BlockingIOError, TimeoutError):
            # Somebody else may hold the parent's end.
            self.ended = self.ended or os.getppid() != self._pid
        if self.ended:
            time.sleep(wait_s)
        return said

    def emit(self, record: logging.LogRecord) -> None:
        """Pass it on."""
        text = self.format(record)[:LONGEST]
        with contextlib.suppress(OSError):
            if os.getppid() == self._pid:  # else a child of its may hold its end
                self._channel.send(json.dumps([record.name, record.levelno, text]).encode())
                return
        print(text, file=sys.stderr)  # noqa: T201


def main() -> None:
    """Carry until the input ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    parent = _Parent()
    with contextlib.suppress(OSError, psutil.Error):
        os.nice(NICENESS)
        # An engine pins its threads, and what they start, to their processors; not its own parent.
        above = psutil.Process(os.getppid()).ppid()
        os.sched_setaffinity(0, os.sched_getaffinity(above or os.getppid()))
    logging.basicConfig(level=logging.INFO, handlers=[parent], format="%(message)s")
    told, until = json.loads(parent.hello), math.inf
    ring, kafka = Ring(told["size"], told["fd"]), KafkaSettings(**told["kafka"])
    exporter = Exporter(kafka, Origin(*told["origin"]), ring, HeadSampler(told["per_second"]))
    while not parent.ended or not (exporter.idle or time.monotonic() > until):
        exporter.turn()
        said = parent.heard(0.0 if exporter.busy else HASTE_S if parent.ended else LINGER_S)
        exporter.take(said[:1], said[1:])
        if parent.ended and until == math.inf:
            until = time.monotonic() + told["last_s"]
    exporter.close()
    lost, doubtful = exporter.progress.failed, exporter.progress.in_doubt
    if lost or doubtful:
        logging.error("%d draft events were not sent to Kafka before the worker closed, "
                      "%d may not have been", lost, doubtful)  # fmt: skip
    os._exit(0)  # what the client still has is counted


if __name__ == "__main__":
    main()
