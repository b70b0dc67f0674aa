"""What carries events, status and rounds of trials to Kafka, in the carrier's process.

At least once: a record keeps its number and its bytes until the broker has acknowledged it, and
readers drop duplicates by life and number. While the broker is away records wait in a file. What
the broker will never take is set aside, and the next record goes. All of it is counted: an event is
sent, in doubt, waiting, spilled, dropped, refused or failed.

The events of a request go to one partition, and of each partition one record is under way at a
time, so that they are read in their order.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

from decoder.complaints import Complaints
from decoder.contracts.events import DraftEvent, Origin
from decoder.contracts.settings import KafkaSettings
from decoder.contracts.topics import DRAFTS, STATUS, TRIALS, Topic
from decoder.kafka.clients import close, open_producer
from decoder.telemetry import frames
from decoder.telemetry.books import Books
from decoder.telemetry.former import FormerLives
from decoder.telemetry.frames import Frame
from decoder.telemetry.outbox import Outbox
from decoder.telemetry.recorder import BATCH, Recorder, value_of
from decoder.telemetry.shedding import Shedding
from decoder.telemetry.spill import FILE, Record, Spill, SpillError, is_damage
from decoder.telemetry.told import decode, events_of

log = logging.getLogger(__name__)

LINGER_S: Final = 0.25
"""Longest time an event waits for company; what a dashboard sees lags by this much."""
RETRY_S: Final = 1.0
ACK_TIMEOUT_S: Final = 10.0
METADATA_MS: Final = 2_000
CLOSE_TIMEOUT_S: Final = 2.0
ROUNDS_RETRY_S: Final = 30.0
"""Pause after a round that did not get through: events do not wait for what may be lost."""
ROUNDS: Final = 256
"""Rounds held at most."""
TOO_LARGE: Final = ("MessageSizeTooLargeError", "RecordListTooLargeError")
"""Refusals that a smaller record may escape."""


class Inbox:
    """Frames that came, and whether more will; another thread fills it."""

    def __init__(self) -> None:
        self.frames: deque[Frame] = deque()
        self.closed = False
        self.wake = threading.Event()


class Flight(NamedTuple):
    """A record under way; ``spill`` is the file of the former life that it is from."""

    record: Record
    answer: Any
    since: float
    spill: Spill | None


class Shipper:
    """Sends what is told, in one thread. Public state: ``books``, and ``outbox`` behind them.

    ``report`` is called with the books before anything is sent that they do not tell of yet, and
    after each change.
    """

    def __init__(
        self,
        kafka: KafkaSettings,
        origin: Origin,
        books: Books,
        report: Callable[[Books], None] = lambda books: None,
        folder: Path | None = None,
        most: int = 0,
        shedding: Shedding | None = None,
    ) -> None:
        """Begin where ``books`` ended.

        Args:
            folder: of the files that hold what is spilled, at most ``most`` bytes; None holds none.
        """
        self.books, self._report = books, report
        self._kafka, self._origin, self._folder = kafka, origin, folder
        self.outbox = Outbox(books, self._spill(), most)
        self._recorder = Recorder(origin, books, self.outbox)
        books.ready = True
        self._shedding = shedding or Shedding(0.0)
        self._open: list[DraftEvent] = []
        self._opened = 0.0  # when the first of them came
        self._status = b""
        self._rounds: deque[bytes] = deque()
        self._round: Any = None  # the answer to the one under way
        self._rounds_at = 0.0
        self._partitions = 0  # that events are spread over; 0: nobody has said yet
        self._producer: Any = None
        self._retry_at = 0.0
        self._flights: list[Flight] = []
        self._former = FormerLives(folder, books) if folder is not None else None
        self._complaints = Complaints()
        self._wake = threading.Event()

    def _spill(self) -> Spill | None:
        if self._folder is None:
            return None
        path = self._folder / f"{self._origin.life}{FILE}"
        try:
            return Spill(path, self._origin.worker)
        except SpillError as error:
            if not is_damage(error):
                log.warning("%s cannot be read now: events wait in memory, and what it holds for "
                            "the next worker (%s)", path, error)  # fmt: skip
                return None
            log.warning("%s cannot be read: what it held is lost (%s)", path, error)
            path.unlink(missing_ok=True)
            return Spill(path, self._origin.worker)

    def run(self, inbox: Inbox) -> None:
        """Ship until the inbox is closed and all is sent, or ``CLOSE_TIMEOUT_S`` later; what is
        left then waits in the file, or is counted as failed.
        """
        self._wake = inbox.wake
        until: float | None = None
        while True:
            closed = inbox.closed
            while inbox.frames:
                self.take(inbox.frames.popleft())
            self.step(hasten=closed)
            if closed and not inbox.frames:
                until = until or time.monotonic() + CLOSE_TIMEOUT_S
                settled = not (self.outbox or self._flights or self._rounds)
                given_up = self._producer is None and self._folder is not None
                if settled or given_up or time.monotonic() > until:
                    break
            if not inbox.frames:
                self._wake.wait(LINGER_S / 10 if self._flights or closed else LINGER_S)
                self._wake.clear()
        self.close()

    def take(self, frame: Frame) -> None:
        """Take what was told; never raises."""
        if frame.kind == frames.STATUS:
            self._status = frame.payload
        elif frame.kind == frames.ROUND:
            if len(self._rounds) < ROUNDS:
                self._rounds.append(frame.payload)
            else:
                self.books.rounds_dropped += 1
        elif frame.kind == frames.EVENTS:
            self.books.taken += frame.rows
            try:
                events = events_of(decode(frame.payload))
            except Exception:  # noqa: BLE001 -- told by the complaints
                self._complaints.exception("no events can be made of what was told")
                self.books.drop("unreadable", frame.rows)
                return
            kept = self._shedding.keep(events)
            if len(kept) < len(events):
                self.books.drop("shed", len(events) - len(kept))
            self._opened = self._opened if self._open else time.monotonic()
            self._open += kept
            self.books.waiting += len(kept)

    def step(self, hasten: bool = False) -> None:
        """One turn: records of what came, what is acknowledged, what can be sent. Never raises."""
        try:
            self._land()
            if time.monotonic() >= self._retry_at:
                self._connect()  # first, for it says how many partitions there are
        except Exception as error:  # noqa: BLE001 -- whatever it is, the next turn comes
            self._fail(error)
        full = len(self._open) >= BATCH * max(self._partitions, 1)
        if self._open and (full or hasten or time.monotonic() >= self._opened + LINGER_S):
            opened, self._open = self._open, []
            self._recorder.record(opened, max(self._partitions, 1))
        self._report(self.books)
        try:
            if self._producer is not None and time.monotonic() >= self._retry_at:
                self._send()
        except Exception as error:  # noqa: BLE001 -- nor must this end it
            self._fail(error)
        self._report(self.books)

    def close(self) -> None:
        """Put down what is left, and leave."""
        for flight in self._flights:
            self._landed(flight, doubtful=True)
        self.outbox.close()
        self.books.rounds_dropped += len(self._rounds)
        self._report(self.books)
        if self._former is not None:
            self._former.close()
        self._leave()

    # --- to the broker and back

    def _connect(self) -> None:
        if self._producer is None:
            self._producer = self._make_producer()
        if not self._partitions:
            self._partitions = len(self._producer.partitions_for(DRAFTS.name) or {0})

    def _make_producer(self) -> Any:
        from kafka.codec import has_zstd

        return open_producer(
            self._kafka,
            "telemetry",
            compression_type="zstd" if has_zstd() else "gzip",
            enable_idempotence=False,  # one record of a partition in flight, readers deduplicate
            max_block_ms=METADATA_MS,
        )

    def _produce(self, topic: Topic, value: bytes, key: str, partition: int | None = None) -> Any:
        """The answer to come; the one place where a record is handed to the client."""
        answer = self._producer.send(
            topic.name, key=key.encode(), value=value, partition=partition, headers=topic.headers
        )
        answer.add_both(lambda _: self._wake.set())
        return answer

    def _send(self) -> None:
        now = time.monotonic()
        partitions = self._producer.partitions_for(DRAFTS.name) or {0}
        for record in self.outbox.ready():
            if record.partition not in partitions:
                self._complaints.warning("draft events are lost: their topic has fewer partitions")
                self.outbox.drop(record.id, "partition")
                continue
            self.outbox.sent(record)
            self._report(self.books)
            self._fly(record, value_of(record, self.outbox.cuts), self._origin.worker, None)
        if self._former is not None and not any(flight.spill for flight in self._flights):
            left = self._former.oldest(partitions)
            if left is not None:
                value = value_of(left.record, left.spill.cuts)
                self._fly(left.record, value, left.key, left.spill)
        if self._rounds and self._round is None and now >= self._rounds_at:
            self._round = self._beside(TRIALS, self._rounds[0])
        if self._status:
            status, self._status = self._status, b""
            self._beside(STATUS, status)

    def _beside(self, topic: Topic, value: bytes) -> Any:
        """The answer to what is no draft event: none waits for it, whatever becomes of it."""
        from kafka.future import Future

        try:
            return self._produce(topic, value, self._origin.worker)
        except Exception as error:  # noqa: BLE001 -- told by whoever asks
            return Future().failure(error)

    def _fly(self, record: Record, value: bytes, key: str, spill: Spill | None) -> None:
        from kafka.errors import BrokerResponseError
        from kafka.future import Future

        try:
            answer = self._produce(DRAFTS, value, key, record.partition)
        except BrokerResponseError as error:  # the client knows what the broker would say
            answer = Future().failure(error)
        except Exception:
            if spill is None:
                self.outbox.landed(record)
            raise
        self._flights.append(Flight(record, answer, time.monotonic(), spill))

    def _land(self) -> None:
        """Take note of what was answered.

        Raises:
            Exception: what has to be sent again, later.
        """
        waiting, late, again = [], None, None
        for flight in self._flights:
            if not flight.answer.is_done:
                waiting.append(flight)
                if time.monotonic() - flight.since > ACK_TIMEOUT_S:
                    late = TimeoutError(f"no answer within {ACK_TIMEOUT_S:.0f} s")
            elif flight.answer.failed():
                again = self._refused(flight, flight.answer.exception) or again
            else:
                self._landed(flight)
        self._flights = waiting
        self._land_round()
        if late or again:
            raise late or again  # type: ignore[misc]

    def _landed(self, flight: Flight, doubtful: bool = False) -> None:
        record, spill = flight.record, flight.spill
        if spill is None:
            self.outbox.landed(record, doubtful)
            if not doubtful:
                self.outbox.delivered(record)
        elif not doubtful and self._former is not None:
            self.books.former += self._former.remove(spill, record.id)

    def _refused(self, flight: Flight, error: Exception) -> Exception | None:
        """Set a record aside for good, or cut it; else the error, after which it is sent again."""
        from kafka.errors import BrokerResponseError, SaslAuthenticationFailedError

        record, spill = flight.record, flight.spill
        answered = isinstance(error, BrokerResponseError)
        passing = getattr(error, "retriable", False)
        passing = passing or isinstance(error, SaslAuthenticationFailedError)
        if passing or not answered:
            self._landed(flight, doubtful=True)
            return error
        name = type(error).__name__
        if spill is not None and self._former is not None:
            log.warning("%d draft events of a former life were refused: %r", record.rows, error)
            self.books.lose_former("refused", self._former.remove(spill, record.id))
            return None
        self.outbox.landed(record)
        if name in TOO_LARGE and record.rows > 1 and not self.outbox.is_doubtful(record):
            self._recorder.cut(record)
        else:
            self._complaints.warning("draft events were refused for good: %r", error)
            self.outbox.refused(record, name.removesuffix("Error"))
        return None

    def _land_round(self) -> None:
        from kafka.errors import BrokerResponseError

        answer = self._round
        if answer is None or not answer.is_done:
            return
        self._round = None
        if not answer.failed():
            self.books.rounds_sent += 1
        else:
            error = answer.exception
            self._complaints.warning("a round of a trial was not sent: %r", error)
            if not isinstance(error, BrokerResponseError) or error.retriable:
                self._rounds_at = time.monotonic() + ROUNDS_RETRY_S
                return
            self.books.rounds_dropped += 1
        self._rounds.popleft()

    def _fail(self, error: Exception) -> None:
        """The broker does not take what there is to tell: wait, and begin anew."""
        self._complaints.warning(
            "Kafka at %s does not take what this worker has to tell (%s: %s): serving goes on, "
            "events wait. Start the broker or set HVD_KAFKA_BOOTSTRAP_SERVERS.",
            self._kafka.bootstrap_servers, type(error).__name__, error,
        )  # fmt: skip
        self._retry_at = time.monotonic() + RETRY_S
        self.outbox.put_down()
        self._report(self.books)  # before the wait below: one that dies in it lost none of these
        if not getattr(error, "retriable", False):
            for flight in self._flights:
                self._landed(flight, doubtful=True)
            self._flights = []
            self._round = None
            self._leave()

    def _leave(self) -> None:
        close(self._producer)
        self._producer = None
