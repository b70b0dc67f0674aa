"""Online cost table: a profile from worker start, corrected by a Kalman filter in every step.

Two things are unknown. The machine's pace is common to steps of all sizes and drifts. The deviation
of each size, and of drafting, from the profile hardly changes. Their logarithms are the state of
one Kalman filter (Kalman 1960, extended), so each step corrects what it is most informative about.
A size that is not run keeps pace with those that are; one never seen takes its neighbours'
deviation; a step that verifies and drafts corrects both by their uncertainty. Outliers get less
weight (as with Student's t) and raise the uncertainty of the pace. So a single stall changes
little, and a stall of many steps is not attributed to what they verified and drafted.

:class:`LiveCosts` belongs to the engine's thread; ``table`` is a reference to an immutable value.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from math import exp, isfinite, log, sqrt
from typing import Final

import numpy as np

from decoder.policy.pricing import FEW, MAX_TOKENS, NOMINAL, CostTable, Floats, padded

GRID: Final = (
    *(1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256),
    *(320, 384, 448, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048, 2560, 3072, 4096),
)
"""Step sizes in tokens with a deviation of their own; between them it is interpolated. Step time is
flat up to a size that depends on the machine, then steep. Decisions depend most on where that bend
is: an error of an eighth costs a tenth of the rate."""
PROPOSAL_WINDOW: Final = 32  # window, in steps, of the median and mean time of proposing
STALL: Final = 3.0
"""Multiple of the median at which a proposing time is clipped: the process was stalled."""
REFRESH: Final = 16  # steps between two tables; the first ones of a set-up are made at once

NOISE: Final = 0.1
"""Standard deviation of a step's time. This and the ones below are of logarithms: about a tenth."""
PACE: Final = 1.0
"""Prior standard deviation of the pace: profiling has the machine alone, serving shares it."""
DEVIATION: Final = 0.15  # prior standard deviation of a size's deviation
BEYOND: Final = 0.7
"""Additional prior standard deviation of a size twice the largest measured: between flat and
proportional. The variance is added again for each further doubling."""
OPTIMISM: Final = 0.5
"""Optimism bonus: sizes are taken to be cheaper by this share of their uncertainty relative to the
current size. An overestimated size would never be tried; one that was tried has none left."""
LENGTH_SCALE: Final = 2.0
"""Log ratio of two sizes at which the correlation of their deviations is 1/e."""
DRAFTING: Final = 1.0  # prior standard deviation of the drafter's deviation
PACE_DRIFT: Final = 0.02  # standard deviation of the pace's drift per step
DEVIATION_DRIFT: Final = 0.002  # standard deviation of a deviation's drift per step
OUTLIER: Final = 2.5
"""Innovations beyond this many standard deviations raise the noise in proportion."""
LEAST_DRAFTING: Final = 0.2
"""Lower bound of the drafter's deviation relative to verification's: drafting is never free."""
GUESS: Final = 0.1  # time of drafting a token without a profile, in plain steps


