"""Whom the status topic knows: scopes that a worker serves, and what their holders report.

Anybody may write drafts of a scope that he made up: before a worker's status has named it, a
learner makes nothing of it.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from decoder.contracts.errors import ContractError
from decoder.contracts.fields import NAME_LENGTH
from decoder.contracts.settings import KafkaSettings
from decoder.contracts.status import LearnerStatus, decode_status
from decoder.contracts.topics import STATUS
from decoder.kafka.clients import AWAY
from decoder.kafka.compacted import Compacted
from learner.background import Background
from learner.ingest.shares import LEAST

READ_SECONDS: Final = 1.0
RETRY_SECONDS: Final = 5.0
PATIENCE_SECONDS: Final = 1.0
"""For what lies there already, when a scope is asked about that nobody has named."""
GLANCE_SECONDS: Final = 0.1
"""For the same before the caller does something else."""
MOST: Final = 2_000
"""Records of one reading, and of before this process: a worker reports its status once a second."""
SCOPES: Final = 1_000
"""Remembered, the ones named last."""
READINGS: Final = 5
"""Of whose shares the largest counts: a scope's holder has reported within them, so that who calls
himself its holder, too, can make nobody learn from less."""


class Workers:
    """Reads the status topic on a thread of its own: its last records, then new ones.

    ``shares`` are those that other learners gave the scopes they hold, as far as they were reported
    lately; ``returned`` has the publications that workers went back from to the policy before, by
    scope. Both are replaced and never changed. ``begun`` says whether all that lay there at first
    has been read.
    """

    def __init__(self, kafka: KafkaSettings, process: str = "") -> None:
        """``process``: whose statuses are our own."""
        self.begun = False
        self.shares: Mapping[str, float] = {}
        self.returned: Mapping[str, int] = {}
        self._process = process
        self._log = Compacted(kafka, STATUS, self._take, last=MOST)
        self._background = Background("statuses")
        self._scopes: OrderedDict[str, None] = OrderedDict()
        self._readings: deque[dict[str, float]] = deque([{}], maxlen=READINGS)
        self._read_at = self._asked_at = 0.0
        self._looks_since: float | None = None

    def knows(self, scope: str) -> bool | None:
        """Whether a worker has named ``scope``; None while the topic is read to its end to find
        out, which is done once a second and for a moment."""
        now = time.monotonic()
        if scope in self._scopes:
            return True
        if self._looks_since is None:
            if now < self._asked_at:
                return False
            self._background.offer(partial(self._read, PATIENCE_SECONDS))
            self._looks_since = now
        is_done = self._background.idle(GLANCE_SECONDS)
        if not is_done and now < self._looks_since + 2.0 * PATIENCE_SECONDS:
            return None
        self._looks_since = None
        self._asked_at = max(now + READ_SECONDS, self._read_at)
        return scope in self._scopes

    def read(self) -> None:
        """Have what has come read, once a second."""
        if time.monotonic() >= self._read_at and self._background.idle():
            self._read_at = time.monotonic() + READ_SECONDS
            self._background.offer(partial(self._read, 0.0))

    def close(self) -> None:
        """Leave the broker."""
        if self._background.close():
            self._log.close()

    def _read(self, seconds: float) -> None:
        """Take in what has come, and go on for so long until all that lies there is read."""
        self._readings.append({})
        try:
            self.begun = self._log.read(seconds) or self.begun
        except AWAY:  # the log has it
            self._read_at = time.monotonic() + RETRY_SECONDS
        shares: dict[str, float] = {}
        for reading in self._readings:
            shares |= {s: max(share, shares.get(s, 0.0)) for s, share in reading.items()}
        self.shares = shares

    def _take(self, record: Any) -> None:
        try:
            status = decode_status(record.value or b"")
        except (ContractError, RecursionError):
            return
        if len(status.scope) > NAME_LENGTH:
            return
        if isinstance(status, LearnerStatus):
            if status.holds_lease and status.process != self._process:
                reading = self._readings[-1]
                reading[status.scope] = max(status.share, reading.get(status.scope, LEAST))
            return
        self._scopes[status.scope] = None
        self._scopes.move_to_end(status.scope)
        if len(self._scopes) > SCOPES:
            self._scopes.popitem(last=False)
        if status.returned_from:
            kept = {s: n for s, n in self.returned.items() if s in self._scopes}
            self.returned = kept | {status.scope: status.returned_from}
