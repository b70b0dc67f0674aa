"""What a choice costs and what it brings: the one definition.

A **step** runs one token of each of its requests through the target, and their drafts with them::

    step_time = verifying(rows + drafts) + drafting(drafted, rows) + proposing(rows)

Where it also reads prompts, its drafts cost what they add to that: ``verifying(rows + beside +
drafts) - verifying(rows + beside)``. What the reading takes is left out, since it is the same
whatever is chosen, and so is what a token is worth: one more that is committed saves a part of a
step that would have come, and where prompts are read now and then that is one without.

A **request pays** its part of the time that the step would take without drafts, for its own draft
tokens the mean price of all those of the step, and its part of what the drafter took. So the parts
of a step's requests add up to the step. A choice **brings** committed tokens, each of which is
worth the time it would otherwise take (:func:`value_of`).

The rule (``policy.rule``), the floor's outcomes, a worker's rate and the learner all price with
these functions; the compiled step of a worker (``decoder.policy.loops``) compiles them. A
table is a measurement of one set-up (engine, models, precision, device) and says so: it is never
applied to another.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

MAX_TOKENS: Final = 4096
"""Tokens of a step that the dense table reaches to; beyond it its last slope goes on."""
FEW: Final = 8
"""Tokens up to which every size of a step is timed, and below which times need not ascend: on one
processor a step of 1, 2, 4, 6 and 8 tokens took 19.3, 21.0, 18.2, 18.7 and 21.7 ms. Beyond, what
does not ascend is noise."""
TAIL: Final = 256
"""Tokens at the end of the dense table that its last slope is taken over: a step of graph sizes has
none in one token."""


def verifying(tokens: Any, dense: Floats) -> Any:
    """Time of running so many tokens through the target, integers of any shape, by a table's dense
    form; behind its end the last slope goes on."""
    last = len(dense) - 1
    beyond = np.maximum(tokens - last, 0)
    return dense[np.minimum(tokens, last)] + beyond * (dense[last] - dense[last - TAIL]) / TAIL


def drafting_time(k: int, rows: Any, drafting: tuple[float, float, float]) -> Any:
    """Time that the model drafter adds to a step for ``k`` tokens of each of so many requests, by
    a table's :attr:`CostTable.prices`."""
    return drafting[0] + k * (drafting[1] + drafting[2] * rows) if k else 0.0


def token_value(rows: Any, rate: Any, dense: Floats) -> Any:
    """Time that a committed token of a step of ``rows`` requests is worth.

    Args:
        rate: tokens a request commits in the time of a step that verifies no draft.
    """
    return verifying(rows, dense) / (rate * rows)


def part(
    rows: Any, length: Any, drafts: Any, drafted: Any, drafting: Any, beside: Any, dense: Floats
) -> Any:
    """What one request pays of a step, or each of several; integers but for ``drafted``.

    Args:
        rows: requests in the step.
        length: of them this one's draft tokens.
        drafts: draft tokens of all.
        drafted: time that the model drafter took, if this request asked for it, else 0.
        drafting: requests that asked.
        beside: tokens of prompts that the step reads.
        dense: of the cost table.
    """
    above = verifying(rows + beside + drafts, dense) - verifying(rows + beside, dense)
    above = above * (length / np.maximum(drafts, 1))
    return verifying(rows, dense) / rows + above + drafted / np.maximum(drafting, 1)


def padded(tokens: int, graphs: Sequence[int]) -> int:
    """Tokens that a step of so many really runs: the next of the graph sizes, if there is one."""
    at = bisect_left(graphs, tokens)
    return graphs[at] if at < len(graphs) else tokens


@dataclass(frozen=True)
class CostTable:
    """Microseconds of a step, or any one unit.

    ``verify_us[i]`` is the time of a step that runs ``tokens[i]`` tokens through the target
    (ascending, the first is 1), linear in between; up to the largest of ``graphs`` a step takes
    what the next of these sizes takes, to which its engine pads it. A step whose drafter makes
    ``k`` tokens for ``b`` requests adds ``draft_us + draft_token_us * k + draft_row_us * k * b``,
    and proposing drafts for ``b`` requests, whatever is chosen of them, ``own_us * b``.
    """

    setup: str
    tokens: tuple[int, ...]
    verify_us: tuple[float, ...]
    draft_us: float = 0.0
    draft_token_us: float = 0.0
    draft_row_us: float = 0.0
    own_us: float = 0.0
    graphs: tuple[int, ...] = ()
    dense: Floats = field(init=False, compare=False, repr=False)
    """float64 [MAX_TOKENS + 1]: time of a step by its tokens, derived from the rest."""

    def __post_init__(self) -> None:
        """Build the dense form.

        Raises:
            ValueError: the grid does not ascend from 1, the graph sizes do not ascend, or a time is
                not finite and positive.
        """
        ascending = all(a < b for a, b in pairwise((0, *self.tokens)))
        if not self.tokens or self.tokens[0] != 1 or not ascending:
            raise ValueError(f"cost table over {self.tokens}: tokens must ascend from 1")
        if not all(a < b for a, b in pairwise((0, *self.graphs))):
            raise ValueError(f"cost table with graphs {self.graphs}: sizes must ascend")
        times = np.array(self.verify_us, np.float64)
        if times.shape != (len(self.tokens),) or not (np.isfinite(times) & (times > 0)).all():
            raise ValueError("cost table: one finite positive time for each entry of tokens")
        few = sum(n < FEW for n in self.tokens)
        times = np.concatenate([times[:few], _ascending(times[few:])])
        dense = np.interp(_GRID, self.tokens, times)
        if len(times) > 1:
            slope = max(times[-1] - times[-2], 0.0) / (self.tokens[-1] - self.tokens[-2])
            dense += np.maximum(_GRID - self.tokens[-1], 0) * slope
        if self.graphs:
            sizes = np.array((0, *self.graphs))
            sizes = sizes[sizes <= MAX_TOKENS]
            padded = sizes[np.searchsorted(sizes, _GRID[: sizes[-1] + 1])]
            dense[: sizes[-1] + 1] = dense[padded]
        dense.setflags(write=False)
        object.__setattr__(self, "dense", dense)

    def padded(self, tokens: int) -> int:
        """:func:`padded` to this table's graph sizes."""
        return padded(tokens, self.graphs)

    def time(self, tokens: int) -> float:
        """:meth:`verifying` of one size."""
        if tokens <= MAX_TOKENS:
            return float(self.dense[tokens])
        return float(verifying(tokens, self.dense))

    def verifying(self, tokens: ArrayLike) -> Floats:
        """Time of running so many tokens through the target, float64 of the shape of ``tokens``."""
        return verifying(np.rint(tokens).astype(np.int64), self.dense)  # type: ignore[no-any-return]

    @property
    def slope(self) -> float:
        """Time of one more token beyond the dense table."""
        return float(self.dense[-1] - self.dense[-1 - TAIL]) / TAIL

    @property
    def prices(self) -> tuple[float, float, float]:
        """Of drafting: a step's, a token's, and a token's of each request."""
        return self.draft_us, self.draft_token_us, self.draft_row_us

    def drafting(self, k: int, batch: int) -> float:
        """:func:`drafting_time` by this table."""
        return float(drafting_time(k, batch, self.prices))

    def proposing(self, rows: int) -> float:
        """Time the router takes to propose and decide for ``rows`` requests."""
        return self.own_us * rows


