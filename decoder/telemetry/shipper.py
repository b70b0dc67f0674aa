"""The thread that carries events, status and rounds of trials from a worker to Kafka.

At least once: a record stays in hand until the broker has acknowledged it, and readers drop
duplicates by life and number. While the broker is away the queue fills; only a full queue loses
events. What the broker will never take is set aside, and the next record goes. All of it is
counted: an event that was made is sent, waiting, dropped, refused or failed.

Everything of one life goes to one partition, so that the events of a request, which lives in one
worker, are read in their order.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

from decoder.contracts.errors import EventRefused
from decoder.contracts.events import DraftEvent, Origin, encode_batch
from decoder.contracts.settings import KafkaSettings
from decoder.contracts.status import WorkerStatus
from decoder.contracts.topics import DRAFTS, STATUS, TRIALS
from decoder.contracts.trials import Round
from decoder.kafka.clients import open_producer
from decoder.telemetry.queue import EventQueue
from decoder.trial.turns import Played, Turns

log = logging.getLogger(__name__)

BATCH: Final = 256
"""Events a record: past this the record's size no longer amortises anything."""
LINGER_S: Final = 0.25
"""Longest time an event waits for company; what a dashboard sees lags by this much."""
STATUS_EVERY_S: Final = 1.0
RETRY_S: Final = 1.0
ACK_TIMEOUT_S: Final = 10.0
CLOSE_TIMEOUT_S: Final = 5.0
COMPLAIN_EVERY_S: Final = 60.0
ROUNDS_AT_ONCE: Final = 16
"""Rounds sent before events have their turn again."""
ROUNDS_RETRY_S: Final = 30.0
"""Pause after a round that did not get through: events do not wait for what may be lost."""
TOO_LARGE: Final = ("MessageSizeTooLargeError", "RecordListTooLargeError")
"""Refusals that a smaller record may escape."""


