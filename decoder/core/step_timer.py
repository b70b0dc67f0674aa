"""What the step under way takes: all of the router's stop-watches."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from decoder.experiment.block import StepOutcome
from decoder.experiment.variants import Variant
from decoder.policy.pricing import CostTable, step_time


@dataclass(slots=True)
class StepTimer:
    """A choice and the step that follows it; ``began``, ``proposed`` and ``decided`` in seconds of
    the performance counter, 0 where nobody waits for a step.

    ``side`` decided it, if it was dealt out; ``unpaid_us`` is, of the choice, what its side's like
    would not do. ``settled_us`` is the router's work while the target ran, as far as the engine
    waited for it. ``own_us`` and ``exposed_us`` as in :class:`decoder.core.counters.Counters`; they
    take in what an engine does for the router between :meth:`enter` and :meth:`leave`, and
    ``since`` is when that began, or was last added, 0 where it does nothing.
    """

    side: Variant | None = None
    asked: int = 0  # requests of the choice
    drafted: int = 0  # tokens that the model drafter makes
    began: float = 0.0
    proposed: float = 0.0
    decided: float = 0.0
    unpaid_us: float = 0.0
    settled_us: float = 0.0
    own_us: float = 0.0
    exposed_us: float = 0.0
    since: float = 0.0

    def enter(self) -> None:
        """From now on all is done for the router. Mutates."""
        self.since = time.perf_counter()

    def leave(self) -> None:
        """The engine does its own again. Mutates."""
        if self.since:
            self.settled(self.since, exposed=True)
            self.since = 0.0

    def begin_choice(self) -> None:
        """A choice begins; what was done before is added. Mutates."""
        self.began = self.spent(self.since) if self.since else time.perf_counter()

    def end_proposals(self) -> None:
        """Drafts are looked up and described. Mutates."""
        self.proposed = time.perf_counter()

    def end_choice(self, side: Variant | None, asked: int) -> float:
        """The arms of ``asked`` requests are chosen; microseconds that it took. Mutates."""
        now, stock = time.perf_counter(), side is not None and side.draft_source == "stock"
        self.side, self.asked, self.settled_us = side, asked, 0.0
        self.unpaid_us = (now - self.proposed) * 1e6 if stock else 0.0
        return (now - self.began) * 1e6

    def end_decisions(self) -> None:
        """The engine goes on. Mutates."""
        now = self.spent(self.began)
        self.decided = now if self.asked else 0.0  # what follows nobody's step is a pause

    def spent(self, began: float) -> float:
        """Add the router's own time since ``began``; the time it is now. Mutates."""
        now = time.perf_counter()
        self.own_us += (now - began) * 1e6
        self.exposed_us += (now - began) * 1e6
        self.since = now if self.since else 0.0
        return now

    def settled(self, began: float, exposed: bool) -> None:
        """Add accounts and events made since ``began``. Mutates."""
        now = time.perf_counter()
        took = (now - began) * 1e6
        self.since = now if self.since else 0.0
        self.own_us += took
        if exposed:
            self.exposed_us += took
            self.settled_us += took

    def ran_us(self, until: float) -> float:
        """What the engine took from the choice to ``until``; 0 where no choice stands."""
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
        """What the step of ``names`` came to that verified ``drafts`` tokens, as a trial adds it,
        but for its tokens, groups and sessions.

        The router's own work is in it: only a side that is shown no draft pays for none of it.
        """
        rows = len(names)
        cost_us = step_time(table, rows, drafts, self.drafted)
        late_us = 0.0 if usual else max(step_us - cost_us, 0.0)
        us = step_us
        if self.side is None or self.side.draft_source != "none":
            us = (until - self.began) * 1e6 - self.unpaid_us
            cost_us += table.proposing(rows)
        return StepOutcome(0, tuple(names), us, cost_us, late_us, {})
