"""Ratio of two variants' decoding rates (tokens a second), with an anytime-valid interval.

Rounds of the same requests form a cluster, which counts as one pair of observations: the rounds of
one answer are correlated. The interval is an asymptotic confidence sequence (Waudby-Smith et al.,
"Time-uniform central limit theory and asymptotic confidence sequences", arXiv 2103.06476). It holds
at all times at once: a test after every round, stopped at any of them, errs with probability
``ALPHA`` at most. The sequence assumes a known variance; with few pairs it is estimated, so the
interval is widened as Student's is.

Control variates reduce the variance (Lin, "Agnostic notes on regression adjustments to experimental
data", arXiv 1208.2301). Blocks of text are assigned at random, so one variant may get the more
copyable ones, or begin where the other's copy broke off. The covariate (``foretold``) is the number
of tokens that a copy was predicted to give, whoever decided. Regressed out is each variant's
deviation from the mean of both.
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
"""Fewest pairs for an interval: it rests on a central limit."""
FEWEST_AT_END: Final = 8
"""Fewest pairs for an interval that is read once, and not widened for earlier looks."""
TIGHTEST: Final = 24
"""Pairs at which the confidence sequence is tightest: decisions fall at 12 to 60, and at 24 it is
an eighth narrower than one that is tightest at 100. At 128 it is wider by a twentieth."""
Floats = NDArray[np.float64]

LEAST: Final = 1e-9
"""Fewest tokens, and least time in us, of a pair that counts: means of less underflow to 0."""
WIDTH: Final = 8
"""Columns of a pair, half of them for each variant."""
TOKENS, WALL, COST, FORETOLD = range(4)
"""Columns of a variant: tokens, wall time, time by the cost model (both in us), covariate."""
UNTOLD_SECONDS: Final = 30.0
"""Length of a cluster of a worker that reports none."""
MOST_PAIRS: Final = 1e7
REACH: Final = 50.0
"""Largest absolute logarithm of a ratio: exp overflows at 709, and the rounds come from a topic
that others may write to."""


@dataclass(frozen=True)
class Effect:
    """Rate of one variant over another's, from ``pairs`` independent pairs.

    ``low`` and ``high`` are 0 and infinite with too few pairs.
    """

    ratio: float
    low: float
    high: float
    pairs: int


UNKNOWN: Final = Effect(1.0, 0.0, math.inf, 0)


def effect(mine: ArrayLike, other: ArrayLike, at_end: bool = False) -> Effect:
    """Rate of one variant over the other's.

    Args:
        mine: float [n, 2 or 3]: tokens, time and covariate of one variant, a row a pair.
        other: those of the other variant, in the same pairs.
        at_end: the end of the comparison was fixed beforehand, and the interval is read once. It is
            then Student's, half as wide with few pairs.
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
    # Influence of each pair on the log ratio of totals, to first order (delta method).
    influence = (a[:, 0] / x[0] - a[:, 1] / x[1]) - (b[:, 0] / y[0] - b[:, 1] / y[1])
    explained, fitted = _explained(influence, a, b)
    log -= float(explained.mean())
    residuals = influence - explained
    width = _half_width_at_end(n, fitted) if at_end else _half_width(n, fitted)
    half = float(residuals.std(ddof=1 + fitted)) * width
    return Effect(_exp(log), _exp(log - half), _exp(log + half), n)


def gain_effect(gains: ArrayLike, steps: ArrayLike) -> Effect:
    """Relative gain in rate by counterfactual outcomes, as a ratio.

    Args:
        gains: float [n], plain steps that one policy's choices save over another's, a cluster each.
        steps: float [n], plain steps that the other's choices take.
    """
    x, t = (np.asarray(column, np.float64) for column in (gains, steps))
    n, mean = len(x), float(t.mean()) if len(t) else 0.0
    if not mean > 0.0:
        return UNKNOWN
    gain = float(x.mean()) / mean
    if n < FEWEST:
        return Effect(1.0 + gain, 0.0, math.inf, n)
    half = float((x - gain * t).std(ddof=1)) / mean * _half_width(n)
    return Effect(1.0 + gain, 1.0 + gain - half, 1.0 + gain + half, n)


