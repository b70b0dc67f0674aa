"""Statistics shared by all benchmarks; a figure that cannot be computed is None.

Rates are compared in pairs: the same prompt, session or time window under two methods. The interval
of their ratio is the percentile bootstrap's over pairs (Efron and Tibshirani 1993, chapter 13).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

Spent = tuple[NDArray[np.float64], NDArray[np.float64]]
"""Tokens [n] of each of n prompts, and the time [n] they took."""

DRAWS: Final = 2000
SEED: Final = 42
LOOP: Final = 32  # an output loops if it repeats a run of this many tokens


def interval(mine: Spent, theirs: Spent) -> tuple[float, float] | None:
    """95% bootstrap interval of the ratio of two rates, resampling pairs of prompts. None for fewer
    than two prompts, or if nothing was decoded."""
    n = len(mine[0])
    if n < 2:
        return None
    drawn = np.random.default_rng(SEED).integers(0, n, (DRAWS, n))
    sums = np.stack([c[drawn].sum(axis=1) for c in (*mine, *theirs)])
    tokens, time, others, other_time = sums[:, (sums[[0, 2]] > 0).all(axis=0)]
    if not len(tokens):
        return None
    low, high = np.percentile(tokens / time / (others / other_time), [2.5, 97.5])
    return float(low), float(high)


def columns(pairs: Iterable[tuple[float, float]]) -> Spent:
    """Pairs of tokens and time, as columns."""
    tokens, time = np.array(list(pairs), float).reshape(-1, 2).T
    return tokens, time


def rate(pairs: Iterable[tuple[float, float]]) -> float | None:
    """Tokens a second over pairs of tokens and microseconds."""
    tokens, time = columns(pairs)
    return over(1e6 * float(tokens.sum()), float(time.sum())) or None


def over(part: float | None, whole: float | None) -> float | None:
    """``part / whole``, or None if ``whole`` is 0."""
    return None if part is None or not whole else part / whole


def median(values: Iterable[float | None]) -> float | None:
    """Median of the ``values`` that are not None."""
    known = [v for v in values if v is not None]
    return float(np.median(known)) if known else None


def loops(tokens: Sequence[int]) -> bool:
    """Whether ``tokens`` repeat a run of ``LOOP`` tokens, overlapping or not."""
    runs = [tuple(tokens[start : start + LOOP]) for start in range(len(tokens) - LOOP + 1)]
    return len(set(runs)) < len(runs)


@dataclass(frozen=True)
class Against:
    """The ratio of a rate to the best rivals', with its 95% interval over prompts.

    ``rivals`` are the best on the odd prompts, compared on the even ones, and the reverse. A rival
    chosen on the prompts it is compared on is favoured by chance.
    """

    ratio: float
    low: float
    high: float
    rivals: tuple[str, str]


def against_best(mine: Spent, rules: Mapping[str, Spent]) -> Against | None:
    """``mine`` over the best of ``rules`` on the same prompts. None for fewer than two prompts, or
    if nothing was decoded."""
    n = len(mine[0])
    if n < 2 or not rules:
        return None
    even = np.arange(n) % 2 == 0
    picked = tuple(_best(rules, part) for part in (~even, even))
    tokens, time = (
        np.where(even, of_even, of_odd)
        for of_even, of_odd in zip(rules[picked[0]], rules[picked[1]], strict=True)
    )
    bounds = interval(mine, (tokens, time))
    if bounds is None:
        return None
    ratio = float(mine[0].sum() / mine[1].sum() / (tokens.sum() / time.sum()))
    return Against(ratio, *bounds, (picked[0], picked[1]))


def _best(rules: Mapping[str, Spent], part: NDArray[np.bool_]) -> str:
    def rate(name: str) -> float:
        tokens, time = rules[name]
        spent = float(time[part].sum())
        return float(tokens[part].sum()) / spent if spent else 0.0

    return max(rules, key=rate)
