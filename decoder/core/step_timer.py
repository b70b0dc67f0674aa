"""Timing of the current step: all of the router's timers."""

from __future__ import annotations

import time
from dataclasses import dataclass

from decoder.core.requests import StepReport
from decoder.core.tracker import Progress
from decoder.experiment.block import StepOutcome
from decoder.experiment.variants import Variant
from decoder.policy.pricing import CostTable, step_time


@dataclass(slots=True)
class StepTimer:
    """Times a choice and the step that follows it.

    ``own_us`` and ``exposed_us`` are as in :class:`decoder.core.counters.Counters`. They include
    the adapter's work between :meth:`enter` and :meth:`leave`. Points in time are performance
    counter seconds, 0 where there is none. All methods mutate except :meth:`step_us`.
    """

    variant: Variant | None = None  # that decided
    requests: int = 0  # of the choice
    drafted: int = 0  # tokens that the model drafter makes per request
    began: float = 0.0  # the choice
    proposed: float = 0.0  # drafts are looked up and have features
    decided: float = 0.0  # the engine continues
    unpaid_us: float = 0.0  # of the choice, that the variant's stock counterpart would not spend
    own_us: float = 0.0
    exposed_us: float = 0.0
    decided_us: float = 0.0  # exposed time until ``decided``
    since: float = 0.0  # begin of the adapter's work that is not added yet

    def enter(self) -> None:
        """Begin to count the adapter's time as the router's."""
        self.since = self.since or time.perf_counter()

    def leave(self) -> None:
        """Stop counting the adapter's time."""
        if self.since:
            self.add(self.since)
            self.since = 0.0

    def add(self, began: float, exposed: bool = True) -> float:
        """Add the router's own time since ``began``, ``exposed`` if the engine waited for it;
        returns the time now."""
        now = time.perf_counter()
        elapsed_us = (now - began) * 1e6
        self.since = now if self.since else 0.0
        self.own_us += elapsed_us
        self.exposed_us += elapsed_us * exposed
        return now

    def begin_choice(self) -> None:
        """A choice begins; earlier adapter time is added."""
        self.began = self.add(self.since or time.perf_counter())

    def end_choice(self, variant: Variant, requests: int) -> float:
        """Arms of ``requests`` requests are chosen; microseconds of the choice."""
        now, self.variant, self.requests = time.perf_counter(), variant, requests
        self.unpaid_us = (now - self.proposed) * 1e6 if variant.draft_source == "stock" else 0.0
        return (now - self.began) * 1e6

    def end_decisions(self) -> None:
        """The engine continues."""
        now = self.add(self.began)
        self.decided = now if self.requests else 0.0  # without requests, the engine is idle
        self.decided_us = self.exposed_us

    def step_us(self, until: float) -> float:
        """Microseconds of the engine from the choice to ``until``; 0 without a choice."""
        waited_us = self.exposed_us - self.decided_us
        return (until - self.decided) * 1e6 - waited_us if self.decided else 0.0

    def outcome(
        self, table: CostTable, report: StepReport, progress: Progress, times: tuple[float, float]
    ) -> StepOutcome:
        """What the step produced and took, the router's own time included, except for a variant
        without drafts. ``times``: :meth:`step_us`, and when the router had observed the step."""
        names, (us, until) = tuple(report.names), times
        cost_us = step_time(table, len(names), progress.drafts, self.drafted)
        prefill_us = 0.0 if report.timed else max(us - cost_us, 0.0)
        if self.variant is None or self.variant.draft_source != "none":
            us = (until - self.began) * 1e6 - self.unpaid_us
            cost_us += table.own_us * len(names)
        groups, sessions, predicted = progress.groups, progress.sessions, progress.predicted
        return StepOutcome(
            progress.tokens, names, us, cost_us, prefill_us, groups, sessions, predicted
        )
