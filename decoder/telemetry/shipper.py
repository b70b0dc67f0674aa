"""The thread that carries events and status from a worker to Kafka.

At least once: a batch stays in hand until the broker has acknowledged it, and readers drop
duplicates by event id. While the broker is away the queue fills; only a full queue loses events,
and those are counted.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from decoder.contracts.events import DraftEvent, encode_batch
from decoder.contracts.settings import KafkaSettings
from decoder.contracts.status import WorkerStatus
from decoder.contracts.topics import DRAFTS, STATUS
from decoder.telemetry.queue import EventQueue

log = logging.getLogger(__name__)

BATCH = 256
"""Events a record: past this the record's size no longer amortises anything."""
LINGER_S = 0.25
"""Longest time an event waits for company; what a dashboard sees lags by this much."""
STATUS_EVERY_S = 1.0
RETRY_S = 1.0
ACK_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 5.0


class Shipper:
    """Sends what is in ``queue`` and, once a second, what ``status`` says.

    ``status`` builds the worker's status record; it runs in this thread.
    """

    def __init__(
        self,
        kafka: KafkaSettings,
        queue: EventQueue,
        scope: str,
        worker: str,
        status: Callable[[], WorkerStatus],
    ) -> None:
        self._kafka, self._queue, self._status = kafka, queue, status
        self._scope, self._worker = scope, worker
        self._stopping = threading.Event()
        self._in_hand: list[DraftEvent] = []
        self._thread = threading.Thread(target=self._run, name="hvd-telemetry", daemon=True)
        self.sent = 0
        self.failed = 0

    def start(self) -> None:
        """Begin to send."""
        self._thread.start()

    def close(self) -> None:
        """Send what is left, for at most ``CLOSE_TIMEOUT_S``; what remains is counted as failed."""
        self._stopping.set()
        self._thread.join(CLOSE_TIMEOUT_S)
        left = len(self._in_hand) + len(self._queue)
        if left:
            self.failed += left
            log.error("%d draft events could not be sent to Kafka before the worker closed", left)

    def _connect(self) -> Any:
        from kafka import KafkaProducer
        from kafka.errors import KafkaError

        warned = False
        while not self._stopping.is_set():
            try:
                return KafkaProducer(
                    acks="all",
                    compression_type="gzip",
                    enable_idempotence=False,  # one record in flight, and readers deduplicate
                    max_block_ms=int(ACK_TIMEOUT_S * 1000),
                    **self._kafka.client_options(),
                )
            except (KafkaError, OSError, ValueError) as error:
                if not warned:
                    log.warning(
                        "Kafka at %s does not answer (%s): serving goes on, events wait in memory. "
                        "Start the broker or set HVD_KAFKA_BOOTSTRAP_SERVERS.",
                        self._kafka.bootstrap_servers, error,
                    )  # fmt: skip
                    warned = True
                self._stopping.wait(RETRY_S)
        return None

    def _run(self) -> None:
        producer = self._connect()
        if producer is None:
            return
        said = 0.0
        while True:
            stopping = self._stopping.is_set()
            sent = self._send_batch(producer)
            if time.monotonic() - said >= STATUS_EVERY_S or stopping:
                said = time.monotonic()
                self._send_status(producer)
            if stopping and not self._queue and not self._in_hand:
                break
            if sent < BATCH:
                self._stopping.wait(LINGER_S if not stopping else 0.01)
        producer.close(timeout=1.0)

    def _send_batch(self, producer: Any) -> int:
        from kafka.errors import KafkaError

        if not self._in_hand:
            self._in_hand = self._queue.take(BATCH)
        if not self._in_hand:
            return 0
        value = encode_batch(self._in_hand, self._scope, self._worker)
        try:
            producer.send(DRAFTS.name, key=self._worker.encode(), value=value).get(ACK_TIMEOUT_S)
        except (KafkaError, OSError) as error:
            log.warning("sending %d draft events failed, will retry: %s", len(self._in_hand), error)
            self._stopping.wait(RETRY_S)
            return 0
        count = len(self._in_hand)
        self.sent += count
        self._in_hand = []
        return count

    def _send_status(self, producer: Any) -> None:
        from kafka.errors import KafkaError

        value = self._status().model_dump_json().encode()
        try:
            producer.send(STATUS.name, key=self._worker.encode(), value=value)
        except (KafkaError, OSError) as error:
            log.debug("status not sent: %s", error)  # cumulative: the next one says it all
