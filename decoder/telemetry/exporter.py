"""What makes records of a ring's rows and sends them, in the exporter's process.

One record is under way at a time: it is said which rows are in it, then it is made and sent, and
once it is acknowledged, or refused for good, its rows are settled in one stroke. An exporter that
dies between leaves them to the next one, which makes the same record under the same number; readers
drop one they have had. All records of a life go to one partition, so that they are read in order.
"""

from __future__ import annotations

import time
import zlib
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from decoder.contracts.errors import EventRefused
from decoder.contracts.events import Origin, encode_batch
from decoder.contracts.masking import masked
from decoder.contracts.settings import KafkaSettings
from decoder.contracts.topics import DRAFTS, STATUS, TRIALS, Topic
from decoder.kafka.sender import open_sender
from decoder.limited_log import LimitedLog
from decoder.telemetry.head_sampling import HeadSampler
from decoder.telemetry.ring import BEAT, HEAD, Ring

if TYPE_CHECKING:
    from confluent_kafka import KafkaError

BATCH: Final = 256
"""Events a record: past this the record's size no longer amortises anything."""
REACH: Final = 16 * BATCH
"""Rows looked at for one, most of which may be shed."""
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


class Exporter:
    """Sends what is in ``ring``, in one thread. ``progress`` counts what became of it."""

    def __init__(
        self, kafka: KafkaSettings, origin: Origin, ring: Ring, sampler: HeadSampler | None = None
    ) -> None:
        """Begin where the one before ended."""
        self._kafka, self._origin, self._ring = kafka, origin, ring
        self._sampler = sampler or HeadSampler(0.0)
        self.progress = ring.progress()
        self.progress.limit = self.progress.limit or BATCH
        ring.write_progress(self.progress)  # what one that died in it left to do is done
        self._seen = self.progress.end  # rows, a look ago: on any processor they are whole by now
        self._drawn = self.progress.end  # rows of which it is known whether they are shed
        # Of the rows under way those of the record; one that another exporter left may lie there.
        self._kept = np.arange(self.progress.end - self.progress.settled)
        self._flying, self._doubtful = False, len(self._kept) > 0
        self._producer: Any = None
        self._retry_at = 0.0
        self._status, self._telling = b"", False
        self._rounds: deque[bytes] = deque()
        self._rounds_flying = 0
        self._limited_log = LimitedLog()

    @property
    def busy(self) -> bool:
        """Whether there is something to do at once, or an answer to wait for."""
        due = self.progress.end > self.progress.settled or len(self._ring) >= self.progress.limit
        return self._flying or (due and time.monotonic() >= self._retry_at)

    @property
    def idle(self) -> bool:
        """Whether all there was is sent, or will never be."""
        told = not (self._status or self._telling or self._rounds or self._rounds_flying)
        return told and not len(self._ring)

    def take(self, kind: bytes, line: bytes) -> None:
        """Take a status, in the place of one that was not sent yet, or a round of a trial."""
        if kind == b"S":
            self._status = line
        elif kind == b"R" and len(self._rounds) + self._rounds_flying < ROUNDS:
            self._rounds.append(line)
        elif kind == b"R":
            self.progress.rounds_dropped += 1

    def turn(self) -> None:
        """Take note of what was answered, and send what can be sent. Never raises."""
        self._ring.control[BEAT] += 1
        try:
            if time.monotonic() >= self._retry_at:
                self._connect()
                if not self._flying:
                    self._send()
                self._send_beside()
            if self._producer is not None:
                self._producer.poll(POLL_S if self._flying else 0.0)
        except Exception as error:  # noqa: BLE001 -- whatever it is, the next turn comes
            self._fail(error)

    def close(self) -> None:
        """Leave: what is not settled has failed, or is in doubt where it may have been sent."""
        progress = self.progress
        progress.in_doubt += len(self._kept) if self._doubtful else 0
        progress.failed += int(self._ring.control[HEAD]) - progress.settled
        progress.end = progress.settled
        progress.rounds_dropped += len(self._rounds) + self._rounds_flying
        self._ring.write_progress(progress)

    # --- records

    def _send(self) -> None:
        """Send the record that is under way, or else the next one, if there is any."""
        progress, ring = self.progress, self._ring
        if progress.end == progress.settled and not self._begin():
            return
        rows = ring.slice(progress.settled, progress.end)
        self._kept = np.flatnonzero(rows["share"] > 0)
        if not len(self._kept):
            self._settle()
            return
        try:
            batch = ring.batch(rows[self._kept], self._origin, progress.sequence)
            value = encode_batch(batch)
        except EventRefused as error:
            if not self._halve():
                self._limited_log.warning("a draft event cannot be written: %s", error)
                self._settle("malformed")
            return
        self._flying = self._produce(DRAFTS, value, self._landed, partition=progress.partition)
        self._doubtful |= self._flying

    def _begin(self) -> bool:
        """Say which rows come next, and draw which of them are told of; False for none."""
        progress, ring, first = self.progress, self._ring, self.progress.settled
        whole, self._seen = min(self._seen, first + REACH), int(ring.control[HEAD])
        if whole == first:
            return False
        if self._sampler.per_second and whole > self._drawn:
            places = ring.places(max(first, self._drawn), whole)
            shares = self._sampler.shares(ring.rows["request"][places].tolist())
            ring.rows["share"][places], self._drawn = shares, whole
        kept = np.flatnonzero(ring.rows["share"][ring.places(first, whole)] > 0)
        progress.end = first + int(kept[progress.limit]) if len(kept) > progress.limit else whole
        ring.write_progress(progress)
        return True

    def _halve(self) -> bool:
        """Leave half of the record's events to a later one; False where it is of one."""
        half = (len(self._kept) + 1) // 2
        if half == len(self._kept):
            return False
        self.progress.end = self.progress.settled + int(self._kept[half])
        self._ring.write_progress(self.progress)
        return True

    def _landed(self, error: KafkaError | None, message: object = None) -> None:
        """Take note of what became of the record under way, which may have to be sent again."""
        progress, self._flying = self.progress, False
        name = error.name() if error is not None else ""
        if error is not None and (error.code() < 0 or name in PASSING):
            if name == "_UNKNOWN_PARTITION":
                progress.partition = -1  # the topic was made anew: ask how many there are
            self._fail(error)
            return
        if name in TOO_LARGE and self._halve():
            progress.limit, self._doubtful = (len(self._kept) + 1) // 2, False
            return
        if error is not None:
            self._limited_log.warning("draft events were refused for good: %s", error)
        progress.sequence += 1
        self._settle(name.title().replace("_", ""))

    def _settle(self, refused: str = "") -> None:
        """Book what became of the rows under way: sent, or refused for that reason."""
        progress, events = self.progress, len(self._kept)
        shed = progress.end - progress.settled - events
        if refused:
            progress.refused[refused] = progress.refused.get(refused, 0) + events
        else:
            progress.sent += events
        if shed:
            progress.dropped["shed"] = progress.dropped.get("shed", 0) + shed
        self._doubtful = False
        self._ring.write_progress(progress)

    def _produce(
        self, topic: Topic, value: bytes, landed: Callable[..., None], **place: int
    ) -> bool:
        """The one place where a record is handed to the client: whether it took it. ``landed``
        hears what became of it, be it refused at once."""
        from confluent_kafka import KafkaException

        try:
            self._producer.produce(
                topic.name, value=value, key=self._origin.worker.encode(),
                headers=topic.headers, on_delivery=landed, **place,
            )  # fmt: skip
        except KafkaException as error:
            landed(error.args[0])
            return False
        return True

    def _send_beside(self) -> None:
        """Send what is no draft event: none waits for it, whatever becomes of it."""
        if self._status and not self._telling:
            status, self._status = self._status, b""
            self._telling = self._produce(STATUS, status, self._told)
        while self._rounds:
            self._rounds_flying += 1
            self._produce(TRIALS, self._rounds.popleft(), self._round_landed)

    def _told(self, error: KafkaError | None, message: object = None) -> None:
        self._telling = False

    def _round_landed(self, error: KafkaError | None, message: object = None) -> None:
        self._rounds_flying -= 1
        self.progress.rounds_sent += error is None
        self.progress.rounds_dropped += error is not None
        if error is not None:
            self._limited_log.warning("a round of a trial was not sent: %s", error)
        self._ring.write_progress(self.progress)

    # --- the broker

    def _connect(self) -> None:
        from confluent_kafka import KafkaException

        if self._producer is None:
            self._producer = open_sender(self._kafka, "telemetry", self._complain)
        if self.progress.partition < 0:
            found = self._producer.list_topics(DRAFTS.name, timeout=METADATA_S)
            topic = found.topics[DRAFTS.name]
            if topic.error is not None:
                raise KafkaException(topic.error)
            drawn = zlib.crc32(self._origin.life.encode())
            self.progress.partition = drawn % len(topic.partitions)
            self._ring.write_progress(self.progress)

    def _fail(self, error: object) -> None:
        self._retry_at = time.monotonic() + RETRY_S
        self._complain(error)

    def _complain(self, error: object) -> None:
        self._limited_log.warning(
            "Kafka at %s does not take what this worker has to tell (%s): serving goes on, "
            "events wait. Start the broker or set HVD_KAFKA_BOOTSTRAP_SERVERS.",
            self._kafka.bootstrap_servers, masked(str(error)),
        )  # fmt: skip
