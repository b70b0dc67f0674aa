"""What makes records of a ring's rows and sends them, in the carrier's process.

A slice of the ring is under way at a time: it is said which, then its records are made and sent,
and once each is acknowledged, or refused for good, the slice is settled in one stroke. A carrier
that dies between leaves the slice to the next one, which makes the same records under the same
numbers; readers drop those they have had. Of each partition one record is under way, so that the
events of a request, which all go to one partition, are read in their order.
"""

from __future__ import annotations

import time
import zlib
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from decoder.complaints import Complaints
from decoder.contracts.errors import EventRefused
from decoder.contracts.events import Origin
from decoder.contracts.redacted import redacted
from decoder.contracts.settings import KafkaSettings
from decoder.contracts.topics import DRAFTS, STATUS, TRIALS, Topic
from decoder.kafka.sender import open_sender
from decoder.telemetry.books import Books
from decoder.telemetry.ring import BEAT, HEAD, Ring
from decoder.telemetry.shedding import Shedding

if TYPE_CHECKING:
    from confluent_kafka import KafkaError

BATCH: Final = 256
"""Events a record: past this the record's size no longer amortises anything."""
POLL_S: Final = 0.05
"""Longest wait for an acknowledgement before what else came is looked at."""
RETRY_S: Final = 1.0
METADATA_S: Final = 2.0
ROUNDS: Final = 256
"""Rounds of trials under way at most."""

TOO_LARGE: Final = ("MSG_SIZE_TOO_LARGE", "RECORD_LIST_TOO_LARGE")
"""Refusals that a smaller record may escape."""
PASSING: Final = ("UNKNOWN_TOPIC_OR_PART", "SASL_AUTHENTICATION_FAILED")
"""Of a broker's refusals, those that librdkafka gives up at and a person can mend."""

GONE: Final = "_UNKNOWN_PARTITION"

Rows = NDArray[Any]


