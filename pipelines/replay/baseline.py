"""The best of several rules, picked on one half of the prompts and compared with on the other.

A rival that is picked on the very prompts it is compared on has chance on its side: of ten rules
that are equally good, one is always ahead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

Spent = tuple[NDArray[np.float64], NDArray[np.float64]]
"""Tokens [n] of each of n prompts, and the time [n] that they took."""

DRAWS: Final = 2000
SEED: Final = 42


@dataclass(frozen=True)
class Against:
    """Rate over that of the picked rivals, with its 95% interval over prompts; ``rivals`` are what
    was best on the prompts in odd places, and so stands against those in even ones, and the other
    way round.
    """

    ratio: float
    low: float
    high: float
    rivals: tuple[str, str]


def against_best(mine: Spent, rules: Mapping[str, Spent]) -> Against | None:
    """``mine`` over the best of ``rules`` on the same prompts; None of fewer than two prompts, or
    where nothing was decoded.
    """
    n = len(mine[0])
    if n < 2 or not rules:
        return None
    even = np.arange(n) % 2 == 0
    picked = tuple(_best(rules, part) for part in (~even, even))
    tokens, time = (
        np.where(even, of_even, of_odd)
        for of_even, of_odd in zip(rules[picked[0]], rules[picked[1]], strict=True)
    )
    found = interval(mine, (tokens, time))
    if found is None:
        return None
    ratio = float(mine[0].sum() / mine[1].sum() / (tokens.sum() / time.sum()))
    return Against(ratio, *found, (picked[0], picked[1]))


def interval(mine: Spent, theirs: Spent) -> tuple[float, float] | None:
    """95% bootstrap interval of the ratio of both rates, prompts drawn anew in pairs."""
    n = len(mine[0])
    if n < 2:
        return None
    drawn = np.random.default_rng(SEED).integers(0, n, (DRAWS, n))
    sums = np.stack([c[drawn].sum(axis=1) for c in (*mine, *theirs)])
    tokens, time, others, other_time = sums[:, (sums[[0, 2]] > 0).all(axis=0)]
    if not len(tokens):
        return None
    ratios = tokens / time / (others / other_time)
    low, high = np.percentile(ratios, [2.5, 97.5])
    return float(low), float(high)


def _best(rules: Mapping[str, Spent], part: NDArray[np.bool_]) -> str:
    def rate(name: str) -> float:
        tokens, time = rules[name]
        spent = float(time[part].sum())
        return float(tokens[part].sum()) / spent if spent else 0.0

    return max(rules, key=rate)
