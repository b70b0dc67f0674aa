"""Encodes a ring's rows as records and sends them to Kafka, in the exporter process.

One record is in flight at a time. Its row range is published, then it is encoded and sent; once it
is acknowledged, or refused for good, its rows are settled. When an exporter dies before that, the
next one sends the same record with the same number, and readers drop the duplicate. All records of
a life go to one partition, so they are read in order.
"""

from __future__ import annotations

import logging
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

log = logging.getLogger(__name__)

BATCH: Final = 256
"""Most events of a record: larger records amortise nothing more."""
MAX_SCAN: Final = 16 * BATCH
"""Most rows scanned for one record, since head sampling may drop most of them."""
POLL_S: Final = 0.05
"""Longest wait for an acknowledgement before the parent's messages are read."""
RETRY_S: Final = 1.0
METADATA_S: Final = 2.0
MAX_ROUNDS: Final = 256
"""Most rounds of trials in flight."""
TOO_LARGE: Final = ("MSG_SIZE_TOO_LARGE", "RECORD_LIST_TOO_LARGE")
"""Broker errors that a smaller record may avoid."""
RETRIABLE: Final = ("UNKNOWN_TOPIC_OR_PART", "SASL_AUTHENTICATION_FAILED")
"""Broker errors that librdkafka does not retry and that an operator can correct."""


