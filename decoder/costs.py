"""The cost table in force: a profile from worker start, corrected by every plain decoding step.

Every step tells two things: how fast the machine is now, which is the same for steps of all sizes,
and how the time of its own size deviates from the profile. So a size that nobody runs for a while
keeps pace with those that are run. Both are medians of recent ratios of measured to expected time:
a stalled step moves nothing. Sizes never seen take the deviation of their neighbours.

:class:`LiveCosts` is written by the engine's thread and read by it; ``table`` is one reference to
an immutable value.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Final

import numpy as np

from decoder.contracts.costs import NOMINAL, CostTable

GRID: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024, 2048)
"""Tokens of a step that have a cell of their own; a step counts for the nearest one below."""
RECENT: Final = 15
"""Steps of a cell, and of drafting, that the median is taken over."""
ENOUGH: Final = 3
LEAST_SCALE: Final = 0.5
"""Cheapest that a further token of a model draft is held, by its profile."""
REFRESH: Final = 16
"""Steps between two tables."""

SIZES: Final = (1, 2, 4, 8, 16, 32, 64)
"""Tokens of the steps that a profile times."""
ROUNDS: Final = 3


def profile(
    setup: str,
    step: Callable[[int], None],
    draft: Callable[[], None] | None = None,
    *,
    drafted: int = 1,
    most: int = SIZES[-1],
) -> CostTable:
    """Time steps of ``SIZES`` tokens, sizes interleaved so that a slow moment is shared.

    Args:
        step: runs so many tokens through the target, and waits for the device.
        draft: makes ``drafted`` tokens for one request; None without a model drafter.
        most: the largest step there is.
    """
    sizes = tuple(n for n in SIZES if n <= most)
    target: dict[int, list[float]] = {n: [] for n in sizes}
    drafter: list[float] = []
    for _ in range(ROUNDS + 1):  # the first round pays for allocations
        for n in sizes:
            began = time.perf_counter()
            step(n)
            target[n].append((time.perf_counter() - began) * 1e6)
        if draft is not None:
            began = time.perf_counter()
            draft()
            drafter.append((time.perf_counter() - began) * 1e6 / drafted)
    return CostTable(
        setup,
        sizes,
        tuple(median(target[n][1:]) for n in sizes),
        draft_token_us=median(drafter[1:]) if drafter else 0.0,
    )


class LiveCosts:
    """Costs of one worker's set-up.

    ``prior`` is its profile, or the nominal table; with ``live`` false it stays in force.
    """

    def __init__(self, prior: CostTable = NOMINAL, live: bool = True) -> None:
        self.table = prior
        self.steps = 0
        self._live = live
        self._prior = prior
        self._cells: list[deque[float]] = [deque(maxlen=RECENT) for _ in GRID]
        self._shape = np.ones(len(GRID))  # deviation of each size from the profile
        self._paces: deque[float] = deque(maxlen=RECENT)  # of the machine, over the profile's
        self._drafting: deque[float] = deque(maxlen=RECENT)
        self._drafted = 0, 1

    @property
    def measured(self) -> bool:
        """Whether times are this machine's microseconds, and no longer nominal units."""
        return self._prior is not NOMINAL or self.table is not self._prior

    def observe(self, tokens: int, rows: int, drafted: int, us: float) -> None:
        """Take in a step of decoding alone (no prompt in it). Mutates, may replace ``table``.

        Args:
            tokens: run through the target, drafts included.
            rows: requests in the step.
            drafted: tokens the model drafter made for each request; 0 if it did not run.
            us: from this step's decision to the next.
        """
        if not (self._live and tokens > 0 and us > 0 and np.isfinite(us)):
            return
        if drafted:
            self._drafting.append(us - float(self.table.dense[min(tokens, _LAST)]))
            self._drafted = drafted, rows
        else:
            cell = int(np.searchsorted(GRID, tokens, side="right")) - 1
            ratio = us / float(self._prior.dense[min(tokens, _LAST)])
            self._paces.append(ratio / float(self._shape[cell]))
            self._cells[cell].append(ratio / median(self._paces))
        self.steps += 1
        if self.steps % REFRESH == 0 or not self.measured:
            self.table = self._corrected()

    def _corrected(self) -> CostTable:
        seen = [i for i, cell in enumerate(self._cells) if len(cell) >= ENOUGH]
        if not seen:
            return self.table
        self._shape = np.interp(
            np.log(GRID), np.log([GRID[i] for i in seen]), [median(self._cells[i]) for i in seen]
        )
        times = self._prior.dense[list(GRID)] * self._shape * median(self._paces)
        table = replace(self.table, tokens=GRID, verify_us=tuple(times.tolist()))
        if len(self._drafting) < ENOUGH:
            return table
        # One cost is all that is seen of drafting, and it may come out below zero where
        # verification is overrated: then their sum is right at least. What a further token costs
        # stays near its profile: scaled by such a number it would be a gain, and the longest
        # drafts the cheapest.
        drafted, rows = self._drafted
        least = -0.5 * float(table.dense[min(rows * (1 + drafted), _LAST)])
        known, profiled = max(median(self._drafting), least), self._prior.drafting(drafted, rows)
        if profiled <= 0.0:
            return replace(table, draft_us=known)
        scale = max(known / profiled, LEAST_SCALE)
        scaled = replace(
            table,
            draft_us=self._prior.draft_us * scale,
            draft_token_us=self._prior.draft_token_us * scale,
            draft_row_us=self._prior.draft_row_us * scale,
        )
        beyond = known - scaled.drafting(drafted, rows)
        return replace(scaled, draft_us=scaled.draft_us + beyond)


_LAST: Final = len(NOMINAL.dense) - 1
