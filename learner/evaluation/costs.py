"""Cost model of a step on the serving machine, and payoff of model drafts there.

The time of a step is linear in the tokens it verified, plus a constant of the arm::

    step_us = fixed_us + token_us * step_tokens + extra_us[arm]

``step_tokens`` counts all tokens of the target's step: one a request, and the drafts'. The line is
fitted to steps of arms cache and none (Theil-Sen over bin medians: one stalled step in ten has no
influence); a drafter's time is the median residual of model-arm steps. ``policy.pricing`` derives a
request's cost share. In a batch with several arms, a step's time counts for each request as if all
had chosen alike, which underestimates the difference between arms.

The payoff of a cache draft is its label. That of a model draft is observed only where it was
verified; ``learner.evaluation.tune.worth`` bounds it elsewhere.
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

MIN_ARM: Final = 20  # fewest steps of an arm for its cost or payoff: a median of fewer is unstable
BINS: Final = 12
MIN_IN_BIN: Final = 3

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Costs:
    """Coefficients in microseconds a step; ``extra_us`` is by arm [none, model, cache].

    ``seen`` counts observed steps by arm. Nominal costs, in plain steps, are not ``measured``.
    """

    fixed_us: float
    token_us: float
    extra_us: tuple[float, float, float] = (0.0, 0.0, 0.0)
    model_accepted: float = 0.0  # mean accepted draft tokens of a model-arm cycle
    model_len: float = 0.0  # verified draft tokens of such a cycle
    seen: tuple[int, int, int] = (0, 0, 0)
    measured: bool = True

    @property
    def has_model(self) -> bool:
        """Whether a model drafter has been observed."""
        return self.seen[MODEL] >= MIN_ARM

    def outcome(
        self, rows: Rows, choice: Choice, model: ArrayLike | None = None
    ) -> tuple[Floats, Floats]:
        """Committed tokens and time, [..., n] each, of ``choice`` [..., n] at ``rows``; ``model``
        [..., n] are accepted tokens of model drafts, by default their mean."""
        arms, lengths = choice.arms, choice.lengths
        of_cache_arm, of_model_arm = arms == CACHE, arms == MODEL

        def by_arm(of_cache: ArrayLike, of_model: ArrayLike) -> Floats:
            found: Floats = np.where(of_cache_arm, of_cache, np.where(of_model_arm, of_model, 0.0))
            return found

        accepted = self.model_accepted if model is None else model
        committed = 1.0 + by_arm(np.minimum(rows.accepted, lengths), accepted)
        drafts = by_arm(lengths, self.model_len)
        # the table holds the line of plain steps; cache steps may lie off it
        drafted = by_arm(self.extra_us[CACHE] - self.extra_us[NONE], self._table.draft_us)
        batch = rows.batch_size
        return committed, cost_shares(self._table, batch, drafts, drafts, drafted, batch)

    @property
    def situation(self) -> Situation:
        """These costs in the form that workers' decision functions take."""
        return Situation(self._table, round(self.model_len) if self.has_model else 0)

    @cached_property
    def _table(self) -> CostTable:
        none, model, _ = self.extra_us
        ends = (1, MAX_TOKENS)
        times = tuple(self.fixed_us + none + self.token_us * t for t in ends)
        return CostTable("learned", ends, times, draft_us=max(model - none, 0.0))


NOMINAL: Final = Costs(fixed_us=1.0, token_us=0.006, measured=False)
"""Used until a machine is measured: a cache cycle of 32 draft tokens costs a fifth more than a
plain one, as on a mid-sized GPU at batch size 1."""


def _medians(x: Floats, y: Floats) -> tuple[Floats, Floats]:
    """Medians of ``x`` and ``y`` in up to BINS quantile bins of ``x``."""
    edges = np.unique(np.quantile(x, np.linspace(0.0, 1.0, BINS + 1)))
    bins = np.clip(np.searchsorted(edges, x, side="right"), 1, len(edges))
    order = np.argsort(bins, kind="stable")
    parts = np.split(order, np.flatnonzero(np.diff(bins[order])) + 1)
    full = [part for part in parts if len(part) >= MIN_IN_BIN]
    return np.array([np.median(x[part]) for part in full]), np.array(
        [np.median(y[part]) for part in full]
    )


def robust_line(x: Floats, y: Floats) -> tuple[float, float] | None:
    """Intercept and non-negative slope of ``y`` over ``x`` by Theil-Sen over bin medians; None if
    ``x`` does not vary."""
    middle_x, middle_y = _medians(x, y)
    i, j = np.triu_indices(len(middle_x), k=1)
    apart = middle_x[j] > middle_x[i]
    if not apart.any():
        return None
    slopes = (middle_y[j] - middle_y[i])[apart] / (middle_x[j] - middle_x[i])[apart]
    slope = max(float(np.median(slopes)), 0.0)
    return float(np.median(middle_y - slope * middle_x)), slope


def measure(rows: Rows) -> Costs | None:
    """Estimate costs and the model arm's payoff from ``rows``; None without enough data."""
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
