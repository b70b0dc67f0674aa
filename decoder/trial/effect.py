"""How much faster one side is than another, with an interval that may be read at any moment.

The rounds that the same requests were in are a pair: what both sides made of them. A dozen rounds
fall into one answer, and what is special about it is in all of them, so they are no independent
word each. The effect is the ratio of rates over all pairs, tokens a second over tokens a second;
its interval is an asymptotic confidence sequence (Waudby-Smith et al., "Time-uniform central limit
theory and asymptotic confidence sequences", arXiv 2103.06476): it holds at all times at once, so
whoever looks after each round and stops when he likes it is wrong no more often than ``ALPHA``.
That rests on a spread which is known; of few pairs it is not, so the interval is widened as
Student's is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from decoder.contracts.trials import Block, Round

ALPHA: Final = 0.05
FEWEST: Final = 12
"""Pairs before an interval is given at all: it rests on a central limit."""
TIGHTEST: Final = 100
"""Pairs at which the interval is tightest among its kind."""
LEAST: Final = 1e-9
"""Of tokens and of time: what is less is as good as none, and means of it come to 0."""
WIDTH: Final = 6
"""Numbers of a pair."""
UNTOLD_SECONDS: Final = 30.0
MOST_PAIRS: Final = 1e7
REACH: Final = 50.0
"""Logarithm beyond which a ratio is no estimate that anybody would believe: exp overflows at 709,
and rounds come from a topic, where anybody may have written them."""


@dataclass(frozen=True)
class Effect:
    """Rate of one side over another's, from ``pairs`` independent pairs.

    ``low`` and ``high`` are 0 and infinite where there are too few pairs to say.
    """

    ratio: float
    low: float
    high: float
    pairs: int


UNKNOWN: Final = Effect(1.0, 0.0, math.inf, 0)


def effect(mine: ArrayLike, other: ArrayLike) -> Effect:
    """Rate of the one side over the other's.

    Args:
        mine: float [n, 2], tokens and time of one side, a row a pair.
        other: of the other side, in the same pairs.
    """
    a, b = np.asarray(mine, np.float64).reshape(-1, 2), np.asarray(other, np.float64).reshape(-1, 2)
    good = (a >= LEAST).all(axis=1) & (b >= LEAST).all(axis=1)
    a, b = a[good], b[good]
    n = len(a)
    if not n:
        return UNKNOWN
    x, y = a.mean(axis=0), b.mean(axis=0)
    log = math.log(x[0] / x[1]) - math.log(y[0] / y[1])
    if n < FEWEST:
        return Effect(_exp(log), 0.0, math.inf, n)
    # What each pair does to the ratio of totals, to first order.
    pulls = (a[:, 0] / x[0] - a[:, 1] / x[1]) - (b[:, 0] / y[0] - b[:, 1] / y[1])
    half = float(pulls.std(ddof=1)) * _widening(n)
    return Effect(_exp(log), _exp(log - half), _exp(log + half), n)


def effect_of(rounds: Iterable[Round], mine: str, other: str) -> Effect:
    """:func:`effect` of two sides over the rounds in which both took part, by wall time; rounds of
    the same requests are one pair."""
    summed: dict[tuple[str, int], NDArray[np.float64]] = {}
    for played in rounds:
        numbers = pair_of(played.block(mine), played.block(other))
        if numbers:
            key = unit_of(played)
            summed[key] = summed.get(key, 0.0) + np.array(numbers)
    table = np.array(list(summed.values())).reshape(-1, WIDTH)
    return effect(table[:, :2], table[:, 3:5])


def pair_of(mine: Block | None, other: Block | None) -> tuple[float, ...]:
    """WIDTH numbers of two blocks: tokens, wall time and time at the costs in force of the one,
    then of the other; none where one of them is missing, or took in nothing."""
    if mine is None or other is None or not (mine.tokens and other.tokens):
        return ()
    return mine.tokens, mine.us, mine.cost_us, other.tokens, other.us, other.cost_us


def unit_of(played: Round) -> tuple[str, int]:
    """Rounds of the same unit had requests in common. Of a worker that tells no units, half a
    minute is one."""
    told = played.unit
    return played.life, -1 - int(played.time / UNTOLD_SECONDS) if told is None else told


def pairs_to_tell(found: Effect, loss: float) -> float:
    """Pairs like those of ``found`` after which a ``loss`` is excluded for a side that is as fast;
    infinite where there is no interval yet."""
    if not math.isfinite(found.high):
        return math.inf
    spread = math.log(found.high / found.low) / _widening(found.pairs)
    n = float(FEWEST)
    while spread * _widening(int(n)) > -2.0 * math.log1p(-loss) and n < MOST_PAIRS:
        n *= 1.1
    return n


def _exp(log: float) -> float:
    return math.exp(min(max(log, -REACH), REACH))


def _widening(n: int) -> float:
    """Half the interval after ``n`` pairs, in standard deviations of one, the spread not known."""
    return _students(_boundary(n) * math.sqrt(n), n - 1) / math.sqrt(n)


def _boundary(n: int) -> float:
    """Half the width after ``n`` pairs, in standard deviations of one: equation 9 of the paper,
    with the parameter of its appendix B that is tightest at ``TIGHTEST``."""
    known = -2.0 * math.log(ALPHA)
    weight = (known + math.log(known + 1.0)) / TIGHTEST
    spread = n * weight + 1.0
    return math.sqrt(2.0 * spread / (n * n * weight) * math.log(math.sqrt(spread) / ALPHA))


def _students(z: float, freedom: int) -> float:
    """The quantile of Student's distribution where the normal one's is ``z`` (Cornish and Fisher's
    expansion, Abramowitz and Stegun 26.7.5)."""
    first = (z**3 + z) / 4.0
    second = (5.0 * z**5 + 16.0 * z**3 + 3.0 * z) / 96.0
    return z + first / freedom + second / freedom**2
