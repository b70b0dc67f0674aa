"""The policy feed: bundles come in by Kafka, keyed by scope and role, and ask for admission.

The thread lives as long as the worker: nothing that lies on the topic, and nothing that the broker
does, ends it.
"""

from __future__ import annotations

import logging
import threading
from typing import Any, Final

from decoder.admission import Admission
from decoder.complaints import Complaints
from decoder.contracts.bundle import ROLES, TRIAL
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
        self._latest: dict[tuple[bytes, str, int], bytes | None] = {}  # by key, role and partition
        self._trial_partition = -1  # where the trial that is held lies
        self._complaints = Complaints()
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
                    self._offer()
                self._stopping.wait(POLL_S)
            except Exception as error:  # noqa: BLE001 -- whatever it is, the next one must be heard of
                if not isinstance(error, AWAY):  # of that the reader has spoken
                    self._complaints.exception("the policy feed failed and goes on")
                self._log.close()
                self._latest = {}
                self._stopping.wait(RETRY_S)
        self._log.close()

    def _keep(self, record: Any) -> None:
        """Keep the newest bundle of each key and partition for this scope until all was read that
        lay there: before, it is not known, and each older one would be put in force in its turn. Of
        several partitions admission takes the highest publication.

        A trial ends with a record that has no value; what is served is not withdrawn so. Where a
        key is set, a record without its signature does nothing, and hides none that has it.
        """
        role, value = policy_role(record.key, self._scope), record.value
        if role is None or (value is None and role != TRIAL):
            return
        if not is_genuine(self._secret, record):
            self._admission.refuse(_UNSIGNED)
        elif role not in ROLES:  # anybody may make such keys up, and any number of them
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
