"""What a step costs, by the tokens it verifies and by whether the model drafter ran.

A table is a measurement of one set-up (engine, models, precision, device) and says so: it is never
applied to another.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

MAX_TOKENS: Final = 4096
"""Tokens of a step the dense table reaches to; beyond it the last slope goes on."""


@dataclass(frozen=True)
class CostTable:
    """Microseconds of a step, or any one unit.

    ``verify_us[i]`` is the time of a step that runs ``tokens[i]`` tokens through the target
    (ascending, the first is 1), linear in between. A step whose drafter makes ``k`` tokens for
    ``b`` requests adds ``draft_us + draft_token_us * k + draft_row_us * k * b``.
    """

    setup: str
    tokens: tuple[int, ...]
    verify_us: tuple[float, ...]
    draft_us: float = 0.0
    draft_token_us: float = 0.0
    draft_row_us: float = 0.0
    dense: Floats = field(init=False, compare=False, repr=False)
    """float64 [MAX_TOKENS + 1]: time of a step by its tokens, derived from the rest."""

    def __post_init__(self) -> None:
        """Build the dense form.

        Raises:
            ValueError: the grid does not ascend from 1, or a time is not finite and positive.
        """
        ascending = all(a < b for a, b in zip(self.tokens, self.tokens[1:], strict=False))
        if not self.tokens or self.tokens[0] != 1 or not ascending:
            raise ValueError(f"cost table over {self.tokens}: tokens must ascend from 1")
        times = np.array(self.verify_us, np.float64)
        if times.shape != (len(self.tokens),) or not (np.isfinite(times) & (times > 0)).all():
            raise ValueError("cost table: one finite positive time for each entry of tokens")
        times = _ascending(times)
        grid = np.arange(MAX_TOKENS + 1)
        dense = np.interp(grid, self.tokens, times)
        if len(times) > 1:
            slope = (times[-1] - times[-2]) / (self.tokens[-1] - self.tokens[-2])
            dense += np.maximum(grid - self.tokens[-1], 0) * slope
        dense.setflags(write=False)
        object.__setattr__(self, "dense", dense)

    def drafting(self, k: int, batch: int) -> float:
        """Time the model drafter adds to a step for ``k`` tokens of ``batch`` requests."""
        if not k:
            return 0.0
        return self.draft_us + k * (self.draft_token_us + self.draft_row_us * batch)


def _ascending(times: Floats) -> Floats:
    """The times nearest to ``times`` of which none is below the one before (isotonic regression).

    More tokens never cost less, but a noisy measurement may say so; the largest so far would let
    one slow measurement raise all that follow.
    """
    n = len(times)
    sums = np.concatenate([[0.0], np.cumsum(times)])
    first, last = np.arange(n)[:, None], np.arange(n)[None, :]
    with np.errstate(divide="ignore", invalid="ignore"):
        means = np.where(first <= last, (sums[1:] - sums[:-1, None]) / (last + 1 - first), np.inf)
    lowest = np.minimum.accumulate(means[:, ::-1], axis=1)[:, ::-1]  # over all ends from i on
    ascending: Floats = np.where(first <= last, lowest, -np.inf).max(axis=0)
    return ascending


NOMINAL: Final = CostTable("nominal", (1, MAX_TOKENS), (1.0, 1.0 + 0.006 * (MAX_TOKENS - 1)))
"""In units of a plain step: 32 more tokens cost a fifth more, the drafter nothing. What stands in
until a machine has been measured."""
