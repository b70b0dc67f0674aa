"""The exporter process: encodes the decoding process's events as records and sends them to Kafka.

Its input is a socket of messages. The first is the configuration: ring, origin, Kafka settings.
Later ones are ``S`` and a status, or ``R`` and a round of a trial. The exporter ends when its
parent dies or closes the socket. It ignores the signals that end the parent, to send the last
events. It sends its own log lines back, for the parent's log.
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
"""Decoding has priority where processors are few."""
LINGER_S: Final = 0.2
"""Time to gather events for one record; a dashboard lags by twice as much."""
HASTE_S: Final = 0.01
"""The same once the worker has ended."""
LONGEST: Final = 1 << 14
"""Most characters of a log line."""


class _Parent(logging.Handler):
    """The socket to the parent: receives messages, and sends log lines (to stderr once the parent
    is gone). ``ended`` once the parent has died or closed its end."""

    def __init__(self) -> None:
        super().__init__()
        self._channel, self._pid, self.ended = socket.socket(fileno=0), os.getppid(), False
        self.config = self._channel.recv(1 << 20)  # sent before this process was started

    def receive(self, wait_s: float) -> bytes:
        """A message received within ``wait_s``, or nothing."""
        message = b""
        try:
            self._channel.settimeout(wait_s)
            message = self._channel.recv(1 << 20)
            self.ended = self.ended or not message
        except ConnectionResetError:  # the parent left log lines unread; its messages may follow
            pass
        except (BlockingIOError, TimeoutError):
            # Another process may hold the parent's end open.
            self.ended = self.ended or os.getppid() != self._pid
        if self.ended:
            time.sleep(wait_s)
        return message

    def emit(self, record: logging.LogRecord) -> None:
        """Send a log line to the parent."""
        text = self.format(record)[:LONGEST]
        with contextlib.suppress(OSError):
            if os.getppid() == self._pid:  # else one of its children may hold its end
                self._channel.send(json.dumps([record.name, record.levelno, text]).encode())
                return
        print(text, file=sys.stderr)  # noqa: T201


def main() -> None:
    """Export events until the parent ends and all are sent, or the time for that is over."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    parent = _Parent()
    with contextlib.suppress(OSError, psutil.Error):
        os.nice(NICENESS)
        # An engine pins its threads to processors, and its children inherit that: take the affinity
        # of the engine's own parent instead.
        grandparent = psutil.Process(os.getppid()).ppid()
        os.sched_setaffinity(0, os.sched_getaffinity(grandparent or os.getppid()))
    logging.basicConfig(level=logging.INFO, handlers=[parent], format="%(message)s")
    config, deadline = json.loads(parent.config), math.inf
    ring, kafka = Ring(config["size"], config["fd"]), KafkaSettings(**config["kafka"])
    exporter = Exporter(kafka, Origin(*config["origin"]), ring, HeadSampler(config["per_second"]))
    while not parent.ended or not (exporter.idle or time.monotonic() > deadline):
        exporter.turn()
        wait_s = 0.0 if exporter.busy else HASTE_S if parent.ended else LINGER_S
        message = parent.receive(wait_s)
        exporter.take(message[:1], message[1:])
        if parent.ended and deadline == math.inf:
            deadline = time.monotonic() + config["last_s"]
    exporter.close()
    lost, in_doubt = exporter.progress.failed, exporter.progress.in_doubt
    if lost or in_doubt:
        logging.error("%d draft events were not sent to Kafka before the worker closed, "
                      "%d may not have been", lost, in_doubt)  # fmt: skip
    os._exit(0)  # records that the client still holds are counted


if __name__ == "__main__":
    main()
