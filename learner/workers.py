"""Whom the status topic knows: scopes that a worker serves, and what their holders say.

Anybody may write drafts of a scope that he made up: before a worker's status has named it, a
learner makes nothing of it.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import Any, Final

from decoder.complaints import Complaints
from decoder.contracts.errors import ContractError
from decoder.contracts.events import NAME_LENGTH
from decoder.contracts.settings import KafkaSettings
from decoder.contracts.status import LearnerStatus, decode_status
from decoder.contracts.topics import STATUS
from decoder.kafka.clients import ANSWER_MS, AWAY, close, fetch, offsets, open_consumer, places_of
from decoder.kafka.faults import tell

READ_SECONDS: Final = 1.0
RETRY_SECONDS: Final = 5.0
PATIENCE_SECONDS: Final = 1.0
"""For what lies there already, when a scope is asked about that nobody has named."""
MOST: Final = 2_000
"""Records of one reading, and of before this process: a worker says its status once a second."""
SCOPES: Final = 1_000
"""Remembered, the ones named last."""


class Workers:
    """Reads the status topic: its last records, then what comes. Never raises.

    ``shares`` are those that other learners gave the scopes they hold.
    """

    def __init__(self, kafka: KafkaSettings, process: str = "") -> None:
        """``process``: whose statuses are our own."""
        self.shares: dict[str, float] = {}
        self._kafka, self._process = kafka, process
        self._consumer: Any = None
        self._scopes: OrderedDict[str, None] = OrderedDict()
        self._read_at = self._asked_at = 0.0
        self._complaints = Complaints()

    def know(self, scope: str) -> bool:
        """Whether a worker has named ``scope``; looks, once a second, to the end of the topic."""
        if scope not in self._scopes and time.monotonic() >= self._asked_at:
            self._read_at = 0.0
            self.read(PATIENCE_SECONDS)
            self._asked_at = max(time.monotonic() + READ_SECONDS, self._read_at)
        return scope in self._scopes

    def read(self, seconds: float = 0.0) -> None:
        """Take in what has come, and go on for so long until all that lay there is read."""
        if time.monotonic() < self._read_at:
            return
        self._read_at = time.monotonic() + READ_SECONDS
        self.shares.clear()
        try:
            if self._consumer is None:
                self._connect()
            places = self._consumer.assignment()
            ends = offsets(self._consumer.end_offsets, places) if seconds else {}
            deadline = time.monotonic() + seconds
            while True:
                for record in fetch(self._consumer, ANSWER_MS):
                    self._take(record.value or b"")
                at = {place: self._consumer.position(place) or 0 for place in ends}
                if time.monotonic() >= deadline or all(at[p] >= end for p, end in ends.items()):
                    return
        except AWAY as error:
            tell(self._complaints, STATUS.name, "read", error)
            self.close()
            self._read_at = time.monotonic() + RETRY_SECONDS

    def close(self) -> None:
        """Leave the broker."""
        close(self._consumer)
        self._consumer = None

    def _connect(self) -> None:
        self._consumer = open_consumer(
            self._kafka, "workers", request_timeout_ms=5_000, max_poll_records=MOST
        )
        places = places_of(self._consumer, STATUS.name)
        self._consumer.assign(places)
        begins = offsets(self._consumer.beginning_offsets, places)
        for place, end in offsets(self._consumer.end_offsets, places).items():
            self._consumer.seek(place, max(begins[place], end - MOST // len(places)))

    def _take(self, value: bytes) -> None:
        try:
            status = decode_status(value)
        except (ContractError, RecursionError):
            return
        if len(status.scope) > NAME_LENGTH:
            return
        if isinstance(status, LearnerStatus):
            if status.holds_lease and status.process != self._process:
                self.shares[status.scope] = status.share
            return
        self._scopes[status.scope] = None
        self._scopes.move_to_end(status.scope)
        if len(self._scopes) > SCOPES:
            self._scopes.popitem(last=False)
