"""What was seen of a running service: statuses, drafts, rounds, policies and phases."""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Final, TypeVar

from decoder.contracts.bundle import ANY_SCOPE, Policy
from decoder.contracts.events import EventBatch
from decoder.contracts.status import LearnerStatus, WorkerStatus
from decoder.contracts.trials import Round
from pipelines.watch.drafts import Drafts

KEPT_PUBLICATIONS: Final = 256
AHEAD_S: Final = 60.0
"""Clocks of machines differ by less; what says it is of later than that would never grow old."""
LEARNED: Final = "learner"
"""Origin, in its provenance, of a policy that learning made."""

Timed = TypeVar("Timed", WorkerStatus, LearnerStatus, Round)


@dataclass(frozen=True)
class Phase:
    """A stretch of one kind of traffic; ``ended`` is infinite while it lasts."""

    name: str
    workloads: tuple[str, ...]
    began: float  # seconds since the epoch
    ended: float = math.inf


@dataclass(frozen=True)
class Publication:
    """One record of the policy topic; ``policy`` None says that the role's policy is over."""

    time: float  # seconds since the epoch
    scope: str
    role: str
    policy: Policy | None


@dataclass
class Ledger:
    """Everything seen, in order of arrival; appended to by one thread, read by another.

    Of one ``worker``, or of all where it is "". What is ``keep_s`` older than the newest of its
    kind is forgotten, and what is :data:`AHEAD_S` ahead of now is not believed. ``refused`` counts
    records that could not be read.
    """

    worker: str = ""
    keep_s: float = math.inf
    statuses: list[WorkerStatus] = field(default_factory=list)
    learner: list[LearnerStatus] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    phases: list[Phase] = field(default_factory=list)
    refused: int = 0
    drafts: Drafts = field(init=False)
    _published: list[Publication] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.drafts = Drafts(self.keep_s)

    @property
    def scope(self) -> str:
        """That of the worker seen last; "" before any."""
        return self.statuses[-1].scope if self.statuses else ""

    def add_drafts(self, batch: EventBatch) -> None:
        """Count the events of ``batch``."""
        if self._is_mine(batch.origin.worker, batch.origin.scope):
            self.drafts.add(batch)

    def add_status(self, status: WorkerStatus | LearnerStatus) -> None:
        """Keep a worker's status, or one of the learner of its scope."""
        if isinstance(status, WorkerStatus):
            if not self.worker or status.process == self.worker:
                _append(self.statuses, status, self.keep_s)
        elif not self.statuses or status.scope in ("", self.scope):
            _append(self.learner, status, self.keep_s)

    def add_round(self, one: Round) -> None:
        """Keep a round of a trial."""
        if self._is_mine(one.worker, one.scope):
            _append(self.rounds, one, self.keep_s)

    def add_policy(self, at: float, scope: str, role: str, policy: Policy | None) -> None:
        """Keep that a policy was published ``at`` seconds since the epoch, or ended: None."""
        at = min(max(at, 0.0), time.time())  # whoever sends a record says when that was
        self._published.append(Publication(at, scope, role, policy))
        del self._published[:-KEPT_PUBLICATIONS]

    @property
    def published(self) -> list[Publication]:
        """The last that were published for the scope, in order."""
        return [p for p in list(self._published) if p.scope in (self.scope, ANY_SCOPE)]

    def _is_mine(self, worker: str, scope: str) -> bool:
        return (not self.worker or worker == self.worker) and self.scope in ("", scope)

    def policy_switches(self) -> list[tuple[float, int]]:
        """When each policy version came into force on the worker seen last, first to last, the one
        at the start included."""
        mine = [s for s in list(self.statuses) if s.process == self.statuses[-1].process]
        firsts = _first_of_each(mine, "policy_version")
        return [(s.policy_applied_at or s.time, s.policy_version) for s in firsts]

    def alarms(self) -> list[float]:
        """When the learner said that the traffic had changed, seconds since the epoch."""
        return sorted({s.last_drift_at for s in list(self.learner) if s.drifts})

    def rollout_moves(self) -> list[tuple[float, str]]:
        """What the learner did with policies on trial, and why, in its own words."""
        firsts = _first_of_each(list(self.learner), "rollout_said")
        return [(s.time, s.rollout_said) for s in firsts if s.rollout_said]

    def learned_versions(self) -> list[int]:
        """Versions that learning made and that came into force, in order of first use."""
        policies = [p.policy for p in self.published if p.policy]
        learned = {p.version for p in policies if p.provenance.get("origin") == LEARNED}
        versions = dict.fromkeys(version for _, version in self.policy_switches())
        return [version for version in versions if version in learned]

    @property
    def produced(self) -> int:
        """Events the worker made."""
        return self.statuses[-1].events_made if self.statuses else 0

    @property
    def consumed(self) -> int:
        """Distinct events the learner took in."""
        return self.learner[-1].events_consumed if self.learner else 0


def _first_of_each(statuses: list[Timed], name: str) -> list[Timed]:
    """The first of each run of statuses that say the same under ``name``."""
    return [next(group) for _, group in itertools.groupby(statuses, key=attrgetter(name))]


def _append(records: list[Timed], record: Timed, keep_s: float) -> None:
    oldest = record.time - keep_s
    is_stale = bool(records) and record.time < records[-1].time - keep_s
    if is_stale or record.time > time.time() + AHEAD_S:
        return
    records.append(record)
    if records[0].time < oldest:
        del records[: next(i for i, r in enumerate(records) if r.time >= oldest)]
