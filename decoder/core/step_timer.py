"""Timing of the current step: all of the router's timers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from decoder.experiment.block import StepOutcome
from decoder.experiment.variants import Variant
from decoder.policy.pricing import CostTable, step_time


@dataclass(slots=True)
class StepTimer:
    """Times a choice and the step that follows it; ``began``, ``proposed`` and ``decided`` are
    performance counter seconds, 0 if no step is in flight.

    ``side`` is the variant that decided, None for the champion outside of a round. ``unpaid_us`` is
    time of the choice that the variant's stock counterpart would not spend. ``settled_us`` is work
    after the choice that the engine waited for. ``own_us`` and ``exposed_us`` are as in
    :class:`decoder.core.counters.Counters`. They include the adapter's work between :meth:`enter`
    and :meth:`leave`; ``since`` is when it began or was last added, 0 outside.
    """

    side: Variant | None = None
    asked: int = 0  # requests of the choice
    drafted: int = 0  # tokens that the model drafter makes per request
    began: float = 0.0
    proposed: float = 0.0
    decided: float = 0.0
    unpaid_us: float = 0.0
    settled_us: float = 0.0
    own_us: float = 0.0
    exposed_us: float = 0.0
    since: float = 0.0

    def enter(self) -> None:
        """Begin to count the adapter's time as the router's. Mutates."""
        self.since = time.perf_counter()

    def leave(self) -> None:
        """Stop counting the adapter's time. Mutates."""
        if self.since:
            self.settled(self.since, exposed=True)
            self.since = 0.0

    def begin_choice(self) -> None:
        """A choice begins; earlier adapter time is added. Mutates."""
        self.began = self.spent(self.since) if self.since else time.perf_counter()

    def end_proposals(self) -> None:
        """Drafts are looked up and have features. Mutates."""
        self.proposed = time.perf_counter()

    def end_choice(self, variant: Variant | None, asked: int) -> float:
        """Arms of ``asked`` requests are chosen; microseconds since the choice began. Mutates."""
        now, stock = time.perf_counter(), variant is not None and variant.draft_source == "stock"
        self.side, self.asked, self.settled_us = variant, asked, 0.0
        self.unpaid_us = (now - self.proposed) * 1e6 if stock else 0.0
        return (now - self.began) * 1e6

    def end_decisions(self) -> None:
        """The engine continues. Mutates."""
        now = self.spent(self.began)
        self.decided = now if self.asked else 0.0  # without requests, the engine is idle

    def spent(self, began: float) -> float:
        """Add the router's own time since ``began``; returns the time now. Mutates."""
        now = time.perf_counter()
        self.own_us += (now - began) * 1e6
        self.exposed_us += (now - began) * 1e6
        self.since = now if self.since else 0.0
        return now

    def settled(self, began: float, exposed: bool) -> None:
        """Add the time of settling since ``began``. Mutates."""
        now = time.perf_counter()
        elapsed_us = (now - began) * 1e6
        self.since = now if self.since else 0.0
        self.own_us += elapsed_us
        if exposed:
            self.exposed_us += elapsed_us
            self.settled_us += elapsed_us

    def ran_us(self, until: float) -> float:
        """Microseconds of the engine from the choice to ``until``; 0 without a choice."""
        return (until - self.decided) * 1e6 - self.settled_us if self.decided else 0.0

    def came_to(
        self,
        table: CostTable,
        names: Sequence[str],
        drafts: int,
        step_us: float,
        until: float,
        usual: bool,
    ) -> StepOutcome:
        """Outcome of the step of ``names``, which verified ``drafts`` tokens, without its committed
        tokens, groups and sessions.

        It includes the router's own time, except for a variant without drafts.
        """
        rows = len(names)
        cost_us = step_time(table, rows, drafts, self.drafted)
        late_us = 0.0 if usual else max(step_us - cost_us, 0.0)
        us = step_us
        if self.side is None or self.side.draft_source != "none":
            us = (until - self.began) * 1e6 - self.unpaid_us
            cost_us += table.proposing(rows)
        return StepOutcome(0, tuple(names), us, cost_us, late_us, {})
