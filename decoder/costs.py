"""The cost table in force: a profile from worker start, corrected by every decoding step.

Two things are unknown: how fast the machine is now, which is the same for steps of all sizes and
wanders, and how the time of each size, and of drafting, deviates from the profile, which hardly
changes. Their logarithms are the state of one Kalman filter (Kalman 1960, extended), so each step
corrects what it tells most about: a size that nobody runs for a while keeps pace with those that
are run, one never seen takes the deviation of its neighbours, and a step that verifies and drafts
is credited to both as far as either is in doubt. The further a step is from what was expected, the
less it is believed (as with Student's t), so a stalled one moves little, and what is said again
counts.

:class:`LiveCosts` is written by the engine's thread and read by it; ``table`` is one reference to
an immutable value.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import exp, isfinite, log, sqrt
from typing import Final

import numpy as np

from decoder.policy.pricing import NOMINAL, CostTable, Floats

GRID: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024, 2048)
"""Tokens of a step that have a time of their own; sizes between them lie on a line."""
REFRESH: Final = 16
"""Steps between two tables; the first of a set-up come at once."""

NOISE: Final = 0.1
"""Standard deviation of a step's time, as all that follow a logarithm: about a tenth."""
PACE: Final = 1.0
"""What the profile's pace may be off by: it is taken alone, and steps are served among others."""
DEVIATION: Final = 0.15
"""What a size may be off by beside that."""
REACH: Final = 2.0
"""Logarithm of the ratio of two sizes whose deviations are still related, by 1/e."""
DRAFTING: Final = 1.0
"""What drafting may be off by."""
WANDERS: Final = 0.02
"""How far the pace wanders in one step."""
CHANGES: Final = 0.002
"""How far a deviation does."""
BELIEVED: Final = 2.5
"""Standard deviations of the noise beyond which a surprise is taken to be noisier by as much."""
LEAST_DRAFTING: Final = 0.2
"""Cheapest that drafting is held beside verification, by the profile of both: a token of a draft
never becomes a gain."""
GUESS: Final = 0.1
"""Time of drafting a token without a profile, in plain steps."""

SIZES: Final = (1, 2, 4, 8, 16, 32, 64)
"""Tokens of the steps that a profile times."""
ROUNDS: Final = 4


def profile(
    setup: str,
    step: Callable[[int], None],
    draft: Callable[[int], None] | None = None,
    *,
    drafted: int = 1,
    rows: Sequence[int] = (1,),
    most: int = SIZES[-1],
) -> CostTable:
    """Time steps of ``SIZES`` tokens, in rounds of all sizes, and keep the fastest of each.

    Whatever else the machine does only ever adds to a time, and at start it does a lot.

    Args:
        step: runs so many tokens through the target, and waits for the device.
        draft: makes ``drafted`` tokens for each of so many requests; None without a model drafter.
        rows: requests that drafting is timed for, the first and the last of which make a line.
        most: the largest step there is.
    """
    sizes = tuple(n for n in SIZES if n <= most)
    target: dict[int, list[float]] = {n: [] for n in sizes}
    drafter: dict[int, list[float]] = {n: [] for n in rows}
    for _ in range(ROUNDS + 1):  # the first round pays for allocations
        for n in sizes:
            began = time.perf_counter()
            step(n)
            target[n].append((time.perf_counter() - began) * 1e6)
        if draft is not None:
            for n in rows:
                began = time.perf_counter()
                draft(n)
                drafter[n].append((time.perf_counter() - began) * 1e6 / drafted)
    verifying = tuple(min(target[n][1:]) for n in sizes)
    if draft is None:
        return CostTable(setup, sizes, verifying)
    few, many = rows[0], rows[-1]
    least, largest = (min(drafter[n][1:]) for n in (few, many))
    each = max(largest - least, 0.0) / max(many - few, 1)
    base = max(least - few * each, 0.0)
    return CostTable(setup, sizes, verifying, draft_token_us=base, draft_row_us=each)


