"""What a worker commits lately: the price of a token in the rate rule.

Deciding by the rate that deciding so achieves is the fixed point of the rate rule (Dinkelbach 1967:
from below, every step of that iteration raises the rate), so a worker that follows its own rate
needs no tuning when its load changes. The learner's rate is where it starts.
"""

from __future__ import annotations

from typing import Final

MEMORY: Final = 256.0
"""Cycles over which the rate is taken."""
PRIOR: Final = 8.0
"""Cycles that the starting rate counts for."""
LEAST: Final = 0.5
"""Tokens in the time of a plain step: drafting nothing commits one."""


class LiveRate:
    """Tokens a request commits in the time of a step that verifies no draft. O(1) a step."""

    def __init__(self, start: float) -> None:
        self._tokens = start * PRIOR
        self._time = PRIOR

    @property
    def value(self) -> float:
        """The rate of recent cycles."""
        return max(self._tokens / self._time, LEAST)

    def observe(self, committed: int, cycles: int, time: float) -> None:
        """Take in a step. Mutates.

        Args:
            committed: tokens, of all requests of the step.
            cycles: requests of the step, at least one.
            time: of the step, in steps of as many requests that verify no draft.
        """
        keep = max(1.0 - cycles / MEMORY, 0.0)
        self._tokens = keep * self._tokens + committed
        self._time = keep * self._time + time * cycles
