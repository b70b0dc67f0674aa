"""Running estimate of the commit rate, the only parameter of the rate rule.

Deciding by the rate that these decisions achieve is the fixed point of Dinkelbach's iteration
(1967), each step of which raises the rate from below. So a worker that uses its measured rate needs
no tuning, neither at the start nor when its load changes.
"""

from __future__ import annotations

from typing import Final

START: Final = 2.0
"""Rate before the first step: between no drafts, which commits one token per plain step, and copied
text."""
MEMORY: Final = 256.0  # window of the rate in steps, whatever their batch size
PRIOR: Final = 8.0  # weight of the starting rate, in cycles
BATCH_WINDOW: Final = 16.0  # window of the mean batch size, in steps
LEAST: Final = 0.5  # lower bound, tokens per plain step; without drafts it is one


class LiveRate:
    """Tokens a request commits in the time of a step that verifies no draft. O(1) a step.

    A step is weighted by its requests and decays by steps. The weight of the past is capped at
    ``MEMORY`` steps of the present batch size: otherwise a batch of one would follow an earlier
    larger batch for long.
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
        """Update with a step of ``cycles`` > 0 requests that ``committed`` so many tokens in
        ``time``, in plain steps of as many requests; at least 1 counts. Mutates."""
        self._batch += (cycles - self._batch) / (BATCH_WINDOW if self._batch else 1.0)
        keep = min(1.0 - 1.0 / MEMORY, MEMORY * self._batch / self._cycles)
        self._tokens = keep * self._tokens + committed
        self._time = keep * self._time + max(time, 1.0) * cycles
        self._cycles = keep * self._cycles + cycles
