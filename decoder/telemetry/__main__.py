"""The exporter process: encodes the decoding process's events as records and sends them to Kafka.

Its input is a socket of messages. The first is the configuration: ring, origin, Kafka settings.
Later ones are ``S`` and a status, or ``R`` and a round of a comparison. The exporter ends when its
parent dies or closes the socket. It ignores the signals that end the parent, to send the last
events. It logs to the parent's stderr.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import signal
import socket
import time
from typing import Final

import psutil

from decoder.contracts.events import Origin
from decoder.contracts.settings import KafkaSettings
from decoder.limited_log import TextLines
from decoder.telemetry.exporter import Exporter
from decoder.telemetry.head_sampling import HeadSampler
from decoder.telemetry.ring import Ring

NICENESS: Final = 5
"""Decoding has priority where processors are few."""
LINGER_S: Final = 0.2
"""Time to gather events for one record; a dashboard lags by twice as much."""
LAST_LINGER_S: Final = 0.01
"""The same once the worker has ended."""
MAX_MESSAGE: Final = 1 << 20


def _yield_to(parent: int) -> None:
    """Lower this process's priority, and use all processors that the engine may use."""
    with contextlib.suppress(OSError, psutil.Error):
        os.nice(NICENESS)
        # An engine pins its threads to processors, and its children inherit that: take the affinity
        # of the engine's own parent instead.
        grandparent = psutil.Process(parent).ppid()
        os.sched_setaffinity(0, os.sched_getaffinity(grandparent or parent))


def main() -> None:
    """Export events until the parent ends and all are sent, or the time for that is over."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    handler = logging.StreamHandler()
    handler.setFormatter(TextLines())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    channel, parent = socket.socket(fileno=0), os.getppid()
    config = json.loads(channel.recv(MAX_MESSAGE))  # sent before this process was started
    _yield_to(parent)
    ring, kafka = Ring(config["size"], config["fd"]), KafkaSettings(**config["kafka"])
    exporter = Exporter(kafka, Origin(*config["origin"]), ring, HeadSampler(config["per_second"]))
    ended, deadline = False, math.inf
    while not ended or not (exporter.idle or time.monotonic() > deadline):
        exporter.turn()
        wait_s = 0.0 if exporter.busy else LAST_LINGER_S if ended else LINGER_S
        if ended:
            time.sleep(wait_s)
            continue
        channel.settimeout(wait_s)
        try:
            message = channel.recv(MAX_MESSAGE)
            exporter.enqueue(message[:1], message[1:])
            ended = not message
        except (BlockingIOError, TimeoutError):
            ended = os.getppid() != parent  # another process may hold the parent's end open
        if ended:
            deadline = time.monotonic() + config["last_s"]
    exporter.close()
    os._exit(0)  # records that the client still holds are counted


if __name__ == "__main__":
    main()
