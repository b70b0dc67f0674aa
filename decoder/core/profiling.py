"""How a worker's steps are timed at its start, within a budget of seconds.

Sizes are taken from coarse to fine, so that whatever the budget allows spans the whole range: first
every one of few tokens and then each twice the one before, next those half-way, then the quarters.
A size that would take too much of the budget is left out with all that are larger; service measures
them, if it ever makes them.

At a start other processes start, too, and what they take is no price. So a profile is believed only
if it holds several sizes, each of which took as long twice, and ascends as a machine can. Else it
goes on when the machine is idle, and until then prices have the usual shape.
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

SECONDS: Final = 20.0
"""What a profile may take of an accelerator's start."""
SHARE: Final = 0.08
"""Of the budget that one step may take, so that there is time for many sizes and rounds."""
ROUNDS: Final = 4
"""Times that each size is measured, where the budget allows; the fastest counts."""
SEVERAL: Final = 4
"""Sizes that a profile needs, or all that there are."""
REPEATS: Final = 1.3
"""The second fastest time of a size over the fastest, at most."""
SINKS: Final = 0.7
"""Least of a step's time over that of one with fewer tokens: up to ``FEW``, steps of more may take
a little less."""
RISES: Final = 1.5
"""Most of a step's time over that of the next smaller one, where both are in proportion to tokens:
nothing is dearer than one token after another."""

Run = Callable[[int], float | None]
"""Runs so many tokens or requests; returns the seconds that count, None for all that it took."""


def levels(most: int, graphs: Sequence[int] = ()) -> tuple[tuple[int, ...], ...]:
    """Sizes [tokens] to time, ascending in each of three levels from coarse to fine.

    Args:
        most: the largest step there is.
        graphs: sizes that the engine pads a step to; the largest and what follows it are coarse
            sizes, for behind it steps run in another way.
    """
    most = max(min(most, MAX_TOKENS), 1)
    ends = (graphs[-1], graphs[-1] + 1) if graphs else ()
    doubling = [1 << i for i in range(most.bit_length())]
    coarse = {*range(1, min(FEW, most) + 1), most, *doubling, *ends}
    halves = {size * 3 // 2 for size in doubling if size >= FEW}
    quarters = {size * part // 4 for size in doubling if size >= 2 * FEW for part in (5, 7)}
    made: list[tuple[int, ...]] = []
    for level in (coarse, halves, quarters):
        sizes = {n if n == 1 else padded(n, graphs) for n in level}
        known = {size for before in made for size in before}
        made.append(tuple(sorted(n for n in sizes - known if n <= most)))
    return tuple(made)


class Profile:
    """Times of an engine's steps, in seconds, of which the fastest of each size counts.

    Whatever else the machine does only ever adds to a time, and at start it does a lot.
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
        """Nothing is timed yet.

        Args:
            setup: what it is valid for.
            most: tokens of the largest step there is.
            graphs: ascending sizes that the engine pads a step to.
            rows: requests that drafting is timed for, the first and the last of which make a line.
            drafted: tokens that the model drafter makes for each of these.
            seconds: the budget.
        """
        self._seconds = seconds
        self._setup, self._graphs, self._rows, self._drafted = setup, tuple(graphs), rows, drafted
        self._levels = levels(most, graphs)
        self.target = dict[int, list[float]]()  # by tokens
        self.drafter = dict[int, list[float]]()  # by requests

    def take(self, step: Run, draft: Run | None = None, *, seconds: float | None = None) -> bool:
        """Time steps of many sizes, in rounds of all of them. Mutates; goes on where it stopped.

        Args:
            step: runs so many tokens through the target, and waits for the device.
            draft: makes tokens for each of so many requests; None without a model drafter.
            seconds: after which no further step is timed; None for the whole budget.

        Returns:
            Whether it came to its end before.
        """
        began, ended = time.perf_counter(), True
        left = seconds = self._seconds if seconds is None else seconds
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
                left = seconds - (time.perf_counter() - began)
                below = max((size for size in self.target if size <= n), default=0)
                takes = min(self.target[below]) * n / below if below else 0.0
                if n not in self.target and takes > SHARE * self._seconds:
                    break
                if self.target and (left <= 0 or (n not in self.target and takes > left)):
                    ended = False
                    break
                _time(step, n, self.target)
        took = time.perf_counter() - began
        known = ", ".join(map(str, sorted(self.target)))
        log.info("profiled steps of %s tokens in %.1f s", known, took)
        return ended

    @property
    def doubt(self) -> str:
        """Why it is not believed; "" if it is."""
        sizes = sorted(self.target)
        if len(sizes) < min(SEVERAL, sum(map(len, self._levels))):
            return f"it holds {len(sizes)} sizes of a step"
        for what, every in (("tokens", self.target), ("requests drafted for", self.drafter)):
            twice = {n: sorted(times) for n, times in every.items() if len(times) > 1}
            bad = [n for n, (first, again, *_) in twice.items() if again > REPEATS * first]
            if every and (not twice or 4 * len(bad) > len(twice)):
                return f"steps of {', '.join(map(str, bad or every))} {what} took as long but once"
        slowest = 0.0
        for n, more in pairwise(sizes):
            one, other = min(self.target[n]), min(self.target[more])
            slowest = max(slowest, one)
            if other < SINKS * slowest:
                return f"{more} tokens took {other / slowest:.2f} of what fewer did"
            behind_graphs = self._graphs and n <= self._graphs[-1] < more
            if other > RISES * one * more / n and not behind_graphs:
                return f"{more} tokens took {other / one:.1f} times what {n} did"
        return ""

    @property
    def costs(self) -> LiveCosts:
        """Costs that begin with :attr:`table`."""
        return LiveCosts(self.table, profiled=not self.doubt)

    @property
    def table(self) -> CostTable:
        """What it says; of the usual shape, at the measured speed, while it is in doubt."""
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
    took = time.perf_counter() - start if counted is None else counted
    every.setdefault(size, []).append(took)
