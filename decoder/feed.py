"""The policy feed: reads bundles from Kafka, keyed by scope and role, and offers them to admission.

The thread runs as long as the worker: no record and no failure of the broker ends it.
"""

from __future__ import annotations

import logging
import threading
from typing import Any, Final

from decoder.admission import Admission
from decoder.contracts.bundle import ROLES, TRIAL
from decoder.contracts.errors import PolicyRefused
from decoder.contracts.settings import KafkaSettings
from decoder.contracts.signature import is_genuine
from decoder.contracts.topics import POLICY, policy_role
from decoder.kafka.clients import AWAY
from decoder.kafka.compacted import Compacted
from decoder.limited_log import LimitedLog

log = logging.getLogger(__name__)

POLL_S: Final = 0.25
RETRY_S = 1.0
CLOSE_TIMEOUT_S = 3.0

_UNSIGNED: Final = PolicyRefused(
    "signature",
    "it is not signed with this worker's HVD_KAFKA_POLICY_KEY: give the learner the same key, or "
    "find out who else writes to the topic",
)


class PolicyFeed:
    """Reads the policy topic from its beginning in a thread; offers records of this scope."""

    def __init__(self, kafka: KafkaSettings, scope: str, admission: Admission) -> None:
        self._scope, self._admission, self._secret = scope, admission, kafka.policy_key
        self._log = Compacted(kafka, POLICY, self._keep, answer_ms=0)
        self._latest: dict[tuple[bytes, str, int], bytes | None] = {}  # by key, role and partition
        self._trial_partition = -1  # where the trial that is held lies
        self._limited_log = LimitedLog()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hvd-policy-feed", daemon=True)

    def start(self) -> None:
        """Start reading."""
        self._thread.start()

    def stop(self) -> None:
        """Ask the thread to stop."""
        self._stopping.set()

    def close(self) -> None:
        """Stop the thread, and wait for it."""
        self.stop()
        self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                if self._log.read():
                    self._offer()
                self._stopping.wait(POLL_S)
            except Exception as error:  # noqa: BLE001 -- the next policy must still arrive
                if not isinstance(error, AWAY):  # the reader has logged that
                    self._limited_log.exception("the policy feed failed and continues")
                self._log.close()
                self._latest = {}
                self._stopping.wait(RETRY_S)
        self._log.close()

    def _keep(self, record: Any) -> None:
        """Keep the newest bundle of each key and partition until the end of the topic is reached;
        else older bundles would serve one after another at start. Across partitions, admission
        takes the highest publication.

        A record without a value (tombstone) ends a trial; it does not withdraw a champion. With a
        policy key set, an unsigned record has no effect, and hides no signed one.
        """
        role, value = policy_role(record.key, self._scope), record.value
        if role is None or (value is None and role != TRIAL):
            return
        if not is_genuine(self._secret, record):
            self._admission.refuse(_UNSIGNED)
        elif role not in ROLES:  # anyone may invent any number of such keys
            self._admission.offer(value, role)
        else:
            self._latest[record.key, role, record.partition] = value

    def _offer(self) -> None:
        latest, self._latest = self._latest, {}
        for (_, role, partition), value in latest.items():
            if value is not None:
                if self._admission.offer(value, role) and role == TRIAL:
                    self._trial_partition = partition
            elif partition == self._trial_partition:  # partitions have no order among them
                self._admission.end_trial()
