"""Profile a worker's step times at start, within a budget of seconds.

Sizes are timed from coarse to fine, so any budget covers the whole range: first all small sizes and
the powers of two, then halves, then quarters. If a size would take too much of the budget, it and
all larger ones are skipped; serving measures them if they occur.

Other processes start at the same time and disturb the times. A profile is accepted only if it has
several sizes whose times repeat and grow plausibly. Otherwise costs have a default shape.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Final

from decoder.core.costs import LiveCosts
from decoder.policy.pricing import FEW, MAX_TOKENS, CostTable, nominal, padded

log = logging.getLogger(__name__)

SECONDS: Final = 20.0  # profiling budget of an accelerator's start, seconds
SHARE: Final = 0.08
"""Maximum share of the budget for one step, to leave time for many sizes and rounds."""
ROUNDS: Final = 4
"""Measurements per size if the budget allows; the fastest counts."""
MIN_SIZES: Final = 4
"""Sizes that a profile needs, or all if there are fewer."""
MAX_REPEAT_RATIO: Final = 1.3  # maximum ratio of a size's second fastest time to its fastest
MIN_RATIO: Final = 0.7
"""Minimum ratio of a step's time to that of one with fewer tokens: up to ``FEW``, larger steps may
be a little faster."""
MAX_TOKEN_RATIO: Final = 1.5
"""Maximum ratio of the time per token of a step to that of the next smaller one: a larger step
never costs more than its tokens one by one."""

Run = Callable[[int], float | None]
"""Runs that many tokens or requests; returns seconds to count, None for its whole duration."""


def levels(most: int, graphs: Sequence[int] = ()) -> tuple[tuple[int, ...], ...]:
    """Sizes up to ``most`` tokens to time, ascending in each of three levels from coarse to fine.

    The largest of ``graphs``, the sizes the engine pads a step to, and the one after it are coarse
    sizes, because larger steps run without graphs.
    """
    most = max(min(most, MAX_TOKENS), 1)
    ends = (graphs[-1], graphs[-1] + 1) if graphs else ()
    doubling = [1 << i for i in range(most.bit_length())]
    coarse = {*range(1, min(FEW, most) + 1), most, *doubling, *ends}
    halves = {size * 3 // 2 for size in doubling if size >= FEW}
    quarters = {size * part // 4 for size in doubling if size >= 2 * FEW for part in (5, 7)}
    result: list[tuple[int, ...]] = []
    for level in (coarse, halves, quarters):
        sizes = {n if n == 1 else padded(n, graphs) for n in level}
        known = {size for before in result for size in before}
        result.append(tuple(sorted(n for n in sizes - known if n <= most)))
    return tuple(result)


class Profile:
    """Step times of an engine in seconds; the fastest of each size counts.

    Other load on the machine only adds to a time, and at start there is a lot.
    """

    def __init__(
        self,
        setup: str,
        *,
        most: int,
        graphs: Sequence[int] = (),
        rows: Sequence[int] = (1,),
        drafted: int = 1,
        seconds: float = SECONDS,
    ) -> None:
        """Begin without times, for set-up ``setup`` with steps of at most ``most`` tokens.

        Args:
            graphs: ascending sizes that the engine pads a step to.
            rows: batch sizes at which drafting is timed; a line is fitted through first and last.
            drafted: tokens that the model drafter makes for each request.
        """
        self._seconds = seconds
        self._setup, self._graphs, self._rows, self._drafted = setup, tuple(graphs), rows, drafted
        self._levels = levels(most, graphs)
        self.target = dict[int, list[float]]()  # by tokens
        self.drafter = dict[int, list[float]]()  # by requests

    def measure(self, step: Run, draft: Run | None = None) -> None:
        """Time steps of all sizes in rounds. Mutates.

        Args:
            step: runs that many tokens through the target, and waits for the device.
            draft: drafts for that many requests; None without a model drafter.
        """
        start, left = time.perf_counter(), self._seconds
        coarse, halves, quarters = self._levels
        every = tuple(sorted((*coarse, *halves, *quarters)))
        rounds = ((1, coarse), (2, coarse), (1, halves), (1, quarters), (2, halves), (2, quarters))
        for times, sizes in (*rounds, *((more, every) for more in range(3, ROUNDS + 1))):
            for n in self._rows if draft is not None else ():
                if n not in self.drafter or (left > 0 and len(self.drafter[n]) < times):
                    _time(draft, n, self.drafter)  # type: ignore[arg-type]
            for n in sizes:
                if len(self.target.get(n, ())) >= times:
                    continue
                left = self._seconds - (time.perf_counter() - start)
                below = max((size for size in self.target if size <= n), default=0)
                estimate = min(self.target[below]) * n / below if below else 0.0
                if n not in self.target and estimate > SHARE * self._seconds:
                    break
                if self.target and (left <= 0 or (n not in self.target and estimate > left)):
                    break
                _time(step, n, self.target)
        elapsed = time.perf_counter() - start
        known = ", ".join(map(str, sorted(self.target)))
        log.info("profiled steps of %s tokens in %.1f s", known, elapsed)

    @property
    def doubt(self) -> str:
        """Why the profile is not accepted; "" if it is."""
        sizes = sorted(self.target)
        if len(sizes) < min(MIN_SIZES, sum(map(len, self._levels))):
            return f"only {len(sizes)} step sizes were timed"
        for what, every in (("tokens", self.target), ("requests drafted for", self.drafter)):
            twice = {n: sorted(times) for n, times in every.items() if len(times) > 1}
            bad = [n for n, (first, again, *_) in twice.items() if again > MAX_REPEAT_RATIO * first]
            if every and (not twice or 4 * len(bad) > len(twice)):
                return f"times of steps of {', '.join(map(str, bad or every))} {what} differ"
        slowest = 0.0
        for n, more in pairwise(sizes):
            smaller, larger = min(self.target[n]), min(self.target[more])
            slowest = max(slowest, smaller)
            if larger < MIN_RATIO * slowest:
                return f"{more} tokens took {larger / slowest:.2f} of what fewer did"
            behind_graphs = self._graphs and n <= self._graphs[-1] < more
            if larger > MAX_TOKEN_RATIO * smaller * more / n and not behind_graphs:
                return f"{more} tokens took {larger / smaller:.1f} times what {n} did"
        return ""

    @property
    def costs(self) -> LiveCosts:
        """Live costs with :attr:`table` as prior."""
        return LiveCosts(self.table, profiled=not self.doubt)

    @property
    def table(self) -> CostTable:
        """The measured table; the nominal shape at the measured speed while there is doubt."""
        sizes = tuple(sorted(self.target))
        times = tuple(min(self.target[n]) * 1e6 for n in sizes)
        if self.doubt:
            return nominal(self._setup, min(times))
        base = each = 0.0
        if self.drafter:
            few, many = self._rows[0], self._rows[-1]
            least, most = (min(self.drafter[n]) * 1e6 / self._drafted for n in (few, many))
            each = max(most - least, 0.0) / max(many - few, 1)
            base = max(least - few * each, 0.0)
        return CostTable(
            self._setup, sizes, times, draft_token_us=base, draft_row_us=each, graphs=self._graphs
        )


def _time(run: Run, size: int, every: dict[int, list[float]]) -> None:
    start = time.perf_counter()
    counted = run(size)
    elapsed = time.perf_counter() - start if counted is None else counted
    every.setdefault(size, []).append(elapsed)
