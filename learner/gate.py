"""What is told of a contestant that won: the rate, simulated with the functions that workers decide
by, at the rate that was in force and the costs that were measured, on drafts of sessions that began
after it was made. It decides nothing: evidence has.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from decoder.contracts.bundle import Policy
from decoder.policy.estimate import predict
from learner.losses import residuals
from learner.measured import Costs
from learner.rows import Rows
from learner.tune import speed


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

    @property
    def gain(self) -> float:
        """Relative gain in rate."""
        return self.rate / self.champion_rate - 1.0 if self.champion_rate > 0 else 0.0

    def metrics(self) -> dict[str, float]:
        """The figures by name, for the registry."""
        return {
            "evidence": self.evidence,
            "gate_clusters": float(self.clusters),
            "gate_drafts": float(self.drafts),
            "rate": self.rate,
            "champion_rate": self.champion_rate,
            "rate_gain": self.gain,
            "mae": self.mae,
            "champion_mae": self.champion_mae,
        }


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
    return Verdict(reason, evidence, clusters, rate, other, mae, others, len(rows))


def error_of(policy: Policy, rows: Rows) -> float:
    """Mean absolute error in tokens, a prediction that is no number counting as none; 0 without
    rows."""
    if not len(rows):
        return 0.0
    with np.errstate(all="ignore"):
        expected = np.nan_to_num(predict(policy, rows.features))
    return float(residuals(expected, rows.accepted, rows.censored).mean(dtype=np.float64))
