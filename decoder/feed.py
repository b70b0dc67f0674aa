"""The policy feed: bundles come in by Kafka, keyed by scope and role, and ask for admission.

The thread lives as long as the worker: nothing that lies on the topic, and nothing that the broker
does, ends it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable
from typing import Any, Final

from decoder.admission import Admission
from decoder.contracts.bundle import TRIAL
from decoder.contracts.errors import PolicyRefused
from decoder.contracts.settings import KafkaSettings
from decoder.contracts.signature import is_genuine
from decoder.contracts.topics import POLICY, policy_role
from decoder.kafka.clients import AWAY
from decoder.kafka.compacted import Compacted

log = logging.getLogger(__name__)

POLL_S: Final = 0.25
RETRY_S = 1.0
CLOSE_TIMEOUT_S = 3.0
COMPLAIN_EVERY_S: Final = 60.0


_UNSIGNED: Final = PolicyRefused(
    "signature",
    "it is not signed under this worker's HVD_KAFKA_POLICY_KEY: give the learner the same key, or "
    "see who else writes to the topic",
)


class PolicyFeed:
    """The thread that reads the policy topic from its beginning; offers what is for this scope."""

    def __init__(self, kafka: KafkaSettings, scope: str, admission: Admission) -> None:
        self._scope, self._admission, self._secret = scope, admission, kafka.policy_key
        self._log = Compacted(kafka, POLICY, self._keep, answer_ms=0)
        self._found: list[Any] = []
        self._complained = -COMPLAIN_EVERY_S
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hvd-policy-feed", daemon=True)

    def start(self) -> None:
        """Begin to listen."""
        self._thread.start()

    def stop(self) -> None:
        """Stop listening, soon."""
        self._stopping.set()

    def close(self) -> None:
        """Stop listening, and wait for it."""
        self.stop()
        self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                if self._log.read():
                    found, self._found = self._found, []
                    self.take(found)
                self._stopping.wait(POLL_S)
            except Exception as error:  # noqa: BLE001 -- whatever it is, the next one must be heard of
                self._complain(error)
                self._log.close()
                self._found = []
                self._stopping.wait(RETRY_S)
        self._log.close()

    def _keep(self, record: Any) -> None:
        """Keep what is for this scope until all was read that lay there: before, the newest bundle
        is not known, and each older one would be put in force in its turn."""
        if policy_role(record.key, self._scope) is not None:
            self._found.append(record)

    def _complain(self, error: Exception) -> None:
        """The shipper says aloud that Kafka is away; anything else is said here."""
        away = isinstance(error, AWAY)
        if not away and time.monotonic() - self._complained >= COMPLAIN_EVERY_S:
            self._complained = time.monotonic()
            log.warning("the policy feed failed and goes on", exc_info=error)
        else:
            log.debug("policy feed: %r", error)

    def take(self, records: Iterable[Any]) -> None:
        """Offer the newest bundle of each key for this scope: no other is worth a swap.

        A trial ends with a record that has no value; what is served is not withdrawn so. Where a
        key is set, a record without its signature does nothing, and hides none that has it.
        """
        latest: dict[tuple[bytes, str], bytes | None] = {}
        for record in records:
            role = policy_role(record.key, self._scope)
            if role is None or (record.value is None and role != TRIAL):
                continue
            if is_genuine(self._secret, record):
                latest[record.key, role] = record.value
            else:
                self._admission.refuse(_UNSIGNED)
        for (_, role), value in latest.items():
            if value is None:
                self._admission.end_trial()
            else:
                self._admission.offer(value, role)