def step_time(
    costs: CostTable,
    rows: int,
    drafts: int,
    drafted: int = 0,
    *,
    proposes: bool = False,
    beside: int = 0,
) -> float:
    """Time of a step, without that of the prompts in it.

    Args:
        rows: requests in it.
        drafts: draft tokens that it verifies, of all of them.
        drafted: tokens that the model drafter makes for each; 0 if it does not run.
        proposes: whether drafts are looked for at all.
        beside: tokens of prompts that it reads.
    """
    time = costs.time(rows + beside + drafts) + costs.drafting(drafted, rows)
    if beside:
        time += costs.time(rows) - costs.time(rows + beside)
    return time + costs.proposing(rows) * proposes


def plain_steps(
    costs: CostTable,
    rows: int,
    drafts: int,
    drafted: int = 0,
    *,
    proposes: bool = False,
    beside: int = 0,
) -> float:
    """:func:`step_time` in steps of as many rows that verify and propose nothing; at least 1."""
    time = step_time(costs, rows, drafts, drafted, proposes=proposes, beside=beside)
    return max(time / step_time(costs, rows, 0), 1.0)


def gain_of(
    costs: CostTable,
    rows: int,
    accepted: float,
    drafts: int,
    drafted: int = 0,
    *,
    beside: int = 0,
) -> float:
    """Time that the drafts of a step were worth beyond what they cost, the router's own left out,
    were its ``accepted`` tokens, of all requests, made by steps that verify nothing.
    """
    worth = value_of(costs, rows, 1.0) * accepted
    time = step_time(costs, rows, drafts, drafted, beside=beside)
    return worth - (time - step_time(costs, rows, 0))


def part_of(
    costs: CostTable,
    rows: ArrayLike,
    length: ArrayLike,
    drafts: ArrayLike,
    drafted: ArrayLike = 0.0,
    drafting: ArrayLike = 1,
    beside: ArrayLike = 0,
) -> Floats:
    """:func:`part` by a table, float64 of the common shape of all; tokens are rounded."""
    rows, length, drafts = (np.rint(n).astype(np.int64) for n in (rows, length, drafts))
    drafted, drafting, beside = (np.asarray(n) for n in (drafted, drafting, beside))
    found: Floats = part(rows, length, drafts, drafted, drafting, beside, costs.dense)
    return found


def value_of(costs: CostTable, rows: int, rate: float) -> float:
    """:func:`token_value` by a table."""
    return float(token_value(rows, rate, costs.dense))


def _ascending(times: Floats) -> Floats:
    """The times nearest to ``times`` of which none is below the one before (isotonic regression).

    Many more tokens never cost less, but a noisy measurement may say so; the largest so far would
    let one slow measurement raise all that follow. Neighbours that violate the order are pooled.
    """
    levels: list[tuple[float, int]] = []
    for time in times.tolist():
        mean, count = time, 1
        while levels and levels[-1][0] > mean:
            before, more = levels.pop()
            mean, count = (mean * count + before * more) / (count + more), count + more
        levels.append((mean, count))
    return np.repeat([mean for mean, _ in levels], [count for _, count in levels])


_GRID: Final = np.arange(MAX_TOKENS + 1)


def nominal(setup: str, plain_us: float) -> CostTable:
    """The usual shape of a machine's steps, of which one of one token takes ``plain_us``: 32 more
    tokens cost a fifth more, the drafter nothing."""
    steepest = 1.0 + 0.006 * (MAX_TOKENS - 1)
    return CostTable(setup, (1, MAX_TOKENS), (plain_us, steepest * plain_us))


NOMINAL: Final = nominal("nominal", 1.0)
"""In units of a plain step. What stands in until a machine has been measured."""
