"""Reads the status topic: scopes that workers serve, and sampling rates that learners report.

Anybody may write drafts of an invented scope. A learner ignores them until the status of a worker
has named the scope.
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
from learner.ingest.sampling import MIN_RATE

READ_SECONDS: Final = 1.0
RETRY_SECONDS: Final = 5.0
PATIENCE_SECONDS: Final = 1.0  # time to read the topic to its end for an unknown scope
GLANCE_SECONDS: Final = 0.1  # longest wait for that in one call
MAX_RECORDS: Final = 2_000
"""Of one read, and of those before this process started. A worker reports once a second."""
MAX_SCOPES: Final = 1_000
READS: Final = 5
"""The largest rate in so many reads counts: a holder has reported within them, so a forged status
cannot reduce what is learned from."""


class StatusReader:
    """Reads the last records of the status topic, then new ones, on a thread.

    ``sample_rates`` are those that other learners reported lately for scopes they hold;
    ``returned`` has the publications from which workers returned to the former policy, by scope.
    Both are replaced, never changed. ``ready``: the records that existed at first have been read.
    """

    def __init__(self, kafka: KafkaSettings, process: str = "") -> None:
        """``process``: whose statuses are ignored, as our own."""
        self.ready = False
        self.sample_rates: Mapping[str, float] = {}
        self.returned: Mapping[str, int] = {}
        self._process = process
        self._topic = Compacted(kafka, STATUS, self._receive, last=MAX_RECORDS)
        self._background = Background("statuses")
        self._scopes: OrderedDict[str, None] = OrderedDict()
        self._reads: deque[dict[str, float]] = deque([{}], maxlen=READS)
        self._read_at = self._lookup_at = 0.0
        self._lookup_since: float | None = None

    def is_known(self, scope: str) -> bool | None:
        """Whether a worker has named ``scope``; None while the topic is read to find out, which
        happens once a second."""
        now = time.monotonic()
        if scope in self._scopes:
            return True
        if self._lookup_since is None:
            if now < self._lookup_at:
                return False
            self._background.submit(partial(self._read, PATIENCE_SECONDS))
            self._lookup_since = now
        is_done = self._background.idle(GLANCE_SECONDS)
        if not is_done and now < self._lookup_since + 2.0 * PATIENCE_SECONDS:
            return None
        self._lookup_since = None
        self._lookup_at = max(now + READ_SECONDS, self._read_at)
        return scope in self._scopes

    def read(self) -> None:
        """Start to read new records, once a second."""
        if time.monotonic() >= self._read_at and self._background.idle():
            self._read_at = time.monotonic() + READ_SECONDS
            self._background.submit(partial(self._read, 0.0))

    def close(self) -> None:
        """Disconnect."""
        if self._background.close():
            self._topic.close()

    def _read(self, seconds: float) -> None:
        self._reads.append({})
        try:
            self.ready = self._topic.read(seconds) or self.ready
        except AWAY:  # already logged
            self._read_at = time.monotonic() + RETRY_SECONDS
        rates: dict[str, float] = {}
        for read in self._reads:
            rates |= {scope: max(rate, rates.get(scope, 0.0)) for scope, rate in read.items()}
        self.sample_rates = rates

    def _receive(self, record: Any) -> None:
        try:
            status = decode_status(record.value or b"")
        except (ContractError, RecursionError):
            return
        if len(status.scope) > NAME_LENGTH:
            return
        if isinstance(status, LearnerStatus):
            if status.holds_lease and status.process != self._process:
                rates = self._reads[-1]
                rates[status.scope] = max(status.share, rates.get(status.scope, MIN_RATE))
            return
        self._scopes[status.scope] = None
        self._scopes.move_to_end(status.scope)
        if len(self._scopes) > MAX_SCOPES:
            self._scopes.popitem(last=False)
        if status.returned_from:
            kept = {s: n for s, n in self.returned.items() if s in self._scopes}
            self.returned = kept | {status.scope: status.returned_from}
