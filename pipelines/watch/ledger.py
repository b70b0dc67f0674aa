"""What was seen of a run: events, statuses, requests and phases, and rates read from them.

The worker's counters are cumulative, so any interval's value is a difference of two readings,
interpolated between the seconds at which they were sent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from decoder.contracts.events import DraftEvent, Origin
from decoder.contracts.status import LearnerStatus, WorkerStatus

ARMS: Final = ("cache", "model", "none")


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
class Window:
    """Rates over a stretch of time."""

    tok_per_s: float
    arm_shares: dict[str, float]
    accepted_by_arm: dict[str, float]  # accepted draft tokens per cycle of that arm
    mae: float | None  # predicted against accepted, tokens; None without a complete label
    events: int


@dataclass
class Ledger:
    """Everything seen, in order of arrival; appended to by one thread, read by another."""

    worker: str
    events: list[DraftEvent] = field(default_factory=list)
    statuses: list[WorkerStatus] = field(default_factory=list)
    learner: list[LearnerStatus] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    phases: list[Phase] = field(default_factory=list)
    policies: int = 0  # bundles published
    refused: int = 0  # records that kept no contract
    _ids: set[tuple[str, int]] = field(default_factory=set)

    def add_events(self, origin: Origin, events: Iterable[DraftEvent]) -> None:
        """Keep the events of the run's own worker, each once."""
        if origin.worker != self.worker:
            return
        for event in events:
            if (origin.life, event.number) not in self._ids:
                self._ids.add((origin.life, event.number))
                self.events.append(event)

    def add_status(self, status: WorkerStatus | LearnerStatus) -> None:
        """Keep the statuses of the run's own worker, and of the learner of its scope."""
        if isinstance(status, WorkerStatus):
            if status.process == self.worker:
                self.statuses.append(status)
        elif not self.statuses or status.scope in ("", self.statuses[-1].scope):
            self.learner.append(status)

    def between(self, began: float, ended: float) -> Window:
        """Rates from ``began`` to ``ended``, seconds since the epoch; zeros where not known."""
        statuses = list(self.statuses)
        seen = [s.time for s in statuses]
        begin, end = (float(np.clip(t, seen[0], seen[-1])) if seen else t for t in (began, ended))

        def gained(values: list[float]) -> float:
            if len(values) < 2:
                return 0.0
            return float(np.interp(end, seen, values) - np.interp(begin, seen, values))

        tokens = gained([float(s.tokens) for s in statuses])
        cycles = {a: gained([float(s.cycles.get(a, 0)) for s in statuses]) for a in ARMS}
        accepted = {a: gained([float(s.accepted.get(a, 0)) for s in statuses]) for a in ARMS}
        total = sum(cycles.values())
        mine = [e for e in list(self.events) if began <= e.time < ended]
        labelled = [e for e in mine if e.draft_len and not e.censored]
        errors = [abs(e.predicted - e.accepted) for e in labelled]
        return Window(
            tok_per_s=tokens / (end - begin) if end > begin else 0.0,
            arm_shares={a: n / total if total else 0.0 for a, n in cycles.items()},
            accepted_by_arm={a: accepted[a] / n if n else 0.0 for a, n in cycles.items()},
            mae=float(np.mean(errors)) if errors else None,
            events=len(mine),
        )

    def policy_switches(self) -> list[tuple[float, int]]:
        """When each policy version came into force, first to last, the one at the start included.

        A version in force for less than a second shows in the events only; so both are read.
        """
        switches: list[tuple[float, int]] = []
        for status in list(self.statuses):
            if not switches or switches[-1][1] != status.policy_version:
                switches.append((status.policy_applied_at or status.time, status.policy_version))
        reported = {version for _, version in switches}
        brief: dict[int, float] = {}
        for event in list(self.events):
            if event.policy_version not in reported:
                brief.setdefault(event.policy_version, event.time)
        return sorted(switches + [(time, version) for version, time in brief.items()])

    def labels(self) -> dict[str, int]:
        """Number of labels of cache drafts by kind, complete and censored apart."""
        drafts = [event for event in list(self.events) if event.draft_len]
        kinds = Counter(e.label + (" censored" if e.censored else "") for e in drafts)
        return dict(sorted(kinds.items()))

    @property
    def produced(self) -> int:
        """Events the worker made."""
        return self.statuses[-1].events_made if self.statuses else 0

    @property
    def consumed(self) -> int:
        """Distinct events the learner took in."""
        return self.learner[-1].events_consumed if self.learner else 0
