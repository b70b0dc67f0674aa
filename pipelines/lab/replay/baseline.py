"""The best of several rules, picked on one half of the prompts and compared with on the other.

A rival that is picked on the very prompts it is compared on has chance on its side: of ten rules
that are equally good, one is always ahead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipelines.stats import Spent, interval


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


def _best(rules: Mapping[str, Spent], part: NDArray[np.bool_]) -> str:
    def rate(name: str) -> float:
        tokens, time = rules[name]
        spent = float(time[part].sum())
        return float(tokens[part].sum()) / spent if spent else 0.0

    return max(rules, key=rate)
