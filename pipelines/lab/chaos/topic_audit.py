"""What the topics say while parts die, and what of it must never be."""

from __future__ import annotations

import hashlib
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from decoder.contracts.bundle import Policy
from decoder.contracts.events import EventBatch
from decoder.contracts.status import LearnerStatus, WorkerStatus
from decoder.policy.probes import to_bytes
from pipelines.watch.ledger import Ledger

IN_HAND_S = 0.5  # what was fetched before may come so much later


def adds_up(account: Mapping[str, int]) -> bool:
    """Whether made = delivered + in doubt + waiting + lost; what is in doubt may be delivered."""
    missing = account["made"] - account["delivered"] - account["waiting"] - account["lost"]
    return 0 <= missing <= max(account["in doubt"], 0)


@dataclass
class TopicAudit(Ledger):
    """A ledger that may be told the same again, as when a broker comes back.

    ``numbers`` are the events of each worker's life that were seen, ``made`` how many there are
    at least, ``last`` its last status, ``spoke`` when a process said something new (monotonic
    clock); ``excused`` are lives whose broker may have forgotten events. ``faults`` must be empty.
    """

    numbers: defaultdict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    made: Counter[str] = field(default_factory=Counter)
    last: dict[str, WorkerStatus] = field(default_factory=dict)
    spoke: dict[str, float] = field(default_factory=dict)
    publications: dict[tuple[str, str], dict[int, str]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    excused: set[str] = field(default_factory=set)
    _known: set[tuple[str, float]] = field(default_factory=set)

    def add_drafts(self, batch: EventBatch) -> None:
        """Remember which events are there."""
        life, numbers = batch.origin.life, batch.numbers["number"].tolist()
        self.numbers[life].update(numbers)
        self.made[life] = max([self.made[life], *(number + 1 for number in numbers)])

    def add_status(self, status: WorkerStatus | LearnerStatus) -> None:
        """Keep it; a worker must not go back to an earlier policy."""
        if (status.process, status.time) in self._known:
            return
        self._known.add((status.process, status.time))
        self.spoke[status.process] = time.monotonic()
        if isinstance(status, LearnerStatus):
            self.learner.append(status)
            return
        before = self.last.get(status.life, status)
        same_role = status.policy_role == before.policy_role
        if same_role and status.publication < before.publication:
            self.faults.append(f"a worker went back to publication {status.publication}")
        self.made[status.life] = max(self.made[status.life], status.events_made)
        self.last[status.life] = status
        self.statuses.append(status)

    def add_policy(self, at: float, scope: str, role: str, policy: Policy | None) -> None:
        """A key's publications go up, and a number names one policy."""
        if policy is None:
            return
        known = self.publications.setdefault((scope, role), {})
        digest, number = hashlib.sha256(to_bytes(policy)).hexdigest(), policy.publication
        if number not in known and number < max(known, default=0):
            self.faults.append(f"publication {number} of {scope}/{role} after {max(known)}")
        if known.setdefault(number, digest) != digest:
            self.faults.append(f"publication {number} of {scope}/{role} was given twice")

    @property
    def counts(self) -> dict[str, int]:
        """Distinct events: made, seen on the topic, and counted by a learner."""
        counted = max((said.events_consumed for said in self.learner), default=0)
        delivered = sum(map(len, self.numbers.values()))
        return {"made": self.made.total(), "delivered": delivered, "counted": counted}

    def contradictions(self) -> list[str]:
        """What is wrong with all that was read so far."""
        found = [f"{self.refused} records keep no contract"] if self.refused else []
        if self.counts["counted"] > self.counts["made"]:
            found.append(f"more events counted than made: {self.counts}")
        return found + [
            f"of {said.events_sent} events sent by {life} some are not on the topic"
            for life, said in list(self.last.items())
            if said.events_sent > len(self.numbers[life]) and life not in self.excused
        ]

    def has_spoken(self, moment: float, ending: str = "") -> bool:
        """Whether a process whose name ends so said something new well after ``moment``."""
        said = dict(self.spoke).items()
        return any(at > moment + IN_HAND_S and name.endswith(ending) for name, at in said)

    def learner_of(self, pid: int) -> LearnerStatus | None:
        """What the learner of that process said last."""
        said = reversed(self.learner)
        return next((each for each in said if each.process.endswith(f"-{pid}")), None)

    def account(
        self, life: str, before: Mapping[str, int] = MappingProxyType({})
    ) -> dict[str, int]:
        """Where the events of a worker's life are, by its last status, but for those of ``before``.
        ``delivered`` were seen; ``lost`` it says were dropped, refused, or left when it closed.
        """
        said = self.last.get(life) or WorkerStatus(process="", scope="", time=0.0)
        now = {
            "made": said.events_made,
            "delivered": len(self.numbers[life]),
            "in doubt": said.events_in_doubt,
            "waiting": said.queue_depth,
            "lost": said.events_dropped + said.events_failed + sum(said.events_refused.values()),
        }
        return {name: count - before.get(name, 0) for name, count in now.items()}