class Shipper:
    """Sends what is in ``ring``, in one thread. ``books`` say what became of it."""

    def __init__(
        self, kafka: KafkaSettings, origin: Origin, ring: Ring, shedding: Shedding | None = None
    ) -> None:
        """Begin where the one before ended."""
        self._kafka, self._origin, self._ring = kafka, origin, ring
        self._shedding = shedding or Shedding(0.0)
        self.books = ring.books()
        self.books.limit = self.books.limit or BATCH
        ring.say(self.books)  # of one that died in saying so, all is done that follows
        self._seen = self.books.end  # rows, a turn ago: on any processor they are whole by now
        self._sending: dict[int, deque[Rows]] = {}  # records to be, by partition
        self._again: set[int] = set()  # partitions whose first record is to be sent
        self._doubtful: set[int] = set()  # partitions whose first record may lie on the topic
        self._sequences: dict[int, int] = {}
        self._slice = Books()  # what became of its events
        self._limit = self.books.limit
        self._producer: Any = None
        self._retry_at = 0.0
        self._status, self._telling = b"", False
        self._rounds: deque[bytes] = deque()
        self._rounds_flying = 0
        self._complaints = Complaints()

    @property
    def busy(self) -> bool:
        """Whether there is something to do at once, or an answer to wait for."""
        full = len(self._ring) >= self._limit * max(self.books.partitions, 1)
        return self._under_way or (full and time.monotonic() >= self._retry_at)

    @property
    def idle(self) -> bool:
        """Whether all there was is sent, or will never be."""
        told = not (self._status or self._telling or self._rounds or self._rounds_flying)
        return told and not len(self._ring)

    @property
    def _under_way(self) -> bool:
        return self.books.end > self.books.settled

    def take(self, kind: bytes, line: bytes) -> None:
        """Take a status, in the place of one that was not sent yet, or a round of a trial."""
        if kind == b"S":
            self._status = line
        elif kind == b"R" and len(self._rounds) + self._rounds_flying < ROUNDS:
            self._rounds.append(line)
        elif kind == b"R":
            self.books.rounds_dropped += 1

    def turn(self) -> None:
        """Take note of what was answered, and send what can be sent. Never raises."""
        self._ring.control[BEAT] += 1
        try:
            if time.monotonic() >= self._retry_at:
                self._connect()
                for partition in list(self._again):
                    self._next(partition)
                if not self._sending:
                    self._cut()
                self._send_beside()
            elif self._producer is None:
                time.sleep(POLL_S)
            if self._producer is not None:
                self._producer.poll(POLL_S if self._under_way else 0.0)
        except Exception as error:  # noqa: BLE001 -- whatever it is, the next turn comes
            self._fail(error)

    def close(self) -> None:
        """Leave: what is not settled has failed, or is in doubt where it may have been sent."""
        books = self.books
        self._slice.in_doubt += sum(len(self._sending[p][0]) for p in self._doubtful)
        self._book()
        books.failed += int(self._ring.control[HEAD]) - books.settled
        books.end = books.settled
        books.rounds_dropped += len(self._rounds) + self._rounds_flying
        self._ring.say(books)

    # --- slices

    def _cut(self) -> None:
        """Begin a slice, or the one that a carrier before this one had begun."""
        books, ring = self.books, self._ring
        first = books.settled
        if not self._under_way:
            whole, self._seen = self._seen, int(ring.control[HEAD])
            end = min(whole, first + self._limit * books.partitions)
            if end == first:
                return
            self._draw(first, end)
            books.end, books.limit = end, self._limit
            ring.say(books)
        rows = ring.slice(first, books.end)
        self._limit, self._sequences = books.limit, dict(books.sequences)
        kept = rows[rows["share"] > 0]
        self._slice = Books()
        if len(kept) < len(rows):
            self._slice.dropped = {"shed": len(rows) - len(kept)}
        requests, which = np.unique(kept["request"], return_inverse=True)
        places = [zlib.crc32(request) % books.partitions for request in requests.tolist()]
        of_each = np.array(places, np.int64)[which]
        for partition in sorted(set(places)):
            group = kept[of_each == partition]
            parts = (group[at : at + self._limit] for at in range(0, len(group), self._limit))
            self._sending[partition] = deque(parts)
        self._again.update(self._sending)
        if not self._sending:
            self._settle()
        for partition in list(self._sending):
            self._next(partition)

    def _draw(self, first: int, end: int) -> None:
        """Write into the rows with which chance they are told of; 0 where they are not."""
        if not self._shedding.per_second:
            return
        places = self._ring.places(first, end)
        requests = self._ring.rows["request"][places].tolist()
        self._ring.rows["share"][places] *= self._shedding.shares(requests)

    def _settle(self) -> None:
        if "partition" in self._slice.dropped:
            self.books.partitions = 0  # made anew: ask how many there are
        self._book()
        self.books.sequences = dict(self._sequences)
        self._ring.say(self.books)

    def _book(self) -> None:
        """Add what became of the slice's events, which is counted nowhere else."""
        books, part = self.books, self._slice
        books.sent += part.sent
        books.in_doubt += part.in_doubt
        for whole, one in ((books.dropped, part.dropped), (books.refused, part.refused)):
            for reason, events in one.items():
                whole[reason] = whole.get(reason, 0) + events
        self._slice = Books()

    # --- records

    def _next(self, partition: int) -> None:
        """Send the next record of the slice for ``partition``."""
        waiting = self._sending[partition]
        while waiting:
            try:
                number = self._sequences.get(partition, 0)
                value = self._ring.record(waiting[0], self._origin, number)
            except EventRefused as error:
                if not _halve(waiting):
                    self._complaints.warning("a draft event cannot be written: %s", error)
                    _count(self._slice.refused, "malformed", len(waiting.popleft()))
                continue
            refusal = self._produce(DRAFTS, value, partial(self._landed, partition), partition)
            if refusal is None:
                self._again.discard(partition)
                self._doubtful.add(partition)
                return
            if not self._judge(partition, refusal):
                return
        self._again.discard(partition)
        del self._sending[partition]
        if not self._sending:
            self._settle()

    def _landed(self, partition: int, error: KafkaError | None, message: object) -> None:
        if self._judge(partition, error):
            self._next(partition)

    def _judge(self, partition: int, error: KafkaError | None) -> bool:
        """Take note of what became of the record under way; False where it has to be sent again."""
        waiting = self._sending[partition]
        events, told = len(waiting[0]), self._slice
        name = error.name() if error is not None else ""
        if error is not None and (error.code() < 0 or name in PASSING) and name != GONE:
            self._again.add(partition)
            self._fail(error)
            return False
        self._doubtful.discard(partition)
        if name in TOO_LARGE and _halve(waiting):
            self._limit = min(self._limit, len(waiting[0]))
            return True
        waiting.popleft()
        if name == GONE:
            self._complaints.warning("draft events are lost: their topic has fewer partitions")
            _count(told.dropped, "partition", events)
            return True
        self._sequences[partition] = self._sequences.get(partition, 0) + 1
        if error is None:
            told.sent += events
        else:
            self._complaints.warning("draft events were refused for good: %s", error)
            _count(told.refused, name.title().replace("_", ""), events)
        return True

    def _produce(
        self, topic: Topic, value: bytes, landed: Callable[..., None], partition: int | None = None
    ) -> KafkaError | None:
        """The one place where a record is handed to the client; what it says of one it refuses."""
        from confluent_kafka import KafkaException

        place = {} if partition is None else {"partition": partition}
        try:
            self._producer.produce(
                topic.name, value=value, key=self._origin.worker.encode(),
                headers=topic.headers, on_delivery=landed, **place,
            )  # fmt: skip
        except KafkaException as error:
            refusal: KafkaError = error.args[0]
            return refusal
        return None

    def _send_beside(self) -> None:
        """Send what is no draft event: none waits for it, whatever becomes of it."""
        if self._status and not self._telling:
            status, self._status = self._status, b""
            self._telling = self._produce(STATUS, status, self._told) is None
        while self._rounds:
            self._rounds_flying += 1
            refusal = self._produce(TRIALS, self._rounds.popleft(), self._round_landed)
            if refusal is not None:
                self._round_landed(refusal)

    def _told(self, error: KafkaError | None, message: object) -> None:
        self._telling = False

    def _round_landed(self, error: KafkaError | None, message: object = None) -> None:
        self._rounds_flying -= 1
        self.books.rounds_sent += error is None
        self.books.rounds_dropped += error is not None
        if error is not None:
            self._complaints.warning("a round of a trial was not sent: %s", error)
        self._ring.say(self.books)

    # --- the broker

    def _connect(self) -> None:
        from confluent_kafka import KafkaException

        if self._producer is None:
            self._producer = open_sender(self._kafka, "telemetry", self._complain)
        if not self.books.partitions:
            found = self._producer.list_topics(DRAFTS.name, timeout=METADATA_S)
            topic = found.topics[DRAFTS.name]
            if topic.error is not None:
                raise KafkaException(topic.error)
            self.books.partitions = len(topic.partitions)

    def _fail(self, error: object) -> None:
        self._retry_at = time.monotonic() + RETRY_S
        self._complain(error)

    def _complain(self, error: object) -> None:
        self._complaints.warning(
            "Kafka at %s does not take what this worker has to tell (%s): serving goes on, "
            "events wait. Start the broker or set HVD_KAFKA_BOOTSTRAP_SERVERS.",
            self._kafka.bootstrap_servers, redacted(str(error)),
        )  # fmt: skip


def _halve(waiting: deque[Rows]) -> bool:
    """Put two records in the place of the first; False where it is of one event."""
    rows = waiting[0]
    half = (len(rows) + 1) // 2
    if half == len(rows):
        return False
    waiting[0] = rows[:half]
    waiting.insert(1, rows[half:])
    return True


def _count(counts: dict[str, int], reason: str, events: int) -> None:
    counts[reason] = counts.get(reason, 0) + events
