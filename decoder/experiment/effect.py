"""How much faster one side is than another, with an interval that may be read at any moment.

The rounds that the same requests were in are a pair: what both sides made of them. A dozen rounds
fall into one answer, and what is special about it is in all of them, so they are no independent
word each. The effect is the ratio of rates over all pairs, tokens a second over tokens a second;
its interval is an asymptotic confidence sequence (Waudby-Smith et al., "Time-uniform central limit
theory and asymptotic confidence sequences", arXiv 2103.06476): it holds at all times at once, so
whoever looks after each round and stops when he likes it is wrong no more often than ``ALPHA``.
That rests on a spread which is known; of few pairs it is not, so the interval is widened as
Student's is.

Which stretch of text falls to whom is drawn by lot, so a side that got the more copyable ones was
lucky; and one that follows a copying side begins where a copy broke off. How copyable a stretch was
is known (``foretold``), and does not depend on who decided. What of the pairs is explained by how
far each side's stretches lie from what both had together is taken off, as by control variates (Lin,
"Agnostic notes on regression adjustments to experimental data", arXiv 1208.2301).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from decoder.contracts.trials import Block, Round

ALPHA: Final = 0.05
NORMAL: Final = NormalDist().inv_cdf(1.0 - ALPHA / 2.0)
FEWEST: Final = 12
"""Pairs before an interval is given at all: it rests on a central limit."""
FEWEST_AT_END: Final = 8
"""The same of an interval that is read once, which is not widened for every earlier look."""
TIGHTEST: Final = 100
"""Pairs at which the interval is tightest among its kind."""
Floats = NDArray[np.float64]

LEAST: Final = 1e-9
"""Of tokens and of time: what is less is as good as none, and means of it come to 0."""
WIDTH: Final = 8
"""Numbers of a pair, half of them of each side."""
TOKENS, WALL, COST, FORETOLD = range(4)
"""Of these: tokens, wall time, time at the costs in force, tokens foretold."""
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


def effect(mine: ArrayLike, other: ArrayLike, at_end: bool = False) -> Effect:
    """Rate of the one side over the other's.

    Args:
        mine: float [n, 2 or 3], tokens, time and tokens foretold of one side, a row a pair.
        other: of the other side, in the same pairs.
        at_end: the pairs are of a time or of a number that was fixed beforehand, and are looked at
            once: then Student's interval does, half as wide where pairs are few.
    """
    a, b = (np.asarray(side, np.float64) for side in (mine, other))
    if not a.size:
        return UNKNOWN
    good = (a[:, :2] >= LEAST).all(axis=1) & (b[:, :2] >= LEAST).all(axis=1)
    a, b = a[good], b[good]
    n = len(a)
    if not n:
        return UNKNOWN
    x, y = a.mean(axis=0), b.mean(axis=0)
    log = math.log(x[0] / x[1]) - math.log(y[0] / y[1])
    if n < (FEWEST_AT_END if at_end else FEWEST):
        return Effect(_exp(log), 0.0, math.inf, n)
    # What each pair does to the ratio of totals, to first order.
    pulls = (a[:, 0] / x[0] - a[:, 1] / x[1]) - (b[:, 0] / y[0] - b[:, 1] / y[1])
    by_luck, known = _by_luck(pulls, a, b)
    log -= float(by_luck.mean())
    spread = pulls - by_luck
    wide = _at_end(n, known) if at_end else _widening(n, known)
    half = float(spread.std(ddof=1 + known)) * wide
    return Effect(_exp(log), _exp(log - half), _exp(log + half), n)


def _by_luck(pulls: Floats, a: Floats, b: Floats) -> tuple[Floats, int]:
    """What of each pull [n] is explained by how copyable the text was that fell to each side, and
    how many coefficients that took: 0 where nobody tells."""
    foretold = (a[:, 2:].sum() + b[:, 2:].sum()) / (a[:, 0].sum() + b[:, 0].sum())
    if not foretold:
        return np.zeros(len(pulls)), 0
    luck = np.stack([side[:, 2] - foretold * side[:, 0] for side in (a, b)], axis=1)
    if not np.isfinite(luck).all():
        return np.zeros(len(pulls)), 0
    centred = luck - luck.mean(axis=0)
    found, _, rank, _ = np.linalg.lstsq(centred, pulls - pulls.mean(), rcond=None)
    return luck @ found, int(rank)


def effect_of(
    rounds: Iterable[Round], mine: str, other: str, at_end: bool = False, time: int = WALL
) -> Effect:
    """:func:`effect` of two sides over the rounds in which both took part, by wall time or by that
    at the costs in force; rounds of the same requests are one pair."""
    summed: dict[tuple[str, int], NDArray[np.float64]] = {}
    for played in rounds:
        numbers = pair_of(played.block(mine), played.block(other))
        if numbers:
            key = unit_of(played)
            summed[key] = summed.get(key, 0.0) + np.array(numbers)
    return effect_in(np.array(list(summed.values())).reshape(-1, WIDTH), time, at_end)


def effect_in(pairs: NDArray[np.float64], time: int, at_end: bool = False) -> Effect:
    """:func:`effect` of pairs [n, WIDTH] by their wall time or by that at the costs in force."""
    columns = [TOKENS, time, FORETOLD]
    return effect(pairs[:, columns], pairs[:, WIDTH // 2 :][:, columns], at_end)


def pair_of(mine: Block | None, other: Block | None) -> tuple[float, ...]:
    """WIDTH numbers of two blocks; none where one of them is missing, or took in nothing."""
    if mine is None or other is None or not (mine.tokens and other.tokens):
        return ()
    return tuple(
        number for block in (mine, other)
        for number in (block.tokens, block.us, block.cost_us, min(block.foretold, block.tokens))
    )  # fmt: skip


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


def _widening(n: int, known: int = 0) -> float:
    """Half the interval after ``n`` pairs, in standard deviations of one, the spread not known, nor
    so many coefficients ``known`` beforehand."""
    return _students(_boundary(n) * math.sqrt(n), n - 1 - known) / math.sqrt(n)


def _at_end(n: int, known: int) -> float:
    """The same for one look: Student's, widened as a jackknife is, by the share that a pair has in
    the means that it is held against."""
    return _students(NORMAL, n - 1 - known) * math.sqrt(n) / (n - 1)


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
