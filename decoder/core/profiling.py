"""How a worker's steps are timed at its start, within a budget of seconds.

Sizes are taken from coarse to fine, so that whatever the budget allows spans the whole range: first
every one of few tokens and then each twice the one before, next those half-way, then the quarters.
A size that would take too much of the budget is left out with all that are larger; service measures
them, if it ever makes them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Final

from decoder.policy.pricing import FEW, MAX_TOKENS, CostTable, padded

log = logging.getLogger(__name__)

SECONDS: Final = 20.0
"""What a profile may take of an accelerator's start."""
SHARE: Final = 0.08
"""Of the budget that one step may take, so that there is time for many sizes and rounds."""
ROUNDS: Final = 4
"""Times that each size is measured, where the budget allows; the fastest counts."""


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


def profile(
    setup: str,
    step: Callable[[int], None],
    draft: Callable[[int], None] | None = None,
    *,
    drafted: int = 1,
    rows: Sequence[int] = (1,),
    most: int,
    graphs: Sequence[int] = (),
    seconds: float = SECONDS,
) -> CostTable:
    """Time steps of many sizes, in rounds of all of them, and keep the fastest of each.

    Whatever else the machine does only ever adds to a time, and at start it does a lot.

    Args:
        step: runs so many tokens through the target, and waits for the device.
        draft: makes ``drafted`` tokens for each of so many requests; None without a model drafter.
        rows: requests that drafting is timed for, the first and the last of which make a line.
        most: the largest step there is.
        graphs: ascending sizes that the engine pads a step to.
        seconds: after which no further step is timed.
    """
    began = time.perf_counter()
    coarse, halves, quarters = levels(most, graphs)
    every = tuple(sorted((*coarse, *halves, *quarters)))
    target: dict[int, float] = {}
    drafter: dict[int, float] = {}

    def timed(run: Callable[[int], None], size: int, best: dict[int, float]) -> float:
        start = time.perf_counter()
        run(size)
        took = time.perf_counter() - start
        best[size] = min(took, best.get(size, took))
        return took

    passes = [coarse, coarse, halves, quarters, halves, quarters, *[every] * (ROUNDS - 2)]
    for sizes in passes:
        if draft is not None:
            for n in rows:
                if n not in drafter or time.perf_counter() - began < seconds:
                    timed(draft, n, drafter)
        for n in sizes:
            left = seconds - (time.perf_counter() - began)
            below = max((size for size in target if size <= n), default=0)
            dear = below and target[below] * n / below > min(SHARE * seconds, left)
            if (left <= 0 and target) or (n not in target and dear):
                break
            timed(step, n, target)
    sizes = tuple(sorted(target))
    took = time.perf_counter() - began
    log.info("profiled steps of %s tokens in %.1f s", ", ".join(map(str, sizes)), took)
    verifying = tuple(target[n] * 1e6 for n in sizes)
    if draft is None:
        return CostTable(setup, sizes, verifying, graphs=tuple(graphs))
    few, many = rows[0], rows[-1]
    least, largest = (drafter[n] * 1e6 / drafted for n in (few, many))
    each = max(largest - least, 0.0) / max(many - few, 1)
    base = max(least - few * each, 0.0)
    return CostTable(
        setup, sizes, verifying, draft_token_us=base, draft_row_us=each, graphs=tuple(graphs)
    )