class LiveCosts:
    """Costs of one worker's set-up.

    ``prior`` is its profile, or the nominal table; with ``live`` false it stays in force.
    """

    def __init__(self, prior: CostTable = NOMINAL, live: bool = True) -> None:
        self.table = prior
        self.steps = 0
        self._live = live
        self._unit = prior is NOMINAL  # still to be set, by the first step
        if live and not prior.drafting(1, 1):
            prior = replace(prior, draft_token_us=GUESS * prior.verify_us[0])
        self._prior = prior
        self._state = np.zeros(len(GRID) + 1)  # logarithms: of each size, then of drafting
        self._spread = _covariance(PACE, DEVIATION, DRAFTING)

    def observe(self, tokens: int, rows: int, drafted: int, us: float) -> None:
        """Take in a step of decoding alone (no prompt in it). Mutates, may replace ``table``.

        Args:
            tokens: run through the target, drafts included.
            rows: requests in the step.
            drafted: tokens the model drafter made for each request; 0 if it did not run.
            us: from this step's decision to the next.
        """
        if not (self._live and tokens > 0 and us > 0 and isfinite(us)):
            return
        if self._unit:
            self._set_unit(us / float(self._prior.dense[min(tokens, _LAST)]))
        expected, slope = self._foreseen(tokens, rows, drafted)
        self._spread += _DRIFT
        told = self._spread @ slope
        surprise = log(us / expected)
        noise = NOISE * max(abs(surprise) / (BELIEVED * NOISE), 1.0)
        variance = float(slope @ told) + noise**2
        self._state += told * (surprise / variance)
        least = float(self._state[:-1] @ slope[:-1]) / float(slope[:-1].sum()) + _LEAST
        self._state[-1] = max(self._state[-1], least)
        self._spread -= told[:, None] * (told / variance)

        self.steps += 1
        if self.steps < REFRESH or self.steps % REFRESH == 0:
            self.table = self._corrected()

    def doubt(self, tokens: int, rows: int, drafted: int) -> float:
        """Standard deviation of the time of such a step over that of one that verifies nothing."""
        if not self._live:
            return 0.0
        slope = self._foreseen(tokens, rows, drafted)[1] - self._foreseen(rows, rows, 0)[1]
        return sqrt(max(float(slope @ self._spread @ slope), 0.0))

    def _foreseen(self, tokens: int, rows: int, drafted: int) -> tuple[float, Floats]:
        """Time of a step, and what each part of the state changes of its logarithm."""
        size = _PLACES[min(tokens, GRID[-1]) - 1]
        below = min(int(size), len(GRID) - 2)
        above = size - below
        deviation = (1.0 - above) * self._state[below] + above * self._state[below + 1]
        verifying = float(self._prior.dense[min(tokens, _LAST)]) * exp(deviation)
        drafting = self._prior.drafting(drafted, rows) * exp(self._state[-1])
        share = verifying / (verifying + drafting)
        slope = np.zeros(len(self._state))
        slope[below], slope[below + 1], slope[-1] = (1 - above) * share, above * share, 1 - share
        return verifying + drafting, slope

    def _set_unit(self, us: float) -> None:
        prior, self._unit = self._prior, False
        self._prior = replace(
            prior,
            verify_us=tuple(us * time for time in prior.verify_us),
            draft_token_us=us * prior.draft_token_us,
        )

    def _corrected(self) -> CostTable:
        prior, factors = self._prior, np.exp(self._state)
        return replace(
            prior,
            tokens=GRID,
            verify_us=tuple((prior.dense[list(GRID)] * factors[:-1]).tolist()),
            draft_us=prior.draft_us * float(factors[-1]),
            draft_token_us=prior.draft_token_us * float(factors[-1]),
            draft_row_us=prior.draft_row_us * float(factors[-1]),
        )


def _covariance(pace: float, deviation: float, drafting: float) -> Floats:
    """Of the state, float64 [sizes + 1, sizes + 1], by the standard deviations of its parts."""
    apart = np.abs(_LOG_GRID[:, None] - _LOG_GRID[None, :])
    made = np.zeros((len(GRID) + 1, len(GRID) + 1))
    made[:-1, :-1] = deviation**2 * np.exp(-apart / REACH)
    made += pace**2  # of the machine: the drafter runs on the same
    made[-1, -1] += drafting**2
    return made


_LOG_GRID: Final = np.log(GRID)
_PLACES: Final = np.interp(
    np.log(np.arange(1, GRID[-1] + 1)), _LOG_GRID, np.arange(len(GRID))
).tolist()
_DRIFT: Final = _covariance(WANDERS, CHANGES, CHANGES)
_LEAST: Final = float(np.log(LEAST_DRAFTING))
_LAST: Final = len(NOMINAL.dense) - 1
