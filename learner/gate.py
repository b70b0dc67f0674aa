"""What is told of a contestant that won: the rate, simulated with the functions that workers decide
by, at the rate that was in force and the costs that were measured, on drafts of sessions that began
after it was made. It decides nothing: evidence has.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from decoder.contracts.bundle import Policy
from decoder.policy.estimate import estimate, predict
from learner.losses import Floats, residuals
from learner.measured import Costs
from learner.rows import Rows
from learner.tune import speed

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
    """By which figures a contestant won.

    ``evidence`` is the natural logarithm of the wealth won by betting on it, over ``clusters``
    of drafts. Rates are in tokens per second (or nominal step), MAE in tokens.
    """

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


def verdict_of(
    contestant: Policy, champion: Policy, rows: Rows, costs: Costs, evidence: float, clusters: int
) -> Verdict:
    """The figures of ``contestant``, for which ``evidence`` of ``clusters`` speaks.

    Args:
        rows: of sessions that began after the contestant was made.
    """
    if not len(rows):
        return Verdict(f"chooses better: evidence e^{evidence:.1f}", evidence, clusters)
    scale, unit = (1e6, "tok/s") if costs.measured else (1.0, "tokens per nominal step")
    with np.errstate(all="ignore"):  # of a champion whose numbers are not finite
        rate, other = (scale * speed(policy, rows, costs) for policy in (contestant, champion))
    mae, others = (error_of(policy, rows) for policy in (contestant, champion))
    reason = (
        f"chooses better: evidence e^{evidence:.1f} of {clusters} clusters, rate {rate:.4g} "
        f"against {other:.4g} {unit}, MAE {mae:.3f} against {others:.3f}"
    )
    calibration = calibrate(contestant, rows)
    return Verdict(reason, evidence, clusters, rate, other, mae, others, len(rows), calibration)


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
