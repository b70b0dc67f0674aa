"""What was seen of a running service: statuses, drafts, rounds, policies, requests and phases.

The worker's counters are cumulative, so any interval's value is a difference of two readings,
interpolated between the seconds at which they were sent.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from decoder.contracts.bundle import ANY_SCOPE, Policy
from decoder.contracts.events import EventBatch
from decoder.contracts.status import LearnerStatus, WorkerStatus
from decoder.contracts.trials import Round
from pipelines.watch.drafts import ARMS, Drafts

KEPT_BUNDLES: Final = 8
AHEAD_S: Final = 60.0
"""Clocks of machines differ by less; what says it is of later than that would never grow old."""
LEARNED: Final = "learner"
"""Origin, in its provenance, of a policy that learning made."""

Readings = NDArray[np.float64]


@dataclass(frozen=True)
class Phase:
    """A stretch of one kind of traffic; ``ended`` is infinite while it lasts."""

    name: str
    workloads: tuple[str, ...]
    began: float  # seconds since the epoch
    ended: float = float("inf")


@dataclass(frozen=True)
class Answer:
    """One finished request."""

    workload: str
    time: float
    seconds: float
    tokens: int
    error: str = ""


@dataclass(frozen=True)
class Publication:
    """One record of the policy topic; ``version`` None says that the role's policy is over."""

    time: float
    scope: str
    role: str
    version: int | None = None
    kind: str = ""
    share: float = 0.0
    publication: int = 0
    origin: str = ""


Timed = TypeVar("Timed", WorkerStatus, LearnerStatus, Round, Publication)


@dataclass(frozen=True)
class Window:
    """Rates over a stretch of time; all but the first are of the policy in force."""

    tok_per_s: float  # of all sides together
    arm_shares: dict[str, float]
    accepted_by_arm: dict[str, float]  # accepted draft tokens per cycle of that arm
    mae: float | None  # predicted against accepted, tokens; None without a complete label
    events: int