def _explained(influence: Floats, a: Floats, b: Floats) -> tuple[Floats, int]:
    """The part of each pair's influence [n] that a regression on both variants' covariates
    explains, and the number of coefficients; 0 without covariates."""
    mean = (a[:, 2:].sum() + b[:, 2:].sum()) / (a[:, 0].sum() + b[:, 0].sum())
    if not mean:
        return np.zeros(len(influence)), 0
    covariates = np.stack([variant[:, 2] - mean * variant[:, 0] for variant in (a, b)], axis=1)
    if not np.isfinite(covariates).all():
        return np.zeros(len(influence)), 0
    centred = covariates - covariates.mean(axis=0)
    slopes, _, rank, _ = np.linalg.lstsq(centred, influence - influence.mean(), rcond=None)
    return covariates @ slopes, int(rank)


def effect_of(
    rounds: Iterable[Round], mine: str, other: str, at_end: bool = False, time: int = WALL
) -> Effect:
    """:func:`effect` of two variants over the rounds in which both took part, by column ``time``;
    the rounds of a cluster are one pair."""
    summed: dict[tuple[str, int], NDArray[np.float64]] = {}
    for finished in rounds:
        pair = pair_of(finished.block(mine), finished.block(other))
        if pair:
            cluster = unit_of(finished)
            summed[cluster] = summed.get(cluster, 0.0) + np.array(pair)
    return effect_in(np.array(list(summed.values())).reshape(-1, WIDTH), time, at_end)


def effect_in(pairs: NDArray[np.float64], time: int, at_end: bool = False) -> Effect:
    """:func:`effect` of pairs [n, WIDTH] by column ``time``, ``WALL`` or ``COST``."""
    columns = [TOKENS, time, FORETOLD]
    return effect(pairs[:, columns], pairs[:, WIDTH // 2 :][:, columns], at_end)


def pair_of(mine: Block | None, other: Block | None) -> tuple[float, ...]:
    """The pair of two blocks, ``WIDTH`` numbers; empty where a block is missing or empty."""
    if mine is None or other is None or not (mine.tokens and other.tokens):
        return ()
    return tuple(
        number for block in (mine, other)
        for number in (block.tokens, block.us, block.cost_us, min(block.foretold, block.tokens))
    )  # fmt: skip


def unit_of(finished: Round) -> tuple[str, int]:
    """The cluster of a round, whose rounds had requests in common. Where the worker reports none,
    it is a window of ``UNTOLD_SECONDS``."""
    cluster = finished.unit
    window = -1 - int(finished.time / UNTOLD_SECONDS)
    return finished.life, window if cluster is None else cluster


def pairs_to_tell(found: Effect, loss: float) -> float:
    """Pairs, like those of ``found``, that exclude a ``loss`` for a variant of the same speed;
    infinite where there is no interval yet."""
    if not math.isfinite(found.high):
        return math.inf
    spread = math.log(found.high / found.low) / _half_width(found.pairs)
    n = float(FEWEST)
    while spread * _half_width(int(n)) > -2.0 * math.log1p(-loss) and n < MOST_PAIRS:
        n *= 1.1
    return n


def _exp(log: float) -> float:
    return math.exp(min(max(log, -REACH), REACH))


def _half_width(n: int, fitted: int = 0) -> float:
    """Half the interval after ``n`` pairs, in estimated standard deviations of a pair, with
    ``fitted`` regression coefficients."""
    return _students(_boundary(n) * math.sqrt(n), n - 1 - fitted) / math.sqrt(n)


def _half_width_at_end(n: int, fitted: int) -> float:
    """The same for one look: Student's, widened as a jackknife is, since each pair is part of the
    means that it is compared with."""
    return _students(NORMAL, n - 1 - fitted) * math.sqrt(n) / (n - 1)


def _boundary(n: int) -> float:
    """Half the interval after ``n`` pairs with a known standard deviation, in units of it:
    equation 9 of the paper, with the parameter of its appendix B that is tightest at
    ``TIGHTEST``."""
    bound = -2.0 * math.log(ALPHA)
    weight = (bound + math.log(bound + 1.0)) / TIGHTEST
    spread = n * weight + 1.0
    return math.sqrt(2.0 * spread / (n * n * weight) * math.log(math.sqrt(spread) / ALPHA))


def _students(z: float, freedom: int) -> float:
    """The quantile of Student's distribution that corresponds to the normal quantile ``z``
    (Cornish and Fisher's expansion, Abramowitz and Stegun 26.7.5)."""
    first = (z**3 + z) / 4.0
    second = (5.0 * z**5 + 16.0 * z**3 + 3.0 * z) / 96.0
    return z + first / freedom + second / freedom**2
