"""Candidate against champion on the same held-out recent drafts, with the functions workers run.

The gate resamples requests, not drafts (paired bootstrap, Efron and Tibshirani 1993, chapter 16):
drafts of one request share their luck. It is seeded, so the same evidence gives the same verdict.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from decoder.contracts.bundle import Policy
from decoder.policy.estimate import decide_each, estimate
from learner.costs import Costs
from learner.drift import residuals
from learner.rows import Rows
from learner.tune import Stretches, stretches

MIN_DRAFTS: Final = 40
MIN_REQUESTS: Final = 3
"""Below these the bootstrap has nothing to resample, and the champion stays."""
RESAMPLES: Final = 400
CONFIDENCE: Final = 0.9
"""Share of resamples that must agree. A wrong promotion costs one interval until the next verdict
corrects it, a missed one the same: there is no reason to be stricter."""
MIN_GAIN: Final = 0.002
"""Relative. A smaller gain in rate is not worth a swap on every worker."""
MIN_MAE_GAIN: Final = 0.02
"""Relative. With equal rates, this much less error is kept for the traffic to come."""
MAX_LOSS: Final = 0.002
"""Relative rate a candidate with clearly less error may lose on this sample and still be equal."""


@dataclass(frozen=True)
class Verdict:
    """Who won and by which figures; rates in tokens per second (or nominal step), MAE in tokens.

    ``confidence`` is the share of resamples in which the candidate's rate is the higher one,
    ``mae_confidence`` the same for the lower error.
    """

    promote: bool
    reason: str
    rate: float = 0.0
    champion_rate: float = 0.0
    confidence: float = 0.0
    mae: float = 0.0
    champion_mae: float = 0.0
    mae_confidence: float = 0.0
    drafts: int = 0
    requests: int = 0
    decided: bool = True  # false: not enough evidence, ask again later

    @property
    def gain(self) -> float:
        """Relative gain in rate."""
        return self.rate / self.champion_rate - 1.0 if self.champion_rate > 0 else 0.0

    def metrics(self) -> dict[str, float]:
        """The figures by name, for MLflow."""
        return {
            "rate": self.rate,
            "champion_rate": self.champion_rate,
            "rate_gain": self.gain,
            "confidence": self.confidence,
            "mae": self.mae,
            "champion_mae": self.champion_mae,
            "mae_confidence": self.mae_confidence,
            "gate_drafts": float(self.drafts),
            "gate_requests": float(self.requests),
        }


def judge(candidate: Policy, champion: Policy, rows: Rows, costs: Costs, seed: int = 0) -> Verdict:
    """Whether ``candidate`` replaces ``champion``, on held-out ``rows`` neither was fitted to.

    It wins with a higher rate (by ``MIN_GAIN``, in ``CONFIDENCE`` of the resamples), or with an
    equal rate and clearly less error. A candidate that predicts anything but finite numbers loses.
    """
    requests, group = np.unique(rows.request, return_inverse=True)
    parts = stretches(rows)
    if len(rows) < MIN_DRAFTS or len(requests) < MIN_REQUESTS:
        reason = f"only {len(rows)} held-out drafts of {len(requests)} requests"
        return Verdict(False, reason, drafts=len(rows), requests=len(requests), decided=False)
    mine = _sums(candidate, rows, costs, parts, group)
    theirs = _sums(champion, rows, costs, parts, group)
    if mine is None:
        reason = "the candidate holds or predicts numbers that are not finite"
        return Verdict(False, reason, drafts=len(rows), requests=len(requests))
    if theirs is None:
        theirs = np.zeros_like(mine)  # a broken champion is worth nothing
        theirs[:, 1:] = 1e9
    weights = np.random.default_rng(seed).multinomial(
        len(requests), np.full(len(requests), 1.0 / len(requests)), size=RESAMPLES
    )
    scale = 1e6 if costs.measured else 1.0
    rate, mae = _figures(mine.sum(axis=0), scale)
    champion_rate, champion_mae = _figures(theirs.sum(axis=0), scale)
    rates, maes = _figures((weights @ mine).T, scale)
    champion_rates, champion_maes = _figures((weights @ theirs).T, scale)
    figures = Verdict(
        promote=False,
        reason="",
        rate=float(rate),
        champion_rate=float(champion_rate),
        confidence=float((rates > champion_rates).mean()),
        mae=float(mae),
        champion_mae=float(champion_mae),
        mae_confidence=float((maes < champion_maes).mean()),
        drafts=len(rows),
        requests=len(requests),
    )
    return _decided(figures, costs.measured)


def _sums(
    policy: Policy, rows: Rows, costs: Costs, parts: Stretches, group: NDArray[np.intp]
) -> NDArray[np.float64] | None:
    """[requests, 4]: tokens, time they need, absolute error, drafts; None if not all finite.

    ``group`` [n] is each draft's request, numbered in the order of the hashes.
    """
    situation = costs.situation
    with np.errstate(all="ignore"):
        found = estimate(policy, rows.features, situation.model_len)
    predicted = found.expected
    numbers = [predicted, *(array for layer in policy.layers for array in layer)]
    if not (np.isfinite(policy.threshold) and all(np.isfinite(n).all() for n in numbers)):
        return None
    committed, time = costs.outcome(rows, decide_each(policy, found, situation, rows.batch_size))
    error = residuals(predicted, rows.accepted, rows.censored)
    owner = np.unique(parts.request, return_inverse=True)[1]
    by_stretch = (parts.tokens, parts.needed(committed, time))
    by_draft = (error, np.ones(len(rows)))
    columns = [np.bincount(owner, column) for column in by_stretch]
    columns += [np.bincount(group, column) for column in by_draft]
    return np.stack(columns, axis=1)


def _figures(
    sums: NDArray[np.float64], scale: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Rate and MAE of sums [4, ...]."""
    return scale * sums[0] / sums[1], sums[2] / sums[3]


def _decided(figures: Verdict, measured: bool) -> Verdict:
    unit = "tok/s" if measured else "tokens per nominal step"
    rates = f"{figures.rate:.4g} against {figures.champion_rate:.4g} {unit} ({figures.gain:+.1%})"
    errors = f"MAE {figures.mae:.3f} against {figures.champion_mae:.3f}"
    faster = figures.gain >= MIN_GAIN and figures.confidence >= CONFIDENCE
    closer = (
        figures.mae <= figures.champion_mae * (1.0 - MIN_MAE_GAIN)
        and figures.mae_confidence >= CONFIDENCE
    )
    equal = closer and figures.gain >= -MAX_LOSS
    if faster:
        reason = f"faster: {rates} in {figures.confidence:.0%} of resamples; {errors}"
    elif equal:
        reason = f"as fast and closer: {errors}; {rates}"
    else:
        reason = f"not better with confidence: {rates} in {figures.confidence:.0%}; {errors}"
    return replace(figures, promote=faster or equal, reason=reason)
