"""Supervisor of the exporter process: starts it, sends it status and rounds, reports its counters.

Encoding and sending an event takes microseconds under the interpreter's lock, so another process
(``__main__.py``) does it, which reads events from the ring. A thread here checks it once a second
and restarts one that died, which resumes where the one before stopped.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import astuple
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
from pydantic import BaseModel

import decoder
from decoder.contracts.events import Origin
from decoder.contracts.settings import KafkaSettings
from decoder.contracts.status import WorkerStatus
from decoder.contracts.trials import Round
from decoder.experiment.interleaver import FinishedRound
from decoder.limited_log import LimitedLog
from decoder.telemetry.ring import (
    BEAT,
    FULL,
    HEAD,
    UNREADABLE,
    DeliveryReport,
    Ring,
)

log = logging.getLogger(__name__)

EVERY_S: Final = 1.0
POLL_S: Final = 0.01
"""The same interval while the worker closes."""
CLOSE_TIMEOUT_S: Final = 5.0
GRACE_S: Final = 2.0
"""Time that an exporter has for the last events once its worker has ended."""
START_TIMEOUT_S: Final = 10.0
"""Longest wait for an exporter that is still starting when its worker closes."""
RESTART_S: Final = (1.0, 30.0)
"""First and longest delay before an exporter is restarted; doubled after each early death."""
MAX_SILENT_CHECKS: Final = 60
"""Checks (a minute of them) without a turn of the exporter, after which it counts as hung."""


class Supervisor:
    """Has the events in ``ring`` sent, rounds of trials, and a status each second."""

    def __init__(
        self,
        kafka: KafkaSettings,
        ring: Ring,
        origin: Origin,
        status: Callable[[], WorkerStatus],
        rounds: deque[FinishedRound] | None = None,
        per_second: float = 0.0,
    ) -> None:
        """Prepare. ``status`` builds a status record, in this thread. ``rounds`` are finished ones,
        which the engine's thread appends; emptied here. ``per_second`` limits events; 0: not."""
        self._ring, self._origin, self._status = ring, origin, status
        self._rounds = deque[FinishedRound]() if rounds is None else rounds
        self._config = json.dumps({
            "kafka": kafka.model_dump(mode="json"), "fd": ring.fd, "size": ring.size,
            "origin": astuple(origin), "per_second": per_second, "last_s": GRACE_S,
        }).encode()  # fmt: skip
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hvd-telemetry", daemon=True)
        self._exporter: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket  # to the exporter
        self._deaths = self._rounds_passed = self._rounds_lost = 0
        self._beat = self._silent = 0
        self._began = self._start_at = 0.0
        self._pause = RESTART_S[0]
        self._limited_log = LimitedLog()

    @property
    def pid(self) -> int | None:
        """Process id of the exporter, while it lives."""
        exporter = self._exporter
        return exporter.pid if exporter is not None and exporter.poll() is None else None

    def start(self) -> None:
        """Start the thread, which starts the exporter."""
        self._thread.start()

    def report(self) -> DeliveryReport:
        """A consistent snapshot of the delivery counters. For any thread."""
        report = msgspec.convert(self._ring.progress(), DeliveryReport, from_attributes=True)
        head, full, unreadable = (int(self._ring.control[at]) for at in (HEAD, FULL, UNREADABLE))
        report.waiting = head - report.settled
        lost = {"queue": full, "unreadable": unreadable}
        report.dropped |= {reason: events for reason, events in lost.items() if events}
        report.rounds_dropped += self._rounds_lost
        report.made, report.deaths = head + full + unreadable, self._deaths
        return report

    def close(self) -> None:
        """Wait for the exporter to send the last events, ``CLOSE_TIMEOUT_S`` at most.

        Events that it cannot send count as failed, or in doubt.
        """
        self._stopping.set()
        self._thread.join(START_TIMEOUT_S + CLOSE_TIMEOUT_S + 1.0)
        report = self.report()
        if report.failed or report.in_doubt:
            log.error("%d draft events were not sent to Kafka before the worker closed, "
                      "%d may not have been", report.failed, report.in_doubt)  # fmt: skip

    def _run(self) -> None:
        stopping = False
        while not stopping:  # at least one turn: a worker may close at once
            self._guarded(self._turn)
            stopping = self._stopping.wait(EVERY_S)
        self._guarded(self._finish)
        self._reap(expected=True)
        progress = self._ring.progress()  # the exporter has ended: only this thread writes it
        progress.in_doubt += max(progress.end - progress.settled, 0)
        progress.failed += int(self._ring.control[HEAD]) - progress.settled
        self._ring.write_progress(progress)
        self._rounds_lost += len(self._rounds)

    def _guarded(self, act: Callable[[], None]) -> None:
        """Call ``act``; a fault in it must not end the thread, which has more to do or to count."""
        try:
            act()
        except Exception:  # noqa: BLE001
            self._limited_log.exception("the exporter of draft events cannot be supervised")

    def _turn(self) -> None:
        if self._exporter is not None:
            self._check()
        if self._exporter is None and time.monotonic() >= self._start_at:
            self._launch()
        if self._exporter is not None:
            self._send_reports()

    def _finish(self) -> None:
        """Wait until the exporter has sent the last events, or gives up."""
        if self._exporter is None:
            self._launch()  # without the delay of a restart
        self._wait(START_TIMEOUT_S, lambda: bool(self._ring.control[BEAT] - self._beat))
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        self._channel.settimeout(POLL_S)
        self._wait(CLOSE_TIMEOUT_S / 2, lambda: not len(self._ring))
        self._send_reports()  # the last status, after the last event
        with contextlib.suppress(OSError):  # it died
            self._channel.shutdown(socket.SHUT_WR)
        self._wait(deadline - time.monotonic(), lambda: False)

    def _wait(self, seconds: float, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + seconds
        while self.pid and not done() and time.monotonic() < deadline:
            time.sleep(POLL_S)

    def _send_reports(self) -> None:
        """Send rounds and a status, as far as the exporter reads them."""
        while self._rounds:
            line = self._line(b"R", partial(round_of, self._rounds[0], self._origin))
            if line and not self._send(line):
                return
            self._rounds.popleft()
            self._rounds_passed += bool(line)
            self._rounds_lost += not line
        if line := self._line(b"S", self._status):
            self._send(line)

    def _line(self, kind: bytes, make: Callable[[], BaseModel]) -> bytes:
        """A message; empty where it cannot be made, so that others are still sent."""
        try:
            return kind + make().model_dump_json().encode()
        except Exception as error:  # noqa: BLE001 -- logged
            self._limited_log.warning("a status or a round of a trial cannot be made: %r", error)
            return b""

    def _send(self, line: bytes) -> bool:
        """False where the exporter's socket is full, or it is dead, as the next check finds."""
        with contextlib.suppress(OSError):
            return self._channel.send(line) > 0
        return False

    def _launch(self) -> None:
        root, given = str(Path(decoder.__file__).parent.parent), os.environ.get("PYTHONPATH")
        path = os.pathsep.join([root, given] if given else [root])
        self._began = time.monotonic()
        self._start_at = self._began + self._pause
        self._channel, far_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.setblocking(False)
        self._channel.send(self._config)
        # Not multiprocessing: an engine's processes may be daemons, which may have no children.
        with far_end:
            self._exporter = subprocess.Popen(
                [sys.executable, "-P", "-m", "decoder.telemetry"],
                stdin=far_end.fileno(), stdout=subprocess.DEVNULL, pass_fds=(self._ring.fd,),
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
            )  # fmt: skip
        self._silent, self._beat = 0, int(self._ring.control[BEAT])

    def _check(self) -> None:
        """Reap the exporter where it is dead or hung."""
        before, self._beat = self._beat, int(self._ring.control[BEAT])
        self._silent = self._silent + 1 if self._beat == before else 0
        if not self.pid or self._silent > MAX_SILENT_CHECKS:
            self._reap()

    def _reap(self, expected: bool = False) -> None:
        """End the exporter, if it still runs, and set the time of its restart."""
        exporter, self._exporter = self._exporter, None
        if exporter is None:
            return
        if exporter.poll() is None:
            exporter.kill()
        status = exporter.wait()
        self._channel.close()
        progress = self._ring.progress()  # the exporter has ended: only this thread writes it
        progress.rounds_dropped = self._rounds_passed - progress.rounds_sent
        self._ring.write_progress(progress)
        if expected:
            return
        self._deaths += 1
        early = time.monotonic() - self._began < RESTART_S[1]
        self._pause = min(self._pause * 2, RESTART_S[1]) if early else RESTART_S[0]
        self._limited_log.warning(
            "the exporter of draft events ended with status %d: it is restarted", status
        )


def round_of(finished: FinishedRound, origin: Origin) -> Round:
    """The record of a finished round."""
    return Round(
        scope=origin.scope, worker=origin.worker, life=origin.life, number=finished.number,
        time=finished.time, unit=finished.cluster,
        blocks=tuple(totals.block() for totals in finished.blocks),
    )  # fmt: skip
