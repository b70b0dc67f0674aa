"""The word on a contestant whose evidence suffices: by how much is it faster?

Evidence says that its choices bring more, not how much. That is the rate, simulated with the
functions that workers decide by, at the rate that was in force and the costs that were measured, on
drafts of sessions that began after the contestant was made.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from decoder.contracts.bundle import Policy
from decoder.policy.estimate import estimate, predict
from learner.losses import Floats, residuals
from learner.measured import Costs
from learner.rows import Rows
from learner.tune import speed

MIN_GAIN: Final = 0.004
"""Relative gain in rate, on the drafts it is judged on, below which a contestant is not worth a
swap on every worker: at 0.001, on twelve recorded shifts, four promotions for three gained nothing
more."""
LEAST_DRAFTS: Final = 40
"""Below these a rate says nothing, and the champion stays."""
DECILES: Final = 10
DEPTHS: Final = (1, 2, 4, 8, 16)
"""Draft positions at which survival is held against what was seen."""


@dataclass(frozen=True)
class Calibration:
    """What a policy expected of drafts it was judged on, beside what came.

    ``deciles`` [DECILES, 2] are mean accepted lengths, expected and real, of tenths of the drafts
    in the order of what was expected; ``depths`` [DEPTHS, 2] the chance to survive that many
    tokens, of the drafts that are as long. Censored labels are left out; NaN where nothing was
    seen.
    """

    deciles: Floats
    depths: Floats

    def metrics(self) -> dict[str, float]:
        """The figures by name, for the registry; those that are NaN left out."""
        named = {f"decile_{n}": row for n, row in enumerate(self.deciles.tolist(), 1)}
        named |= {f"survival_{n}": row for n, row in zip(DEPTHS, self.depths.tolist(), strict=True)}
        return {
            f"{name}_{what}": value
            for name, row in named.items()
            for what, value in zip(("expected", "real"), row, strict=True)
            if np.isfinite(value)
        }


@dataclass(frozen=True)
class Verdict:
    """Who won and by which figures.

    ``evidence`` is the natural logarithm of the wealth won by betting on the contestant, over
    ``clusters`` of drafts. Rates are in tokens per second (or nominal step), MAE in tokens.
    """

    promote: bool
    reason: str
    evidence: float
    clusters: int
    rate: float = 0.0
    champion_rate: float = 0.0
    mae: float = 0.0
    champion_mae: float = 0.0
    drafts: int = 0
    calibration: Calibration | None = field(default=None, compare=False)

    @property
    def gain(self) -> float:
        """Relative gain in rate."""
        return self.rate / self.champion_rate - 1.0 if self.champion_rate > 0 else 0.0

    def metrics(self) -> dict[str, float]:
        """The figures by name, for the registry."""
        found = {
            "evidence": self.evidence,
            "gate_clusters": float(self.clusters),
            "gate_drafts": float(self.drafts),
            "rate": self.rate,
            "champion_rate": self.champion_rate,
            "rate_gain": self.gain,
            "mae": self.mae,
            "champion_mae": self.champion_mae,
        }
        return found | (self.calibration.metrics() if self.calibration else {})


def judge(
    contestant: Policy,
    champion: Policy,
    rows: Rows,
    costs: Costs,
    evidence: float,
    clusters: int,
    least: float = MIN_GAIN,
) -> Verdict:
    """Whether ``contestant``, for which ``evidence`` of ``clusters`` speaks, replaces ``champion``.

    Args:
        rows: of sessions that began after the contestant was made.
        least: relative gain in rate that it needs.
    """
    if len(rows) < LEAST_DRAFTS:
        return Verdict(
            False, f"only {len(rows)} drafts to judge by", evidence, clusters, drafts=len(rows)
        )
    scale = 1e6 if costs.measured else 1.0
    with np.errstate(all="ignore"):  # of a champion whose numbers are not finite
        rates = [scale * speed(policy, rows, costs) for policy in (contestant, champion)]
    errors = [error_of(policy, rows) for policy in (contestant, champion)]
    found = Verdict(
        promote=rates[0] >= rates[1] * (1.0 + least),
        reason="",
        evidence=evidence,
        clusters=clusters,
        rate=rates[0],
        champion_rate=rates[1],
        mae=errors[0],
        champion_mae=errors[1],
        drafts=len(rows),
        calibration=calibrate(contestant, rows),
    )
    word = "chooses better and is faster" if found.promote else "chose better and is not faster"
    unit = "tok/s" if costs.measured else "tokens per nominal step"
    reason = (
        f"{word}: evidence e^{evidence:.1f} of {clusters} clusters, rate {rates[0]:.4g} against "
        f"{rates[1]:.4g} {unit} ({found.gain:+.1%}), MAE {errors[0]:.3f} against {errors[1]:.3f}"
    )
    return replace(found, reason=reason)


def error_of(policy: Policy, rows: Rows) -> float:
    """Mean absolute error in tokens, a prediction that is no number counting as none; 0 without
    rows."""
    if not len(rows):
        return 0.0
    with np.errstate(all="ignore"):
        expected = np.nan_to_num(predict(policy, rows.features))
    return float(residuals(expected, rows.accepted, rows.censored).mean(dtype=np.float64))


def calibrate(policy: Policy, rows: Rows) -> Calibration:
    """How far what ``policy`` expects of ``rows`` can be relied on."""
    rows = rows.take(~rows.censored)
    found = estimate(policy, rows.features)
    deciles = np.full((DECILES, 2), np.nan)
    for n, tenth in enumerate(np.array_split(np.argsort(found.expected, kind="stable"), DECILES)):
        if len(tenth):
            deciles[n] = found.expected[tenth].mean(), rows.accepted[tenth].mean()
    depths = np.full((len(DEPTHS), 2), np.nan)
    for n, depth in enumerate(DEPTHS if found.curves is not None else ()):
        reached: NDArray[np.bool_] = rows.draft_len >= depth
        if found.curves is not None and reached.any():
            seen = rows.accepted[reached] >= depth
            depths[n] = found.curves[reached, depth - 1].mean(), seen.mean()
    return Calibration(deciles, depths)