class Exporter:
    """Sends the events in ``ring``, in one thread; ``progress`` counts them by outcome."""

    def __init__(
        self, kafka: KafkaSettings, origin: Origin, ring: Ring, sampler: HeadSampler | None = None
    ) -> None:
        """Resume where the exporter before ended."""
        self._kafka, self._origin, self._ring = kafka, origin, ring
        self._sampler = sampler or HeadSampler(0.0)
        self.progress = ring.progress()
        self.progress.limit = self.progress.limit or BATCH
        ring.write_progress(self.progress)  # completes a write in which the one before died
        # Head of the ring one turn ago: rows before it are visible on every processor by now.
        self._seen = self.progress.end
        self._drawn = self.progress.end  # rows before this one are sampled
        # Sampled rows among those in flight. An exporter that died may have sent them.
        self._sampled = np.arange(self.progress.end - self.progress.settled)
        self._flying, self._in_doubt = False, len(self._sampled) > 0
        self._producer: Any = None
        self._retry_at = 0.0
        self._status, self._status_flying = b"", False
        self._rounds: deque[bytes] = deque()
        self._rounds_flying = 0
        self._limited_log = LimitedLog()

    @property
    def busy(self) -> bool:
        """Whether there is work to do now, or an acknowledgement to wait for."""
        due = self.progress.end > self.progress.settled or len(self._ring) >= self.progress.limit
        return self._flying or (due and time.monotonic() >= self._retry_at)

    @property
    def idle(self) -> bool:
        """Whether everything is sent, or will never be."""
        pending = self._status or self._status_flying or self._rounds or self._rounds_flying
        return not pending and not len(self._ring)

    def enqueue(self, kind: bytes, line: bytes) -> None:
        """Queue a status, which replaces one not sent yet, or a round of a trial."""
        if kind == b"S":
            self._status = line
        elif kind == b"R" and len(self._rounds) + self._rounds_flying < MAX_ROUNDS:
            self._rounds.append(line)
        else:
            self.progress.rounds_dropped += kind == b"R"

    def turn(self) -> None:
        """Send all that is due, and process acknowledgements. Never raises."""
        self._ring.control[BEAT] += 1
        try:
            if time.monotonic() >= self._retry_at:
                self._connect()
                if not self._flying:
                    self._send()
                self._send_reports()
            if self._producer is not None:
                self._producer.poll(POLL_S if self._flying else 0.0)
        except Exception as error:  # noqa: BLE001 -- the next turn tries again
            self._fail(error)

    def close(self) -> None:
        """Count events that are not settled as failed, or in doubt where they may be sent."""
        progress = self.progress
        progress.in_doubt += len(self._sampled) if self._in_doubt else 0
        progress.failed += int(self._ring.control[HEAD]) - progress.settled
        progress.end = progress.settled
        progress.rounds_dropped += len(self._rounds) + self._rounds_flying
        self._ring.write_progress(progress)
        if progress.failed or progress.in_doubt:
            log.error("%d draft events were not sent to Kafka before the worker closed, "
                      "%d may not have been", progress.failed, progress.in_doubt)  # fmt: skip

    def _send(self) -> None:
        """Send the record in flight again, or else the next one, if there is any."""
        progress, ring = self.progress, self._ring
        if progress.end == progress.settled and not self._begin():
            return
        rows = ring.slice(progress.settled, progress.end)
        self._sampled = np.flatnonzero(rows["share"] > 0)
        if not len(self._sampled):
            self._settle()
            return
        try:
            value = encode_batch(ring.batch(rows[self._sampled], self._origin, progress.sequence))
        except EventRefused as error:
            if not self._halve():
                self._limited_log.warning("a draft event cannot be encoded: %s", error)
                self._settle("malformed")
            return
        self._flying = self._produce(DRAFTS, value, self._delivered, partition=progress.partition)
        self._in_doubt |= self._flying

    def _begin(self) -> bool:
        """Sample the next rows, and publish which the next record has; False for none."""
        progress, ring, first = self.progress, self._ring, self.progress.settled
        end, self._seen = min(self._seen, first + MAX_SCAN), int(ring.control[HEAD])
        if end == first:
            return False
        if self._sampler.per_second and end > self._drawn:
            indices = ring.indices(max(first, self._drawn), end)
            shares = self._sampler.shares(ring.rows["request"][indices].tolist())
            ring.rows["share"][indices], self._drawn = shares, end
        kept = np.flatnonzero(ring.rows["share"][ring.indices(first, end)] > 0)
        progress.end = first + int(kept[progress.limit]) if len(kept) > progress.limit else end
        ring.write_progress(progress)
        return True

    def _halve(self) -> bool:
        """Leave half of the record's events to a later one; False for a single event."""
        half = (len(self._sampled) + 1) // 2
        if half == len(self._sampled):
            return False
        self.progress.end = self.progress.settled + int(self._sampled[half])
        self._ring.write_progress(self.progress)
        return True

    def _delivered(self, error: KafkaError | None, message: object = None) -> None:
        """Process the delivery report of the record in flight; some errors send it again."""
        progress, self._flying = self.progress, False
        name = error.name() if error is not None else ""
        if error is not None and (error.code() < 0 or name in RETRIABLE):
            if name == "_UNKNOWN_PARTITION":
                progress.partition = -1  # the topic was recreated: ask for its partitions again
            self._fail(error)
            return
        if name in TOO_LARGE and self._halve():
            progress.limit, self._in_doubt = (len(self._sampled) + 1) // 2, False
            return
        if error is not None:
            self._limited_log.warning("draft events were refused for good: %s", error)
        progress.sequence += 1
        self._settle(name.title().replace("_", ""))

    def _settle(self, refused: str = "") -> None:
        """Count the rows in flight as sent, or as refused for that reason, and free them."""
        progress, events = self.progress, len(self._sampled)
        sampled_out = progress.end - progress.settled - events
        if refused:
            progress.refused[refused] = progress.refused.get(refused, 0) + events
        else:
            progress.sent += events
        if sampled_out:
            progress.dropped["shed"] = progress.dropped.get("shed", 0) + sampled_out
        self._in_doubt = False
        self._ring.write_progress(progress)

    def _produce(
        self, topic: Topic, value: bytes, delivered: Callable[..., None], **partition: int
    ) -> bool:
        """Hand a record to the client; False where it refuses at once. ``delivered`` is called
        with the outcome either way."""
        from confluent_kafka import KafkaException

        try:
            self._producer.produce(
                topic.name, value=value, key=self._origin.worker.encode(),
                headers=topic.headers, on_delivery=delivered, **partition,
            )  # fmt: skip
        except KafkaException as error:
            delivered(error.args[0])
            return False
        return True

    def _send_reports(self) -> None:
        """Send status and rounds; draft events never wait for them."""
        if self._status and not self._status_flying:
            status, self._status = self._status, b""
            self._status_flying = self._produce(STATUS, status, self._status_delivered)
        while self._rounds:
            self._rounds_flying += 1
            self._produce(TRIALS, self._rounds.popleft(), self._round_delivered)

    def _status_delivered(self, error: KafkaError | None, message: object = None) -> None:
        self._status_flying = False

    def _round_delivered(self, error: KafkaError | None, message: object = None) -> None:
        self._rounds_flying -= 1
        self.progress.rounds_sent += error is None
        self.progress.rounds_dropped += error is not None
        if error is not None:
            self._limited_log.warning("a round of a trial was not sent: %s", error)
        self._ring.write_progress(self.progress)

    def _connect(self) -> None:
        from confluent_kafka import KafkaException

        if self._producer is None:
            self._producer = open_sender(self._kafka, "telemetry", self._on_error)
        if self.progress.partition < 0:
            metadata = self._producer.list_topics(DRAFTS.name, timeout=METADATA_S)
            topic = metadata.topics[DRAFTS.name]
            if topic.error is not None:
                raise KafkaException(topic.error)
            hashed = zlib.crc32(self._origin.life.encode())
            self.progress.partition = hashed % len(topic.partitions)
            self._ring.write_progress(self.progress)

    def _fail(self, error: object) -> None:
        self._retry_at = time.monotonic() + RETRY_S
        self._on_error(error)

    def _on_error(self, error: object) -> None:
        self._limited_log.warning(
            "Kafka at %s does not accept this worker's telemetry (%s): serving goes on, events "
            "wait. Start the broker or set HVD_KAFKA_BOOTSTRAP_SERVERS.",
            self._kafka.bootstrap_servers, masked(str(error)),
        )  # fmt: skip
