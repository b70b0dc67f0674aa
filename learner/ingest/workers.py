"""Whom the status topic knows: scopes that a worker serves, and what their holders say.

Anybody may write drafts of a scope that he made up: before a worker's status has named it, a
learner makes nothing of it.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import Any, Final

from decoder.contracts.errors import ContractError
from decoder.contracts.fields import NAME_LENGTH
from decoder.contracts.settings import KafkaSettings
from decoder.contracts.status import LearnerStatus, decode_status
from decoder.contracts.topics import STATUS
from decoder.kafka.clients import AWAY
from decoder.kafka.compacted import Compacted

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
        self._process = process
        self._log = Compacted(kafka, STATUS, self._take, last=MOST)
        self._scopes: OrderedDict[str, None] = OrderedDict()
        self._read_at = self._asked_at = 0.0
        self._begun = False

    def begun(self) -> bool:
        """Whether all that lay there at first has been taken in; looks, where it has not."""
        if not self._begun:
            self.read(PATIENCE_SECONDS)
        return self._begun

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
            self._begun = self._log.read(seconds) or self._begun
        except AWAY:  # the log has it
            self._read_at = time.monotonic() + RETRY_SECONDS

    def close(self) -> None:
        """Leave the broker."""
        self._log.close()

    def _take(self, record: Any) -> None:
        try:
            status = decode_status(record.value or b"")
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
