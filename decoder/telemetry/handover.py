"""The thread that passes events, status and rounds of trials on to the carrier, and its accounts.

Making records and sending them takes some fifteen microseconds an event, most of it under the
interpreter's lock: so that is done in a process of its own, the carrier (``__main__.py``). Here an
event costs half a microsecond. The carrier says what became of each; one that dies is started
again, and what it had in memory is counted as lost.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from decoder.complaints import Complaints
from decoder.contracts.events import Origin
from decoder.contracts.settings import KafkaSettings
from decoder.contracts.status import WorkerStatus
from decoder.contracts.trials import Round
from decoder.telemetry import frames, told
from decoder.telemetry.books import Accounts, Books
from decoder.telemetry.carrier import Carrier
from decoder.telemetry.frames import Frame, Hello
from decoder.telemetry.queue import EventQueue
from decoder.telemetry.spill import claim, release
from decoder.trial.turns import Played, Turns

log = logging.getLogger(__name__)

EVERY_S: Final = 0.1
"""Between two looks at the queue: each costs a few calls in which decoding may have to wait."""
LOOK_S: Final = 0.01
"""The same while the worker closes."""
AT_ONCE: Final = 512
"""Events of a frame: a quarter of a millisecond in which decoding waits for the interpreter."""
STATUS_EVERY_S: Final = 1.0
CLOSE_TIMEOUT_S: Final = 5.0
START_TIMEOUT_S: Final = 10.0
"""A carrier that is still starting when its worker closes is waited for so long."""
RESTART_S: Final = (1.0, 30.0)
"""Pause before a carrier is started again; doubled after each that died young, up to the second."""
SILENT_TURNS: Final = 600
"""Looks, a minute of them, in which a carrier says nothing though events wait: then it hangs."""
UNSENT: Final = 4 << 20
"""Bytes that may wait for a carrier that does not read: behind them events stay in the queue."""


class Handover:
    """Passes on what is in ``queue`` and ``turns`` and, once a second, what ``status`` says.

    ``tell`` makes of what was queued what is passed on; ``status`` builds the worker's status
    record. Both run in this thread.
    """

    def __init__(
        self,
        kafka: KafkaSettings,
        queue: EventQueue,
        tell: Callable[[Sequence[Any]], told.Told],
        origin: Origin,
        status: Callable[[], WorkerStatus],
        turns: Turns | None = None,
        folder: Path | None = None,
        most: int = 0,
        per_second: float = 0.0,
    ) -> None:
        """Hand over from :meth:`start` on.

        Args:
            folder: of what is spilled while the broker is away, at most ``most`` bytes; None for
                nothing.
            per_second: events that may be sent, about; 0 for any number.
        """
        self._kafka, self._queue, self._tell = kafka, queue, tell
        self._origin, self._status, self._turns = origin, status, turns
        self._folder, self._most, self._per_second = folder, most, per_second
        self._lock: int | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hvd-telemetry", daemon=True)
        self._books = Books()  # of the carrier
        self._entrusted = 0  # events that the carrier answers for
        self._inherited = 0  # of these, the ones that the carrier before it had
        self._left = 0  # of those, the ones that a carrier that ended left in its file
        self._rounds = 0  # rounds that it has
        self._silent = 0  # looks since it said something
        self._past = Accounts()  # of carriers that ended, and of what never reached one
        self._accounting = threading.Lock()
        self._carrier: Carrier | None = None
        self._said = self._start_at = 0.0
        self._pause = RESTART_S[0]
        self._complaints = Complaints()

    @property
    def pid(self) -> int | None:
        """Of the carrier, while there is one."""
        carrier = self._carrier
        return carrier.pid if carrier is not None else None

    @property
    def processor_s(self) -> float:
        """Seconds of processor time that the thread has taken; 0 before and after its life."""
        if not self._thread.is_alive() or self._thread.ident is None:
            return 0.0
        return time.clock_gettime(time.pthread_getcpuclockid(self._thread.ident))

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def accounts(self) -> Accounts:
        """Where every event is, at one moment. For any thread."""
        with self._accounting:
            queued, books, past = self._queue.counts(), self._books, self._past
            found = Accounts(made=queued.made, deaths=past.deaths)
            found.add(past)
            found.add(books)
            found.spilled = books.spilled
            found.waiting = queued.held + self._waiting
            if queued.dropped:
                found.dropped["queue"] += queued.dropped
            return found

    def close(self) -> None:
        """Hand over what is left and wait for the carrier to send it, ``CLOSE_TIMEOUT_S`` at most.

        What it cannot send is spilled, or counted as failed.
        """
        self._stopping.set()
        self._thread.join(START_TIMEOUT_S + CLOSE_TIMEOUT_S + 1.0)
        found = self.accounts()
        lost = found.failed + found.dropped["carrier"]
        if lost or found.in_doubt:
            log.error("%d draft events were not sent to Kafka before the worker closed, "
                      "%d may not have been", lost, found.in_doubt)  # fmt: skip
        if found.spilled:
            log.warning(
                "%d draft events wait in %s for the next worker", found.spilled, self._folder
            )

    # --- the thread

    def _run(self) -> None:
        if self._folder is not None:
            try:
                self._lock = claim(self._folder, self._origin.life)
            except OSError as error:
                log.warning("no events can be spilled into %s (%s): while Kafka is away they wait "
                            "in memory", self._folder, error)  # fmt: skip
                self._folder = None
        stopping = False
        while not stopping:  # one turn at least: a worker may be gone at once
            try:
                self._turn()
            except Exception:  # noqa: BLE001 -- whatever it is, the next turn comes
                self._complaints.exception("events are not handed over")
            stopping = self._stopping.wait(EVERY_S)
        try:
            self._finish()
        except Exception:  # noqa: BLE001 -- what is left is still to be accounted for
            self._complaints.exception("the last events are not handed over")
        self._end()
        if self._lock is not None and self._folder is not None:
            with contextlib.suppress(OSError):
                release(self._folder, self._origin.life)
            os.close(self._lock)

    def _turn(self) -> None:
        self._hear()
        if self._carrier is None and time.monotonic() >= self._start_at:
            self._begin()
        carrier = self._carrier
        if carrier is None:
            return
        while carrier.unsent < UNSENT and self._hand_over(carrier):
            carrier.write()
        if time.monotonic() - self._said >= STATUS_EVERY_S and carrier.unsent < UNSENT:
            self._said = time.monotonic()
            self._say_status(carrier)
        carrier.write()

    def _finish(self) -> None:
        """Hand over the rest, and wait until the carrier has sent it or gives up."""
        until = time.monotonic() + START_TIMEOUT_S
        if self._carrier is None and (self._queue.counts().held or self._waiting > self._left):
            self._begin()  # one that died would have been started again a little later
        while self._carrier is not None and not self._books.ready and time.monotonic() < until:
            self._hear()
            time.sleep(LOOK_S)
        carrier, until = self._carrier, time.monotonic() + CLOSE_TIMEOUT_S
        if carrier is None:
            return
        while time.monotonic() < until and (self._hand_over(carrier) or carrier.unsent):
            carrier.write()
        half = time.monotonic() + CLOSE_TIMEOUT_S / 2
        while time.monotonic() < half and self._carrier is not None and self._waiting:
            self._hear()
            time.sleep(LOOK_S)
        self._say_status(carrier)  # the last one, with everything in it
        carrier.write()
        carrier.dismiss()
        while time.monotonic() < until and not carrier.ended:
            self._hear()
            time.sleep(LOOK_S)

    @property
    def _waiting(self) -> int:
        return self._entrusted - self._books.settled - self._books.spilled

    def _hand_over(self, carrier: Carrier) -> bool:
        """Add a frame of events, and the rounds there are, to what is sent; False without any."""
        rounds = self._turns.rounds if self._turns is not None else None
        while rounds and carrier.unsent < UNSENT:
            self._hand_over_round(carrier, rounds.popleft())
        with self._accounting:
            taken = self._queue.take(AT_ONCE)
            if not taken:
                return False
            payload, taken = self._encoded(taken)
            self._entrusted += len(taken)
            if taken:
                carrier.put(Frame(frames.EVENTS, len(taken), payload))
        return True

    def _encoded(self, taken: list[Any]) -> tuple[bytes, list[Any]]:
        """What is told of ``taken``, and of which of them: one that cannot be told is counted."""
        try:
            return told.encode(self._tell(taken)), taken
        except Exception:  # noqa: BLE001 -- told by the complaints
            if len(taken) == 1:
                self._complaints.exception("no event can be made of a cycle")
                self._past.dropped["unreadable"] += 1
                return b"", []
        readable = [one for one in taken if self._encoded([one])[1]]
        try:
            return (told.encode(self._tell(readable)), readable) if readable else (b"", [])
        except Exception:  # noqa: BLE001 -- told by the complaints
            self._complaints.exception("no events can be made of cycles")
            self._past.dropped["unreadable"] += len(readable)
            return b"", []

    def _hand_over_round(self, carrier: Carrier, played: Played) -> None:
        try:
            payload = round_of(played, self._origin).model_dump_json().encode()
        except Exception as error:  # noqa: BLE001 -- nor must later rounds be held up
            self._complaints.warning("a round of a trial cannot be written: %r", error)
            self._past.rounds_dropped += 1
            return
        self._rounds += 1
        carrier.put(Frame(frames.ROUND, 0, payload))

    def _say_status(self, carrier: Carrier) -> None:
        try:
            payload = self._status().model_dump_json().encode()
        except Exception as error:  # noqa: BLE001 -- events must not wait for a status
            self._complaints.warning("no status can be made: %r", error)
            return
        carrier.put(Frame(frames.STATUS, 0, payload))

    # --- the carrier

    def _begin(self) -> None:
        """Start a carrier, which goes on where the last one ended."""
        hello = Hello(
            json.loads(self._kafka.model_dump_json()), self._origin.scope, self._origin.worker,
            self._origin.life, self._origin.target, self._origin.drafter,
            self._books.copy(), str(self._folder or ""), self._most, self._per_second,
        )  # fmt: skip
        self._start_at = time.monotonic() + self._pause
        self._carrier, self._silent = Carrier(hello, self._lock), 0

    def _hear(self) -> None:
        """Hear what the carrier says; of one that is dead, what it said last holds."""
        carrier = self._carrier
        if carrier is None:
            return
        ended = carrier.ended  # before the last words are read
        books = carrier.hear()
        self._silent += 1
        if books is not None:
            self._silent = 0
            self._take_books(books)
        hangs = self._silent > SILENT_TURNS and self._waiting > 0 and not self._stopping.is_set()
        if ended or hangs:
            self._bury()

    def _take_books(self, books: Books) -> None:
        with self._accounting:
            if books.ready and not self._books.ready:
                # Of what the one before it answered for the file holds this; the rest died with it.
                lost = self._inherited - books.found
                self._entrusted -= lost
                if lost > 0:
                    self._past.dropped["carrier"] += lost
                else:  # it had put down what was in doubt, or could not take out what was sent
                    certain = min(-lost, self._past.in_doubt)
                    self._past.in_doubt -= certain
                    self._past.sent += lost + certain
            self._books = books

    def _bury(self) -> None:
        """Settle the books of a carrier that ended, or ends now. Another may go on from there."""
        carrier, self._carrier = self._carrier, None
        if carrier is None:
            return
        how = carrier.end()
        with self._accounting:
            books, past = self._books, self._past
            past.add(books)
            past.in_doubt += books.flying
            past.rounds_dropped += self._rounds - books.rounds_sent - books.rounds_dropped
            self._entrusted -= books.settled + books.flying
            self._rounds, self._inherited = 0, self._entrusted
            if books.ready:  # else it had not looked, and what was there is there
                self._left = books.spilled
            self._books = books.copy()
            if self._stopping.is_set():
                self._books.spilled = self._left
                return
            past.deaths += 1
        lived = time.monotonic() - carrier.began
        self._pause = min(self._pause * 2, RESTART_S[1]) if lived < RESTART_S[1] else RESTART_S[0]
        self._complaints.warning(
            "the process that carries events to Kafka ended (%d): it is started again", how
        )

    def _end(self) -> None:
        """Nobody comes any more: what has not been settled or spilled has failed."""
        self._hear()
        self._bury()
        with self._accounting:
            self._books.spilled = self._left
            lost = self._waiting + len(self._queue.take(len(self._queue)))
            self._past.failed += lost
            self._entrusted = self._books.spilled
        rounds = self._turns.rounds if self._turns is not None else ()
        self._past.rounds_dropped += len(rounds)


def round_of(played: Played, origin: Origin) -> Round:
    """The record of a finished round."""
    return Round(
        scope=origin.scope,
        worker=origin.worker,
        life=origin.life,
        number=played.number,
        time=played.time,
        blocks=tuple(account.block() for account in played.accounts),
    )
