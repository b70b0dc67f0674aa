"""Who could play a trial: workers that say, on the status topic, how many rounds they have made.

A worker of before there were trials says nothing of rounds. Of one that does and sends none, the
policy on trial was refused, or failed there: that must not pass for a service without trials.
"""

from __future__ import annotations

import time
from typing import Any, Final

from decoder.complaints import Complaints
from decoder.contracts.errors import ContractError
from decoder.contracts.settings import KafkaSettings
from decoder.contracts.status import WorkerStatus, decode_status
from decoder.contracts.topics import STATUS
from decoder.kafka.clients import AWAY, GLANCE_MS, close, fetch, open_consumer, places_of
from decoder.kafka.faults import tell

READ_SECONDS: Final = 1.0
RETRY_SECONDS: Final = 15.0
MOST: Final = 2_000
"""Records of one reading: a worker says its status once a second; what is beyond may be missed."""


class Players:
    """Reads the status topic from now on."""

    def __init__(self, kafka: KafkaSettings) -> None:
        self._kafka = kafka
        self._consumer: Any = None
        self._read_at = 0.0
        self._complaints = Complaints()

    def read(self) -> set[str]:
        """Scopes of which a worker that plays has spoken since the last call; never raises."""
        if time.monotonic() < self._read_at:
            return set()
        self._read_at = time.monotonic() + READ_SECONDS
        try:
            if self._consumer is None:
                self._connect()
            records = fetch(self._consumer, GLANCE_MS)
        except AWAY as error:
            tell(self._complaints, STATUS.name, "read", error)
            self.close()
            self._read_at = time.monotonic() + RETRY_SECONDS
            return set()
        scopes = {_scope(record.value or b"") for record in records}
        return scopes - {""}

    def close(self) -> None:
        """Leave the broker."""
        close(self._consumer)
        self._consumer = None

    def _connect(self) -> None:
        self._consumer = open_consumer(
            self._kafka, "players", request_timeout_ms=5_000, max_poll_records=MOST
        )
        places = places_of(self._consumer, STATUS.name)
        self._consumer.assign(places)
        self._consumer.seek_to_end(*places)


def _scope(value: bytes) -> str:
    """Of a worker that plays; "" of whatever else."""
    try:
        status = decode_status(value)
    except (ContractError, RecursionError):
        return ""
    plays = isinstance(status, WorkerStatus) and "rounds_made" in status.model_fields_set
    return status.scope if plays else ""