class Shipper:
    """Sends what is in ``queue`` and, once a second, what ``status`` says.

    ``status`` builds the worker's status record; it runs in this thread. ``sent``, ``refused`` (by
    reason) and ``failed`` count events; rounds of ``turns`` are sent or dropped.
    """

    def __init__(
        self,
        kafka: KafkaSettings,
        queue: EventQueue,
        origin: Origin,
        status: Callable[[], WorkerStatus],
        turns: Turns | None = None,
    ) -> None:
        self._turns = turns
        self._kafka, self._queue, self._status = kafka, queue, status
        self._origin = origin
        self._stopping = threading.Event()
        self._given_up = False
        self._in_hand: list[DraftEvent] = []
        self._most = BATCH  # events of the next record
        self._partition = -1
        self._sequences: Counter[int] = Counter()  # records each partition holds of this life
        self._doubtful = False  # the last record may lie there although it was not acknowledged
        self._complained = -COMPLAIN_EVERY_S
        self._thread = threading.Thread(target=self._run, name="hvd-telemetry", daemon=True)
        self.sent = 0
        self.refused: Counter[str] = Counter()
        self.failed = 0
        self.rounds_sent = self.rounds_dropped = 0
        self._rounds_at = 0.0  # when the next is tried, by the monotonic clock

    @property
    def waiting(self) -> int:
        """Events of which the broker has not said what becomes of them."""
        return 0 if self._given_up else len(self._in_hand) + len(self._queue)

    def start(self) -> None:
        """Begin to send."""
        self._thread.start()

    def close(self) -> None:
        """Send what is left, for at most ``CLOSE_TIMEOUT_S``; what remains is counted as failed."""
        self._stopping.set()
        self._thread.join(CLOSE_TIMEOUT_S)
        left, self._given_up = self.waiting, True
        self.rounds_dropped += len(self._turns.rounds) if self._turns is not None else 0
        if left:
            self.failed += left
            log.error("%d draft events could not be sent to Kafka before the worker closed", left)

    def _run(self) -> None:
        producer: Any = None
        said = 0.0
        while not self._given_up:
            stopping = self._stopping.is_set()
            moved = 0
            try:
                producer = producer or self._connect()
                moved = self._send_record(producer)
                self._send_rounds(producer)
                if time.monotonic() - said >= STATUS_EVERY_S or stopping:
                    said = time.monotonic()
                    self._send_status(producer)
            except Exception as error:  # noqa: BLE001 -- whatever it is, the thread goes on
                self._complain(
                    "Kafka at %s does not take what this worker has to tell (%s: %s): serving goes "
                    "on, events wait in memory. Start the broker or set "
                    "HVD_KAFKA_BOOTSTRAP_SERVERS.",
                    self._kafka.bootstrap_servers, type(error).__name__, error,
                )  # fmt: skip
                if not getattr(error, "retriable", False):
                    self._left(producer)
                    producer = None
                if producer is None and stopping:
                    return
                time.sleep(RETRY_S / 10 if stopping else 0.0)
                self._stopping.wait(RETRY_S)
            if not self._in_hand:
                if stopping and not self._queue:
                    break
                if moved < BATCH:
                    self._stopping.wait(0.01 if stopping else LINGER_S)
        self._left(producer)

    def _connect(self) -> Any:
        from kafka.codec import has_zstd

        return open_producer(
            self._kafka,
            "telemetry",
            compression_type="zstd" if has_zstd() else "gzip",
            enable_idempotence=False,  # one record in flight, and readers deduplicate
            max_block_ms=int(ACK_TIMEOUT_S * 1000),
        )

    def _left(self, producer: Any) -> None:
        with contextlib.suppress(Exception):
            if producer is not None:
                producer.close(timeout=1.0)

    def _send_record(self, producer: Any) -> int:
        """Send one record of what is in hand; how many events left the hand, sent or refused."""
        if not self._in_hand:
            self._in_hand = self._queue.take(BATCH)
            if self._queue.unreadable:
                self.refused["unreadable"] = self._queue.unreadable
        if not self._in_hand:
            return 0
        from kafka.errors import BrokerResponseError, SaslAuthenticationFailedError

        batch = self._in_hand[: self._most]
        partition = self._choose_partition(producer)
        try:
            value = encode_batch(batch, self._origin, self._sequences[partition])
            key = self._origin.worker.encode()
            sent = producer.send(
                DRAFTS.name, key=key, value=value, partition=partition, headers=DRAFTS.headers
            )
            sent.get(ACK_TIMEOUT_S)
        except (EventRefused, TypeError, ValueError) as error:
            return self._refuse(batch, partition, "malformed", error, smaller=True)
        except BrokerResponseError as error:
            self._doubtful |= error.retriable
            if error.retriable or isinstance(error, SaslAuthenticationFailedError):
                raise
            name = type(error).__name__
            reason = name.removesuffix("Error")
            return self._refuse(batch, partition, reason, error, smaller=name in TOO_LARGE)
        except Exception:
            self._doubtful = True
            raise
        self._sequences[partition] += 1
        self._doubtful = False
        self._most = min(BATCH, self._most + 1)
        if not self._given_up:
            self.sent += len(batch)
            del self._in_hand[: len(batch)]
        return len(batch)

    def _send_rounds(self, producer: Any) -> None:
        """Send what was finished; never raises."""
        rounds = self._turns.rounds if self._turns is not None else None
        if not rounds or time.monotonic() < self._rounds_at:
            return
        from kafka.errors import BrokerResponseError

        key = self._origin.worker.encode()
        for _ in range(min(len(rounds), ROUNDS_AT_ONCE)):
            try:
                value = round_of(rounds[0], self._origin).model_dump_json().encode()
            except Exception as error:  # noqa: BLE001 -- nor must later rounds
                self._complain("a round of a trial cannot be written: %r", error)
                self.rounds_dropped += 1
                rounds.popleft()
                continue
            try:
                sent = producer.send(TRIALS.name, key=key, value=value, headers=TRIALS.headers)
                sent.get(ACK_TIMEOUT_S)
            except Exception as error:  # noqa: BLE001 -- events must not wait for a round
                self._complain("a round of a trial was not sent: %r", error)
                refused = isinstance(error, BrokerResponseError) and not error.retriable
                if not refused and not isinstance(error, ValueError):
                    self._rounds_at = time.monotonic() + ROUNDS_RETRY_S
                    return
                self.rounds_dropped += 1
            else:
                self.rounds_sent += 1
            rounds.popleft()

    def _refuse(
        self, batch: list[DraftEvent], partition: int, reason: str, error: Exception, smaller: bool
    ) -> int:
        """Halve the next record where that may help, else set ``batch`` aside and count it.

        A record that was refused leaves its number to the next, unless an earlier attempt with
        that number may have come through.
        """
        self._sequences[partition] += self._doubtful
        self._doubtful = False
        if smaller and len(batch) > 1:
            self._most = len(batch) // 2
            return 0
        if not self._given_up:
            self._complain("%d draft events were refused for good: %s", len(batch), error)
            self.refused[reason] += len(batch)
            del self._in_hand[: len(batch)]
        return len(batch)

    def _choose_partition(self, producer: Any) -> int:
        """The same for this life as long as the topic has it."""
        partitions = sorted(producer.partitions_for(DRAFTS.name) or {0})
        if self._partition not in partitions:
            self._partition = partitions[zlib.crc32(self._origin.worker.encode()) % len(partitions)]
        return self._partition

    def _send_status(self, producer: Any) -> None:
        try:
            value = self._status().model_dump_json().encode()
        except Exception as error:  # noqa: BLE001 -- events must not wait for a status
            self._complain("no status can be made: %r", error)
            return
        key = self._origin.worker.encode()
        producer.send(STATUS.name, key=key, value=value, headers=STATUS.headers)

    def _complain(self, message: str, *arguments: object) -> None:
        if time.monotonic() - self._complained >= COMPLAIN_EVERY_S:
            self._complained = time.monotonic()
            log.warning(message, *arguments)


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
