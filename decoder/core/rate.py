"""What a worker commits lately: the price of a token in the rate rule.

Deciding by the rate that deciding so achieves is the fixed point of the rate rule (Dinkelbach 1967:
from below, every step of that iteration raises the rate), so a worker that follows its own rate
needs no tuning, neither at the start nor when its load changes.
"""

from __future__ import annotations

from typing import Final

START: Final = 2.0
"""What a worker takes its rate to be before the first step: between drafting nothing, which commits
one token in such a time, and text that is copied."""
MEMORY: Final = 256.0
"""Steps over which the rate is taken, however many requests share them."""
PRIOR: Final = 8.0
"""Cycles that the starting rate counts for."""
SETTLES: Final = 16.0
"""Steps in which another number of requests is taken to be here to stay."""
LEAST: Final = 0.5
"""Tokens in the time of a plain step: drafting nothing commits one."""


class LiveRate:
    """Tokens a request commits in the time of a step that verifies no draft. O(1) a step.

    A step counts by its requests and is forgotten by steps. What was learned of larger batches
    counts for ``MEMORY`` steps of the present one, or a batch of one would follow them for long.
    """

    def __init__(self, start: float = START) -> None:
        self._tokens = start * PRIOR
        self._time = self._cycles = PRIOR
        self._batch = 0.0

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
        self._batch += (cycles - self._batch) / (SETTLES if self._batch else 1.0)
        keep = min(1.0 - 1.0 / MEMORY, MEMORY * self._batch / self._cycles)
        self._tokens = keep * self._tokens + committed
        self._time = keep * self._time + time * cycles
        self._cycles = keep * self._cycles + cycles
