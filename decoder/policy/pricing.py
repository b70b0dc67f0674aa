"""The cost model: time of a step, cost share of a request, value of a committed token.

A **step** runs one token of each of its requests through the target, with their drafts::

    step_time = verifying(rows + drafts) + drafting(drafted, rows)

If the step also prefills prompt tokens, its drafts cost what they add: ``verifying(rows + prefill +
drafts) - verifying(rows + prefill)``. The prefill time itself is left out, because no choice
changes it. A token's value does not depend on prefill either: one more committed token saves part
of a later step, which usually has no prefill.

The **cost share** of a request is an equal part of the step without drafts, the mean price of the
step's draft tokens for each of its own, and its part of the drafter's time. The shares of a step
add up to its time. The **value** of a committed token is the time it would otherwise take
(:func:`token_value`).

The rule (``policy.rule``), the floor's outcomes, a worker's rate and the learner all use these
functions; ``decoder.policy.loops`` compiles them. A table is measured on one set-up (engine,
models, precision, device), which it names, and is never applied to another.
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
"""Largest step of the dense table, in tokens; times beyond it are extrapolated linearly."""
FEW: Final = 8
"""Step size in tokens up to which every size is timed, and below which times need not ascend: on
one processor steps of 1, 2, 4, 6 and 8 tokens took 19.3, 21.0, 18.2, 18.7 and 21.7 ms. Above it, a
descending time is noise."""
TAIL: Final = 256
"""Tokens at the end of the dense table that its last slope is taken over: between two graph sizes
the slope of a single token is zero."""


def verifying(tokens: Any, dense: Floats) -> Any:
    """Time of running ``tokens`` (integers of any shape) through the target, from a dense table,
    extrapolated linearly beyond its end."""
    last = len(dense) - 1
    beyond = np.maximum(tokens - last, 0)
    return dense[np.minimum(tokens, last)] + beyond * (dense[last] - dense[last - TAIL]) / TAIL


def drafting_time(k: int, rows: Any, drafting: tuple[float, float, float]) -> Any:
    """Time that the model drafter adds to a step: ``k`` tokens for each of ``rows`` requests, with
    the coefficients ``drafting`` (:attr:`CostTable.prices`)."""
    return drafting[0] + k * (drafting[1] + drafting[2] * rows) if k else 0.0


def token_value(rows: Any, rate: Any, dense: Floats) -> Any:
    """Value, in time, of a committed token in a step of ``rows`` requests, each of which commits
    ``rate`` tokens in the time of a step that verifies no draft."""
    return verifying(rows, dense) / (rate * rows)


def cost_share(
    rows: Any, length: Any, drafts: Any, drafting: Any, models: Any, prefill: Any, dense: Floats
) -> Any:
    """Cost share of one request, or of several; integers except ``drafting``.

    Args:
        rows: requests in the step.
        length: draft tokens of this request.
        drafts: draft tokens of all requests.
        drafting: time of the model drafter if this request uses it, else 0.
        models: requests that use it.
        prefill: prompt tokens in the step.
        dense: of the cost table.
    """
    above = verifying(rows + prefill + drafts, dense) - verifying(rows + prefill, dense)
    above = above * (length / np.maximum(drafts, 1))
    return verifying(rows, dense) / rows + above + drafting / np.maximum(models, 1)


def padded(tokens: int, graphs: Sequence[int]) -> int:
    """Tokens that the engine really runs for a step of ``tokens``: the next graph size, if any."""
    at = bisect_left(graphs, tokens)
    return graphs[at] if at < len(graphs) else tokens


@dataclass(frozen=True)
class CostTable:
    """Time of a step in microseconds, or in any one unit.

    ``verify_us[i]`` is the time of a step that runs ``tokens[i]`` tokens through the target
    (ascending from 1), linear in between. Up to the largest of ``graphs``, the engine pads a step
    to the next of these sizes. Drafting ``k`` tokens for ``b`` requests adds
    ``draft_us + draft_token_us * k + draft_row_us * k * b``. Proposing for ``b`` requests adds
    ``own_us * b``, whatever is chosen.
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
    """float64 [MAX_TOKENS + 1]: time of a step by its tokens, derived from the other fields."""

    def __post_init__(self) -> None:
        """Build the dense form.

        Raises:
            ValueError: ``tokens`` do not ascend from 1, ``graphs`` do not ascend, or a time is not
                finite and positive.
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

    def time(self, tokens: int) -> float:
        """:meth:`verifying` for one size."""
        if tokens <= MAX_TOKENS:
            return float(self.dense[tokens])
        return float(verifying(tokens, self.dense))

    def verifying(self, tokens: ArrayLike) -> Floats:
        """Time of running ``tokens`` through the target, float64 of their shape."""
        return verifying(np.rint(tokens).astype(np.int64), self.dense)  # type: ignore[no-any-return]

    @property
    def slope(self) -> float:
        """Time per token beyond the dense table."""
        return float(self.dense[-1] - self.dense[-1 - TAIL]) / TAIL

    @property
    def prices(self) -> tuple[float, float, float]:
        """Drafting coefficients: per step, per token, and per token and request."""
        return self.draft_us, self.draft_token_us, self.draft_row_us

    def drafting(self, k: int, batch: int) -> float:
        """:func:`drafting_time` with this table's coefficients."""
        return float(drafting_time(k, batch, self.prices))


def step_time(
    costs: CostTable, rows: int, drafts: int, drafted: int = 0, prefill: int = 0
) -> float:
    """Time of a step of ``rows`` requests that verifies ``drafts`` draft tokens and makes a model
    draft of ``drafted`` tokens for each, without its prefill and without the router's own time."""
    time = costs.time(rows + prefill + drafts) + costs.drafting(drafted, rows)
    return time + costs.time(rows) - costs.time(rows + prefill) if prefill else time


def _ascending(times: Floats) -> Floats:
    """Isotonic regression: the nearest non-decreasing times.

    More tokens never cost less, but noise may say so. A running maximum would let one slow
    measurement raise all later ones. Neighbours that violate the order are pooled instead.
    """
    levels: list[tuple[float, int]] = []
    for time in times.tolist():
        mean, count = time, 1
        while levels and levels[-1][0] > mean:
            previous, weight = levels.pop()
            mean, count = (mean * count + previous * weight) / (count + weight), count + weight
        levels.append((mean, count))
    return np.repeat([mean for mean, _ in levels], [count for _, count in levels])


_GRID: Final = np.arange(MAX_TOKENS + 1)


def nominal(setup: str, plain_us: float) -> CostTable:
    """A typical cost table whose step of one token takes ``plain_us``: 32 more tokens cost a fifth
    more, the drafter nothing."""
    steepest = 1.0 + 0.006 * (MAX_TOKENS - 1)
    return CostTable(setup, (1, MAX_TOKENS), (plain_us, steepest * plain_us))


NOMINAL: Final = nominal("nominal", 1.0)
"""In units of a plain step; the default until a machine has been measured."""
