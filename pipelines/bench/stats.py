"""Figures that every benchmark makes alike; None where there is nothing to make one of."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

from pipelines.replay.baseline import interval

Spent = tuple[float, float]
"""Tokens, and the microseconds that they took."""
Interval = tuple[float, float]

LOOP: Final = 32
"""An output in which a run of this many tokens comes twice is one that loops."""


def over(part: float | None, whole: float | None) -> float | None:
    """``part`` divided by ``whole``, if that is not 0."""
    return None if part is None or not whole else part / whole


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Of ``values``, if there are any."""
    return float(np.percentile(values, percent)) if values else None


def quartiles(values: Sequence[float]) -> tuple[float, ...] | None:
    """First quartile, median and third quartile."""
    return tuple(map(float, np.percentile(values, [25, 50, 75]))) if values else None


def median(values: Iterable[float | None]) -> float | None:
    """Of those ``values`` that are known."""
    found = [v for v in values if v is not None]
    return statistics.median(found) if found else None


def rate(spent: Iterable[Spent]) -> float | None:
    """Tokens a second over all of ``spent``; None where nothing was decoded."""
    tokens = micros = 0.0
    for made, took in spent:
        tokens += made
        micros += took
    return tokens / micros * 1e6 if tokens and micros else None


def ratio_interval(mine: Sequence[Spent], theirs: Sequence[Spent]) -> Interval | None:
    """95% bootstrap interval of ``rate(mine) / rate(theirs)``, resampling them in pairs."""
    left, right = (np.array(side, float).reshape(-1, 2).T for side in (mine, theirs))
    return interval((left[0], left[1]), (right[0], right[1]))


def loops(tokens: Sequence[int]) -> bool:
    """Whether ``tokens`` hold the same run of ``LOOP`` tokens twice, overlapping or not."""
    runs = [tuple(tokens[start : start + LOOP]) for start in range(len(tokens) - LOOP + 1)]
    return len(set(runs)) < len(runs)