@dataclass
class Ledger:
    """Everything seen, in order of arrival; appended to by one thread, read by another.

    Of one ``worker``, or of all where it is "". What is ``keep_s`` older than the newest of its
    kind is forgotten, and what is :data:`AHEAD_S` ahead of now is not believed.
    """

    worker: str = ""
    keep_s: float = math.inf
    statuses: list[WorkerStatus] = field(default_factory=list)
    learner: list[LearnerStatus] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    phases: list[Phase] = field(default_factory=list)
    refused: int = 0  # records that kept no contract
    drafts: Drafts = field(init=False)
    _published: list[Publication] = field(default_factory=list)
    _bundles: dict[tuple[str, int], Policy] = field(default_factory=dict)
    _read: tuple[tuple[int, float], list[tuple[Readings, Readings]]] = field(
        default_factory=lambda: ((0, 0.0), [])
    )

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
        if policy is None:
            _append(self._published, Publication(at, scope, role), self.keep_s)
            return
        origin = str(policy.provenance.get("origin", ""))
        facts = (policy.version, policy.kind, policy.share, policy.publication, origin)
        _append(self._published, Publication(at, scope, role, *facts), self.keep_s)
        self._bundles.pop((scope, policy.version), None)
        self._bundles[scope, policy.version] = policy
        while len(self._bundles) > KEPT_BUNDLES:
            # the first shows where learning began
            del self._bundles[list(self._bundles)[1]]

    @property
    def published(self) -> list[Publication]:
        """What was published for the scope, in order."""
        return [p for p in list(self._published) if p.scope in (self.scope, ANY_SCOPE)]

    def bundle(self, version: int) -> Policy | None:
        """A policy that was published for the scope, if it is one of the last or the first."""
        return self._bundles.get((self.scope, version))

    def _is_mine(self, worker: str, scope: str) -> bool:
        return (not self.worker or worker == self.worker) and self.scope in ("", scope)

    def between(self, began: float, ended: float) -> Window:
        """Rates from ``began`` to ``ended``, seconds since the epoch; zeros where not known."""
        sums = self.drafts.between(began, ended)
        cycles = sums[:3]
        return Window(
            tok_per_s=self._rate(began, ended),
            arm_shares=dict(zip(ARMS, (cycles / max(cycles.sum(), 1.0)).tolist(), strict=True)),
            accepted_by_arm={
                "cache": float(sums[3] / max(cycles[0], 1.0)),
                "model": float(sums[4] / max(cycles[1], 1.0)),
                "none": 0.0,
            },
            mae=float(sums[5] / sums[6]) if sums[6] else None,
            events=int(cycles.sum()),
        )

    def _rate(self, began: float, ended: float) -> float:
        """Tokens a second of all workers, within the time for which there are readings."""
        lives = self._lives()
        if not lives:
            return 0.0
        first = min(float(times[0]) for times, _ in lives)
        last = max(float(times[-1]) for times, _ in lives)
        begin, end = (float(np.clip(t, first, last)) for t in (began, ended))
        tokens = sum(
            float(np.interp(end, times, counts) - np.interp(begin, times, counts))
            for times, counts in lives
        )
        return tokens / (end - begin) if end > begin else 0.0

    def _lives(self) -> list[tuple[Readings, Readings]]:
        """Times [n] and tokens made by then [n] of each worker's life; read once."""
        statuses = list(self.statuses)
        state = (len(statuses), statuses[-1].time) if statuses else (0, 0.0)
        if state != self._read[0]:
            lives: dict[tuple[str, str], list[tuple[float, float]]] = {}
            for s in statuses:
                if s.scope == statuses[-1].scope:
                    lives.setdefault((s.process, s.life), []).append((s.time, float(s.tokens)))
            columns = [np.array(sorted(readings)).T for readings in lives.values()]
            self._read = (state, [(times, counts) for times, counts in columns])
        return self._read[1]

    def policy_switches(self) -> list[tuple[float, int]]:
        """When each policy version came into force on the worker seen last, first to last, the one
        at the start included.

        A version in force for less than a second shows in the events only; so both are read.
        """
        switches: list[tuple[float, int]] = []
        for status in self._of_last():
            if not switches or switches[-1][1] != status.policy_version:
                switches.append((status.policy_applied_at or status.time, status.policy_version))
        reported = {version for _, version in switches}
        brief = [(at, v) for v, at in list(self.drafts.versions.items()) if v not in reported]
        return sorted(switches + brief)

    def alarms(self) -> list[float]:
        """When the learner said that the traffic had changed, seconds since the epoch."""
        said = [s.last_drift_at for s in list(self.learner) if s.drifts]
        return sorted(set(said))

    def moves(self) -> list[tuple[float, str]]:
        """What the learner did with policies on trial, and why, in its own words."""
        found: list[tuple[float, str]] = []
        for status in list(self.learner):
            if status.rollout_said and (not found or found[-1][1] != status.rollout_said):
                found.append((status.time, status.rollout_said))
        return found

    def _of_last(self) -> list[WorkerStatus]:
        statuses = list(self.statuses)
        return [s for s in statuses if s.process == statuses[-1].process]

    def learned_versions(self) -> list[int]:
        """Versions that learning made and that came into force, in order of first use."""
        learned = {p.version for p in self.published if p.origin == LEARNED}
        versions = dict.fromkeys(version for _, version in self.policy_switches())
        return [version for version in versions if version in learned]

    @property
    def newest(self) -> float:
        """When the newest status or round was made, seconds since the epoch; 0 before any."""
        kinds = (self.statuses, self.learner, self.rounds)
        return max([record.time for kind in kinds for record in kind[-1:]], default=0.0)

    @property
    def produced(self) -> int:
        """Events the worker made."""
        return self.statuses[-1].events_made if self.statuses else 0

    @property
    def consumed(self) -> int:
        """Distinct events the learner took in."""
        return self.learner[-1].events_consumed if self.learner else 0


def _append(records: list[Timed], record: Timed, keep_s: float) -> None:
    oldest = record.time - keep_s
    is_stale = bool(records) and record.time < records[-1].time - keep_s
    if is_stale or record.time > time.time() + AHEAD_S:
        return
    records.append(record)
    if records[0].time < oldest:
        del records[: next(i for i, r in enumerate(records) if r.time >= oldest)]