class LiveCosts:
    """Costs of one worker's set-up.

    ``prior`` is its profile, or the nominal table. With ``live`` false it never changes. With
    ``profiled`` false only its speed was measured, not its shape.

    Unmeasured sizes up to twice the largest measured one are extrapolated linearly, so they are
    tried. Larger ones take time in proportion to their tokens, the worst case: a decision never
    jumps far beyond what was measured.
    """

    def __init__(
        self, prior: CostTable = NOMINAL, live: bool = True, *, profiled: bool = True
    ) -> None:
        self.table = prior
        self.steps = 0
        self._live = live
        self._unit = prior is NOMINAL  # the first step sets the unit
        if live and not prior.drafting(1, 1):
            prior = replace(prior, draft_token_us=GUESS * prior.verify_us[0])
        self._prior = prior
        self._extend(prior.tokens[-1] if profiled and not self._unit else 1)
        self._own = deque[float](maxlen=PROPOSAL_WINDOW)  # proposing time a request, by step
        self._last = 1, 1, 0  # tokens, requests and drafted tokens of the last step
        self._current_size = 0  # grid index of its size
        self._mean = np.zeros(len(GRID) + 1)  # log deviations: of each size, then of drafting
        self._spread = _covariance(PACE, DEVIATION, DRAFTING)
        beyond = np.maximum(np.log2(GRID) - np.log2(self._measured), 0.0)
        self._spread[:-1, :-1] += BEYOND**2 * np.minimum(beyond[:, None], beyond[None, :])
        if live:
            # numba must not be imported before vLLM's worker starts (decoder.engines.vllm.plugin)
            from decoder.core.filtering import correct

            self._correct = correct
            if not self._unit:
                self.table = self._corrected()

    def observe(self, tokens: int, rows: int, drafted: int, us: float) -> None:
        """Update with a decode-only step (no prefill) of ``rows`` requests that ran ``tokens``
        through the target, drafts included, and for which the model drafter made ``drafted`` tokens
        each, 0 if it did not run; ``us`` microseconds from its decision to the next. Mutates, may
        replace ``table``."""
        if not (self._live and tokens > 0 and us > 0 and isfinite(us)):
            return
        if self._unit:
            self._set_unit(us / self._prior.time(tokens))
        self._last = tokens, rows, drafted
        expected, below, slope = self._predict(*self._last)
        innovation, mean, spread = log(us / expected), self._mean, self._spread
        noise = NOISE * max(abs(innovation) / (OUTLIER * NOISE), 1.0)
        spread += _DRIFT
        self._correct(mean, spread, below, slope, innovation, noise)
        verifying = (slope[0] * mean[below] + slope[1] * mean[below + 1]) / (slope[0] + slope[1])
        mean[-1] = max(mean[-1], verifying + _LEAST)
        if noise > NOISE:  # the machine may have changed, or less likely the drafter
            spread += innovation**2
            spread[-1, -1] += (slope[2] * innovation / 2.0) ** 2
        self.steps += 1
        self._current_size = below + (slope[1] > slope[0])
        further = tokens > self._measured
        if further:
            self._extend(min(tokens, MAX_TOKENS))
        if further or self.steps < REFRESH or self.steps % REFRESH == 0:
            self.table = self._corrected()

    def proposed(self, rows: int, us: float) -> None:
        """Update with the time of proposing and deciding for ``rows`` requests. Mutates."""
        if self._live and rows > 0 and us > 0 and isfinite(us):
            self._own.append(us / rows)

    @property
    def own_us(self) -> float:
        """Mean proposing time a request over the last steps, clipped at ``STALL`` medians."""
        if not self._own:
            return self._prior.own_us
        longest = STALL * sorted(self._own)[len(self._own) // 2]
        return sum(min(us, longest) for us in self._own) / len(self._own)

    def uncertainty(self) -> float:
        """Standard deviation of the log ratio of the last step's time to a plain step's."""
        if not self._live:
            return 0.0
        rows, difference = self._last[1], np.zeros(len(self._mean))
        for step, sign in ((self._last, 1.0), ((rows, rows, 0), -1.0)):
            _, below, slope = self._predict(*step)
            difference[[below, below + 1, -1]] += sign * np.array(slope)
        variance = float(difference @ self._spread @ difference)
        return sqrt(max(variance, 0.0))

    def _predict(
        self, tokens: int, rows: int, drafted: int
    ) -> tuple[float, int, tuple[float, float, float]]:
        """Predicted time of a step; index of the lower of two adjacent grid sizes; derivatives of
        the log time by the log deviations of both sizes and of drafting."""
        prior, mean = self._prior, self._mean
        tokens = padded(tokens, prior.graphs)
        size = _GRID_INDEX[min(tokens, GRID[-1]) - 1]
        below = min(int(size), len(GRID) - 2)
        above = size - below
        deviation = (1.0 - above) * float(mean[below]) + above * float(mean[below + 1])
        verifying = prior.time(tokens) * exp(deviation)
        drafting = prior.drafting(drafted, rows) * exp(mean[-1])
        share = verifying / (verifying + drafting)
        slope = (1.0 - above) * share, above * share, 1.0 - share
        return verifying + drafting, below, slope

    def _set_unit(self, us: float) -> None:
        prior, self._unit = self._prior, False
        self._prior = replace(
            prior,
            verify_us=tuple(us * time for time in prior.verify_us),
            draft_token_us=us * prior.draft_token_us,
        )

    def _extend(self, measured: int) -> None:
        """Set the largest ``measured`` step, in tokens, and the sizes of corrected tables."""
        self._measured, graphs = measured, self._prior.graphs
        sizes = {min(padded(n, graphs), 2 * measured) for n in (*GRID, *self._prior.tokens)}
        self._grid = np.array(sorted(sizes | {1}))
        self._grid_index = np.interp(
            np.log(np.minimum(self._grid, GRID[-1])), _LOG_GRID, _GRID_INDICES
        )

    def _corrected(self) -> CostTable:
        prior, here, grid = self._prior, self._current_size, self._grid
        spread = self._spread[:-1, :-1]
        variance = np.diag(spread) + spread[here, here] - 2.0 * spread[here]
        optimistic = self._mean[:-1] - OPTIMISM * np.sqrt(np.maximum(variance, 0.0))
        verify = prior.verifying(grid) * np.exp(
            np.interp(self._grid_index, _GRID_INDICES, optimistic)
        )
        least = prior.time(GRID[here]) * exp(self._mean[here])
        larger = grid > max(GRID[here], FEW)
        times, sizes = np.where(larger, np.maximum(verify, least), verify).tolist(), grid.tolist()
        if sizes[-1] < MAX_TOKENS:
            times.append(max(times) * MAX_TOKENS / sizes[-1])
            sizes.append(MAX_TOKENS)
        drafting = exp(self._mean[-1])
        return replace(
            prior,
            tokens=tuple(sizes),
            verify_us=tuple(times),
            draft_us=prior.draft_us * drafting,
            draft_token_us=prior.draft_token_us * drafting,
            draft_row_us=prior.draft_row_us * drafting,
            own_us=self.own_us,
        )


def _covariance(pace: float, deviation: float, drafting: float) -> Floats:
    """Covariance of the state, float64 [sizes + 1, sizes + 1], from standard deviations."""
    distance = np.abs(_LOG_GRID[:, None] - _LOG_GRID[None, :])
    covariance = np.zeros((len(GRID) + 1, len(GRID) + 1))
    covariance[:-1, :-1] = deviation**2 * np.exp(-distance / LENGTH_SCALE)
    covariance += pace**2  # common to all: the drafter runs on the same machine
    covariance[-1, -1] += drafting**2
    return covariance


_LOG_GRID: Final = np.log(GRID)
_GRID_INDICES: Final = np.arange(len(GRID))
_GRID_INDEX: Final = np.interp(
    np.log(np.arange(1, GRID[-1] + 1)), _LOG_GRID, _GRID_INDICES
).tolist()
_DRIFT: Final = _covariance(PACE_DRIFT, DEVIATION_DRIFT, DEVIATION_DRIFT)
_LEAST: Final = float(np.log(LEAST_DRAFTING))
