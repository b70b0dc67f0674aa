"""The cost table in force: a profile from worker start, corrected by every decoding step.

Two things are unknown: how fast the machine is now, which is the same for steps of all sizes and
wanders, and how the time of each size, and of drafting, deviates from the profile, which hardly
changes. Their logarithms are the state of one Kalman filter (Kalman 1960, extended), so each step
corrects what it tells most about: a size that nobody runs for a while keeps pace with those that
are run, one never seen takes the deviation of its neighbours, and a step that verifies and drafts
is credited to both as far as either is in doubt. The further a step is from what was expected, the
less it is believed (as with Student's t), and the more the pace is in doubt: so a stalled one moves
little, and a machine that stalls for many is no price of what they verified and drafted.

:class:`LiveCosts` is written by the engine's thread and read by it; ``table`` is one reference to
an immutable value.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from math import exp, isfinite, log, sqrt
from typing import Final

import numpy as np

from decoder.policy.pricing import FEW, MAX_TOKENS, NOMINAL, CostTable, Floats

GRID: Final = (
    *(1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256),
    *(320, 384, 448, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048, 2560, 3072, 4096),
)
"""Tokens of a step that have a deviation of their own; that of sizes between them lies on a line. A
step's time is flat up to a size that hangs on the machine and steep behind it, and where that bend
lies is most of what a decision hangs on: an eighth of it is a tenth of the rate."""
OWN: Final = 32
"""Steps of which the median and the mean are what proposing takes."""
STALL: Final = 3.0
"""Times the median beyond which one of them counts for no more: the process stood still."""
REFRESH: Final = 16
"""Steps between two tables; the first of a set-up come at once."""

NOISE: Final = 0.1
"""Standard deviation of a step's time, as all that follow a logarithm: about a tenth."""
PACE: Final = 1.0
"""What the profile's pace may be off by: it is taken alone, and steps are served among others."""
DEVIATION: Final = 0.15
"""What a size may be off by beside that."""
BEYOND: Final = 0.7
"""What a size twice the largest one measured may be off by: between nothing more and all in
proportion. Sizes further on are off by that and by as much again for each doubling."""
HOPE: Final = 0.5
"""Of its doubt beside the size that runs, by which another one is believed cheaper: what is thought
too dear would never be made, and never be found out. A size that was tried has no doubt left."""
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


