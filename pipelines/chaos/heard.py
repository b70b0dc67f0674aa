"""What the topics say while trouble goes on: what was made, counted and published."""

from __future__ import annotations

import hashlib
import threading
import time
from collections import defaultdict
from dataclasses import dataclass
from typing import Any, Final

from decoder.contracts.bundle import unpack
from decoder.contracts.errors import ContractError
from decoder.contracts.events import decode_batch
from decoder.contracts.settings import KafkaSettings
from decoder.contracts.status import LearnerStatus, WorkerStatus, decode_status
from decoder.contracts.topics import DRAFTS, POLICY, STATUS
from decoder.kafka.clients import AWAY, close, fetch, open_consumer

RETRY_S: Final = 0.5
IDLE_S: Final = 0.2
IN_HAND_S: Final = 0.5
"""What was fetched before may come this much later."""


@dataclass(frozen=True)
class Account:
    """Of the events of a worker's life: ``lost`` are those that it says were dropped, refused or
    left, ``missing`` those that it made and nobody saw on the topic.
    """

    made: int = 0
    lost: int = 0
    in_doubt: int = 0
    waiting: int = 0
    missing: int = 0
    unaccounted: int = 0

    def since(self, before: Account) -> Account:
        """What came to it; what waits is of now."""
        return Account(
            self.made - before.made, self.lost - before.lost, self.in_doubt - before.in_doubt,
            self.waiting, self.missing - before.missing, self.unaccounted,
        )  # fmt: skip

    @property
    def adds_up(self) -> bool:
        """Whether what is missing is what was counted; what is in doubt may be there or not."""
        return self.lost <= self.missing <= self.lost + max(self.in_doubt, 0)


class Heard:
    """Reads the topics in a thread of its own, from their beginning after each loss of the broker.

    ``numbers`` are the events of each life that were seen on the topic, ``faults`` what must never
    be: a publication below an earlier one of its key, or another under the same number.
    """

    def __init__(self, kafka: KafkaSettings) -> None:
        self.workers: list[WorkerStatus] = []
        self.learners: list[LearnerStatus] = []
        self.numbers: defaultdict[str, set[int]] = defaultdict(set)
        self.told: dict[str, WorkerStatus] = {}  # the last status of each life
        self.counted = 0
        self.published: dict[bytes, dict[int, str]] = {}
        self.faults: list[str] = []
        self.spoke: dict[str, float] = {}  # by process, when it said something new (monotonic)
        self._known: set[tuple[str, float]] = set()
        self._in_force: dict[tuple[str, str], int] = {}
        self._kafka = kafka
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Heard:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join(10.0)

    @property
    def made(self) -> int:
        """Events that workers say they made, or that are there: the greater of both, a life."""
        lives = {*self.told, *self.numbers}
        return sum(
            max(
                self.told[life].events_made if life in self.told else 0,
                max(self.numbers.get(life) or {-1}) + 1,
            )
            for life in lives
        )

    @property
    def distinct(self) -> int:
        """Events seen on the topic, each once."""
        return sum(map(len, self.numbers.values()))

    def since(self, moment: float, ending: str = "") -> bool:
        """Whether a process whose name ends so has said something new well after ``moment``, of the
        monotonic clock."""
        return any(
            at > moment + IN_HAND_S and name.endswith(ending)
            for name, at in dict(self.spoke).items()
        )

    def last(self, ending: str) -> LearnerStatus | None:
        """What the learner whose name ends so said last."""
        return next(
            (said for said in reversed(self.learners) if said.process.endswith(ending)), None
        )

    def account(self, life: str) -> Account:
        """By the last status of ``life``, and what was seen of it on the topic."""
        said = self.told.get(life)
        if said is None:
            return Account()
        lost = said.events_dropped + said.events_failed + sum(said.events_refused.values())
        return Account(
            said.events_made, lost, said.events_in_doubt, said.queue_depth + said.events_spilled,
            said.events_made - len(self.numbers[life]), said.events_unaccounted,
        )  # fmt: skip

    def _run(self) -> None:
        consumer: Any = None
        while not self._stopping.is_set():
            try:
                if consumer is None:
                    consumer = open_consumer(self._kafka, "chaos")
                    consumer.subscribe([DRAFTS.name, POLICY.name, STATUS.name])
                records = fetch(consumer)
                for record in records:
                    self._take(record)
                if not records:
                    self._stopping.wait(IDLE_S)
            except AWAY:
                close(consumer)
                consumer = None
                self._stopping.wait(RETRY_S)
        close(consumer)

    def _take(self, record: Any) -> None:
        try:
            if record.topic == DRAFTS.name:
                batch = decode_batch(record.value)
                self.numbers[batch.origin.life].update(event.number for event in batch.events)
            elif record.topic == STATUS.name:
                self._status(decode_status(record.value))
            elif record.value is not None:
                self._publication(record.key, record.value)
        except ContractError as error:
            self.faults.append(f"a record of {record.topic} keeps no contract: {error}")

    def _status(self, status: WorkerStatus | LearnerStatus) -> None:
        said = status.process, status.time
        if said in self._known:
            return  # read again, from the beginning
        self._known.add(said)
        self.spoke[status.process] = time.monotonic()
        if isinstance(status, LearnerStatus):
            self.learners.append(status)
            self.counted = max(self.counted, status.events_consumed)
            return
        self.told[status.life] = status
        self.workers.append(status)
        place = status.life, status.policy_role
        if status.publication < self._in_force.get(place, 0):
            self.faults.append(f"a worker went back to publication {status.publication}")
        self._in_force[place] = status.publication

    def _publication(self, key: bytes, value: bytes) -> None:
        policy, _ = unpack(value)
        known = self.published.setdefault(key, {})
        digest, number = hashlib.sha256(value).hexdigest(), policy.publication
        if number in known:
            if known[number] != digest:
                self.faults.append(f"publication {number} of {key!r} was given twice")
        elif known and number < max(known):
            self.faults.append(f"publication {number} of {key!r} after {max(known)}")
        known[number] = digest
