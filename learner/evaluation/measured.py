"""What a cycle costs on the machine that serves, and what the model draft yields there.

**Costs.** The time of a step is a line in the tokens it verified, plus what the arm adds::

    step_us = fixed_us + token_us * step_tokens + extra_us[arm]

``step_tokens`` counts every token the target ran, one per request and the drafts'. The line comes
from steps of arms cache and none (Theil-Sen over the medians of bins: one stalled step in ten moves
nothing); the drafter's time is the median of what model-arm steps took above the line. What a
request pays of a step is ``policy.pricing``'s to say, by the table of that line. In a batch that
mixes arms, a step's time is booked on each of its requests as if all had chosen alike: the
difference between the arms then comes out smaller than it is.

**Payoffs.** A cache draft's is its label, seen or in hindsight. The model draft's is seen only
where it was verified; ``learner.evaluation.tune.worth`` bounds it elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from decoder.policy.pricing import MAX_TOKENS, CostTable
from decoder.policy.rule import CACHE, MODEL, NONE
from learner.evaluation.independent import Choice, Situation, cost_shares
from learner.training.rows import UNKNOWN, Rows

MIN_ARM: Final = 20
"""Steps of an arm before its cost or payoff is believed: a median of fewer jumps."""
BINS: Final = 12
MIN_IN_BIN: Final = 3

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Costs:
    """Times in microseconds a step; ``extra_us`` [none, model, cache] is on top of the line.

    ``seen`` counts the steps observed by arm. ``measured`` is false for nominal costs, whose unit
    is one plain step.
    """

    fixed_us: float
    token_us: float
    extra_us: tuple[float, float, float] = (0.0, 0.0, 0.0)
    model_accepted: float = 0.0  # mean draft tokens accepted in a cycle of the model arm
    model_len: float = 0.0  # draft tokens such a cycle verifies
    seen: tuple[int, int, int] = (0, 0, 0)
    measured: bool = True

    @property
    def has_model(self) -> bool:
        """Whether a model drafter has been observed at all."""
        return self.seen[MODEL] >= MIN_ARM

    def outcome(
        self, rows: Rows, choice: Choice, model: ArrayLike | None = None
    ) -> tuple[Floats, Floats]:
        """Tokens committed [..., n] and time [..., n] of making ``choice`` [..., n] at ``rows``;
        ``model`` [..., n] tokens of a model draft are accepted, their mean if not given."""
        arms, lengths = choice.arms, choice.lengths
        of_cache_arm, of_model_arm = arms == CACHE, arms == MODEL

        def by_arm(of_cache: ArrayLike, of_model: ArrayLike) -> Floats:
            found: Floats = np.where(of_cache_arm, of_cache, np.where(of_model_arm, of_model, 0.0))
            return found

        accepted = self.model_accepted if model is None else model
        committed = 1.0 + by_arm(np.minimum(rows.accepted, lengths), accepted)
        drafts = by_arm(lengths, self.model_len)
        # The table holds the line of steps that verify nothing; cache steps may lie off it.
        drafted = by_arm(self.extra_us[CACHE] - self.extra_us[NONE], self._table.draft_us)
        batch = rows.batch_size
        return committed, cost_shares(self._table, batch, drafts, drafts, drafted, batch)

    @property
    def situation(self) -> Situation:
        """These costs as workers hold them, to decide with the functions that workers run."""
        return Situation(self._table, round(self.model_len) if self.has_model else 0)

    @cached_property
    def _table(self) -> CostTable:
        none, model, _ = self.extra_us
        ends = (1, MAX_TOKENS)
        times = tuple(self.fixed_us + none + self.token_us * t for t in ends)
        return CostTable("learned", ends, times, draft_us=max(model - none, 0.0))


NOMINAL: Final = Costs(fixed_us=1.0, token_us=0.006, measured=False)
"""A cache cycle of 32 drafted tokens costs a fifth more than a plain one: what a mid-sized GPU
shows at batch 1. Used to compare policies until a machine has been measured."""


def _medians(x: Floats, y: Floats) -> tuple[Floats, Floats]:
    """Medians of ``x`` and ``y`` in up to BINS bins of ``x`` holding about equally many."""
    edges = np.unique(np.quantile(x, np.linspace(0.0, 1.0, BINS + 1)))
    bins = np.clip(np.searchsorted(edges, x, side="right"), 1, len(edges))
    order = np.argsort(bins, kind="stable")
    parts = np.split(order, np.flatnonzero(np.diff(bins[order])) + 1)
    full = [part for part in parts if len(part) >= MIN_IN_BIN]
    return np.array([np.median(x[part]) for part in full]), np.array(
        [np.median(y[part]) for part in full]
    )


def robust_line(x: Floats, y: Floats) -> tuple[float, float] | None:
    """Intercept and slope (not negative) of ``y`` over ``x``; None when ``x`` does not vary.

    Theil-Sen over the medians of bins: the median slope between all pairs.
    """
    middle_x, middle_y = _medians(x, y)
    i, j = np.triu_indices(len(middle_x), k=1)
    apart = middle_x[j] > middle_x[i]
    if not apart.any():
        return None
    slopes = (middle_y[j] - middle_y[i])[apart] / (middle_x[j] - middle_x[i])[apart]
    slope = max(float(np.median(slopes)), 0.0)
    return float(np.median(middle_y - slope * middle_x)), slope


def measure(rows: Rows) -> Costs | None:
    """Costs and the model arm's payoff from recent ``rows``; None while the line is unknown."""
    timed = (rows.step_us > 0) & (rows.arm != UNKNOWN)
    rows = rows if timed.all() else rows.take(timed)
    counts = np.bincount(rows.arm, minlength=3)
    seen = (int(counts[NONE]), int(counts[MODEL]), int(counts[CACHE]))
    if seen[CACHE] < MIN_ARM:
        return None
    tokens = rows.step_tokens.astype(np.float64)
    plain = rows.arm != MODEL
    line = robust_line(tokens[plain], rows.step_us[plain])
    if line is None:
        return None
    fixed, slope = line
    above = rows.step_us - fixed - slope * tokens
    extra = [
        float(np.median(above[rows.arm == arm])) if seen[arm] >= MIN_ARM else 0.0
        for arm in (NONE, MODEL, CACHE)
    ]
    if fixed + min(extra) <= 0:
        return None
    model = np.isfinite(rows.model_accepted) & (rows.arm == MODEL)
    payoff = rows.model_accepted[model]
    return Costs(
        fixed_us=fixed,
        token_us=slope,
        extra_us=(extra[NONE], extra[MODEL], extra[CACHE]),
        model_accepted=float(payoff.mean(dtype=np.float64)) if len(payoff) else 0.0,
        model_len=float(np.median(rows.verified_len[model])) if len(payoff) else 0.0,
        seen=seen,
    )