class LiveCosts:
    """Costs of one worker's set-up.

    ``prior`` is its profile, or the nominal table; with ``live`` false it stays in force. With
    ``profiled`` false it has the usual shape, of which the speed alone was measured.

    Of sizes that neither profile nor service has measured, the table expects twice the largest of
    those to go on with the last slope, so that they are tried, and what lies behind to take time in
    proportion to its tokens, which is the most it can: a decision never leaps to where nobody was.
    """

    def __init__(
        self, prior: CostTable = NOMINAL, live: bool = True, *, profiled: bool = True
    ) -> None:
        self.table = prior
        self.steps = 0
        self._live = live
        self._unit = prior is NOMINAL  # still to be set, by the first step
        if live and not prior.drafting(1, 1):
            prior = replace(prior, draft_token_us=GUESS * prior.verify_us[0])
        self._prior = prior
        self._measured = prior.tokens[-1]  # tokens of the largest such step
        if self._unit or not profiled:
            self._measured = 1
        self._own = deque[float](maxlen=OWN)  # of each request, step by step
        self._here = 0
        self._state = np.zeros(len(GRID) + 1)  # logarithms: of each size, then of drafting
        self._spread = _covariance(PACE, DEVIATION, DRAFTING)
        beyond = np.maximum(np.log2(GRID) - np.log2(self._measured), 0.0)
        self._spread[:-1, :-1] += BEYOND**2 * np.minimum(beyond[:, None], beyond[None, :])
        self._sizes = 0, np.zeros(0, np.int64), np.zeros(0), np.zeros(0)
        if live:
            # numba must not be there before vLLM's worker begins (decoder.engines.vllm.plugin)
            from decoder.core.filtering import correct

            self._correct = correct
            if not self._unit:
                self.table = self._corrected()

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
            self._set_unit(us / self._prior.time(tokens))
        expected, below, slope = self._foreseen(tokens, rows, drafted)
        surprise = log(us / expected)
        noise = NOISE * max(abs(surprise) / (BELIEVED * NOISE), 1.0)
        self._correct(self._state, self._spread, _DRIFT, below, slope, surprise, noise, _LEAST)
        if noise > NOISE:  # the machine may be another, and less likely the drafter
            self._spread += surprise**2
            self._spread[-1, -1] += (slope[2] * surprise / 2.0) ** 2
        self.steps += 1
        self._here = below + (slope[1] > slope[0])
        further = tokens > self._measured
        self._measured = max(self._measured, min(tokens, MAX_TOKENS))
        if further or self.steps < REFRESH or self.steps % REFRESH == 0:
            self.table = self._corrected()

    def proposed(self, rows: int, us: float) -> None:
        """Take in what proposing and deciding took for ``rows`` requests. Mutates."""
        if self._live and rows > 0 and us > 0 and isfinite(us):
            self._own.append(us / rows)

    @property
    def own_us(self) -> float:
        """Of a request, in the mean of the last steps; a stall counts as ``STALL`` usual ones."""
        if not self._own:
            return self._prior.own_us
        usual = STALL * sorted(self._own)[len(self._own) // 2]
        return sum(min(us, usual) for us in self._own) / len(self._own)

    def doubt(self, tokens: int, rows: int, drafted: int) -> float:
        """Standard deviation of the time of such a step over that of one that verifies nothing."""
        if not self._live:
            return 0.0
        apart = np.zeros(len(self._state))
        for step, sign in (((tokens, rows, drafted), 1.0), ((rows, rows, 0), -1.0)):
            _, below, (first, second, last) = self._foreseen(*step)
            apart[below] += sign * first
            apart[below + 1] += sign * second
            apart[-1] += sign * last
        return sqrt(max(float(apart @ self._spread @ apart), 0.0))

    def _foreseen(
        self, tokens: int, rows: int, drafted: int
    ) -> tuple[float, int, tuple[float, float, float]]:
        """Time of a step, and what its logarithm changes with the deviations of two sizes, of which
        the first is at that place, and of drafting."""
        tokens = self._prior.padded(tokens)
        size = _PLACES[min(tokens, GRID[-1]) - 1]
        below = min(int(size), len(GRID) - 2)
        above = size - below
        state = self._state
        deviation = (1.0 - above) * float(state[below]) + above * float(state[below + 1])
        verifying = self._prior.time(tokens) * exp(deviation)
        drafting = self._prior.drafting(drafted, rows) * exp(state[-1])
        share = verifying / (verifying + drafting)
        slope = (1.0 - above) * share, above * share, 1.0 - share
        return verifying + drafting, below, slope

    def _set_unit(self, us: float) -> None:
        prior, self._unit, self._sizes = self._prior, False, (0, *self._sizes[1:])
        self._prior = replace(
            prior,
            verify_us=tuple(us * time for time in prior.verify_us),
            draft_token_us=us * prior.draft_token_us,
        )

    def _corrected(self) -> CostTable:
        prior, here = self._prior, self._here
        if self._sizes[0] != 2 * self._measured:
            tried = 2 * self._measured
            found = {min(prior.padded(n), tried) for n in (*GRID, *prior.tokens)} | {1}
            grid = np.array(sorted(found))
            places = np.array(_PLACES)[np.minimum(grid, GRID[-1]) - 1]
            self._sizes = tried, grid, places, prior.verifying(grid)
        _, grid, places, plain = self._sizes
        spread = self._spread[:-1, :-1]
        apart = np.diag(spread) + spread[here, here] - 2.0 * spread[here]
        hoped = self._state[:-1] - HOPE * np.sqrt(np.maximum(apart, 0.0))
        verify = plain * np.exp(np.interp(places, _EACH, hoped))
        least = prior.time(GRID[here]) * exp(self._state[here])
        behind = grid > max(GRID[here], FEW)
        times = np.where(behind, np.maximum(verify, least), verify).tolist()
        sizes = grid.tolist()
        if sizes[-1] < MAX_TOKENS:
            times.append(max(times) * MAX_TOKENS / sizes[-1])
            sizes.append(MAX_TOKENS)
        drafting = exp(self._state[-1])
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
_EACH: Final = np.arange(len(GRID))
_DRIFT: Final = _covariance(WANDERS, CHANGES, CHANGES)
_LEAST: Final = float(np.log(LEAST_DRAFTING))
