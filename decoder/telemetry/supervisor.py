"""The worker's side of its exporter: starts it, tells it status and rounds, and keeps the accounts.

Making records and sending them takes microseconds an event, under the interpreter's lock: so a
process of its own does it (``__main__.py``), which takes events from the ring. A thread here looks
after it once a second; one that dies is started again, and goes on where it was.
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
from functools import partial
from pathlib import Path
from typing import Final

from pydantic import BaseModel

import decoder
from decoder.contracts.events import Origin
from decoder.contracts.settings import KafkaSettings
from decoder.contracts.status import WorkerStatus
from decoder.contracts.trials import Round
from decoder.experiment.interleaver import FinishedRound, Interleaver
from decoder.limited_log import LimitedLog
from decoder.telemetry.delivery import DeliveryCounters, DeliveryReport
from decoder.telemetry.ring import BEAT, FULL, HEAD, UNREADABLE, Ring

log = logging.getLogger(__name__)

EVERY_S: Final = 1.0
LOOK_S: Final = 0.01
"""The same while the worker closes."""
CLOSE_TIMEOUT_S: Final = 5.0
LAST_S: Final = 2.0
"""What an exporter has for the last events once its worker has ended."""
START_TIMEOUT_S: Final = 10.0
"""An exporter that is still starting when its worker closes is waited for so long."""
RESTART_S: Final = (1.0, 30.0)
"""Pause before an exporter is started again; doubled after each that died young, up to the second
of these."""
SILENT_TURNS: Final = 60
"""Looks, a minute of them, in which an exporter takes no turn: then it hangs."""


class Supervisor:
    """Has what is in ``ring`` sent, rounds, and a status each second."""

    def __init__(
        self,
        kafka: KafkaSettings,
        ring: Ring,
        origin: Origin,
        status: Callable[[], WorkerStatus],
        interleaver: Interleaver | None = None,
        per_second: float = 0.0,
    ) -> None:
        """Hand over from :meth:`start` on.

        Args:
            status: builds the worker's status record, in this thread.
            per_second: events that may be sent, about; 0 for any number.
        """
        self._ring, self._origin, self._status = ring, origin, status
        self._interleaver = interleaver
        told = {
            "kafka": json.loads(kafka.model_dump_json()), "fd": ring.fd, "size": ring.size,
            "origin": [origin.scope, origin.worker, origin.life, origin.target, origin.drafter],
            "per_second": per_second, "last_s": LAST_S,
        }  # fmt: skip
        self._hello = json.dumps(told).encode()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hvd-telemetry", daemon=True)
        self._exporter: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket  # to and from the exporter, a line a message
        self._deaths = self._rounds = self._lost = 0  # rounds handed over, rounds lost here
        self._beat = self._silent = 0
        self._began = self._start_at = 0.0
        self._pause = RESTART_S[0]
        self._limited_log = LimitedLog()

    @property
    def pid(self) -> int | None:
        """Of the exporter, while it lives."""
        exporter = self._exporter
        return exporter.pid if exporter is not None and exporter.poll() is None else None

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def report(self) -> DeliveryReport:
        """Where every event is, at one moment. For any thread."""
        progress = self._ring.progress()
        head, full, unreadable = (int(self._ring.control[at]) for at in (HEAD, FULL, UNREADABLE))
        waiting = head - progress.settled
        lost = {"queue": full, "unreadable": unreadable}
        progress.dropped |= {reason: events for reason, events in lost.items() if events}
        progress.rounds_dropped += self._lost
        counters = {name: getattr(progress, name) for name in DeliveryCounters.__struct_fields__}
        return DeliveryReport(
            **counters, made=head + full + unreadable, waiting=waiting, deaths=self._deaths
        )

    def close(self) -> None:
        """Wait for the exporter to send what is left, ``CLOSE_TIMEOUT_S`` at most.

        What it cannot send has failed, or is in doubt.
        """
        self._stopping.set()
        self._thread.join(START_TIMEOUT_S + CLOSE_TIMEOUT_S + 1.0)
        found = self.report()
        if found.failed or found.in_doubt:
            log.error("%d draft events were not sent to Kafka before the worker closed, "
                      "%d may not have been", found.failed, found.in_doubt)  # fmt: skip

    # --- the thread

    def _run(self) -> None:
        stopping = False
        while not stopping:  # one turn at least: a worker may be gone at once
            self._do(self._turn)
            stopping = self._stopping.wait(EVERY_S)
        self._do(self._finish)
        self._bury(expected=True)
        progress = self._ring.progress()  # of which this is the only writer now
        progress.in_doubt += max(progress.end - progress.settled, 0)
        progress.failed += int(self._ring.control[HEAD]) - progress.settled
        self._ring.write_progress(progress)
        self._lost += len(self._interleaver.rounds) if self._interleaver is not None else 0

    def _do(self, what: Callable[[], None]) -> None:
        """Whatever it comes to, something is left to be done, or to be accounted for."""
        try:
            what()
        except Exception:  # noqa: BLE001
            self._limited_log.exception("events are not handed over")

    def _turn(self) -> None:
        if self._exporter is not None:
            self._look()
        if self._exporter is None and time.monotonic() >= self._start_at:
            self._begin()
        if self._exporter is not None:
            self._tell()

    def _finish(self) -> None:
        """Wait until the exporter has sent the rest, or gives up."""
        if self._exporter is None:
            self._begin()  # one that died would have been started again a little later
        self._wait(START_TIMEOUT_S, lambda: bool(self._ring.control[BEAT] - self._beat))
        until = time.monotonic() + CLOSE_TIMEOUT_S
        self._channel.settimeout(LOOK_S)
        self._wait(CLOSE_TIMEOUT_S / 2, lambda: not len(self._ring))
        self._tell()  # the last status, with everything in it
        with contextlib.suppress(OSError):  # that died
            self._channel.shutdown(socket.SHUT_WR)
        self._wait(until - time.monotonic(), lambda: False)

    def _wait(self, seconds: float, done: Callable[[], bool]) -> None:
        until = time.monotonic() + seconds
        while self.pid and not done() and time.monotonic() < until:
            time.sleep(LOOK_S)

    def _tell(self) -> None:
        """Hand over rounds, and a status, as far as the exporter reads them."""
        rounds = deque[FinishedRound]()
        if self._interleaver is not None:
            rounds = self._interleaver.rounds
        while rounds:
            line = self._line(b"R", partial(round_of, rounds[0], self._origin))
            if line and not self._send(line):
                return
            rounds.popleft()
            self._rounds += bool(line)
            self._lost += not line
        if line := self._line(b"S", self._status):
            self._send(line)

    def _line(self, kind: bytes, make: Callable[[], BaseModel]) -> bytes:
        """Empty where it cannot be made, for which nothing else must wait."""
        try:
            return kind + make().model_dump_json().encode()
        except Exception as error:  # noqa: BLE001 -- told by the limited_log
            self._limited_log.warning("a status or a round of a trial cannot be made: %r", error)
            return b""

    def _send(self, line: bytes) -> bool:
        """False where the exporter has enough to read, or is dead, as the next look finds."""
        with contextlib.suppress(OSError):
            return self._channel.send(line) > 0
        return False

    # --- the exporter

    def _begin(self) -> None:
        root, there = str(Path(decoder.__file__).parent.parent), os.environ.get("PYTHONPATH")
        path = os.pathsep.join([root, there] if there else [root])
        self._began = time.monotonic()
        self._start_at = self._began + self._pause
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.setblocking(False)
        self._channel.send(self._hello)
        # No child of multiprocessing: the processes of an engine may be daemons, which have none.
        with theirs:
            self._exporter = subprocess.Popen(
                [sys.executable, "-P", "-m", "decoder.telemetry"],
                stdin=theirs.fileno(), stdout=subprocess.DEVNULL, pass_fds=(self._ring.fd,),
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
            )  # fmt: skip
        self._silent, self._beat = 0, int(self._ring.control[BEAT])

    def _look(self) -> None:
        """Log what the exporter has to say, and look whether it lives."""
        self._log()
        before, self._beat = self._beat, int(self._ring.control[BEAT])
        self._silent = self._silent + 1 if self._beat == before else 0
        if not self.pid or self._silent > SILENT_TURNS:
            self._bury()

    def _log(self) -> None:
        with contextlib.suppress(OSError):  # nothing to read
            while found := self._channel.recv(1 << 18, socket.MSG_DONTWAIT):
                name, level, text = json.loads(found)
                logging.getLogger(name).log(level, "%s", text)

    def _bury(self, expected: bool = False) -> None:
        """End the exporter, if it has not ended; another may go on where it was."""
        exporter, self._exporter = self._exporter, None
        if exporter is None:
            return
        if exporter.poll() is None:
            exporter.kill()
        how = exporter.wait()
        self._log()
        self._channel.close()
        progress = self._ring.progress()  # of which this is the only writer now
        progress.rounds_dropped = self._rounds - progress.rounds_sent
        self._ring.write_progress(progress)
        if expected:
            return
        self._deaths += 1
        young = time.monotonic() - self._began < RESTART_S[1]
        self._pause = min(self._pause * 2, RESTART_S[1]) if young else RESTART_S[0]
        self._limited_log.warning(
            "the process that carries events to Kafka ended (%d): it is started again", how
        )


def round_of(played: FinishedRound, origin: Origin) -> Round:
    """The record of a finished round."""
    return Round(
        scope=origin.scope, worker=origin.worker, life=origin.life, number=played.number,
        time=played.time, unit=played.cluster,
        blocks=tuple(account.block() for account in played.blocks),
    )  # fmt: skip
