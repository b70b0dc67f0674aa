"""What is told of a contestant that won, by drafts of sessions that began after it was made. It
decides nothing: evidence has.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np

from decoder.contracts.bundle import Policy
from decoder.policy.estimate import predict
from learner.losses import residuals
from learner.measured import Costs
from learner.rows import Rows
from learner.tune import worth


@dataclass(frozen=True)
class Verdict:
    """By which figures a contestant won.

    ``evidence`` is the natural logarithm of the wealth won by betting on it, over ``gate_clusters``
    of drafts. ``gain`` is what it would have saved a draft, in plain steps, MAE in tokens.
    """

    evidence: float
    gate_clusters: int
    gate_drafts: int = 0
    gain: float = 0.0
    mae: float = 0.0
    champion_mae: float = 0.0

    @property
    def reason(self) -> str:
        """In words."""
        found = f"chooses better: evidence e^{self.evidence:.1f} of {self.gate_clusters} clusters"
        if not self.gate_drafts:
            return found
        return (
            f"{found}, {self.gain:.3f} plain steps saved a draft, MAE {self.mae:.3f} against "
            f"{self.champion_mae:.3f}"
        )

    def metrics(self) -> dict[str, float]:
        """The figures by name, for the registry."""
        return {name: float(figure) for name, figure in asdict(self).items()}


def verdict_of(
    contestant: Policy, champion: Policy, rows: Rows, costs: Costs, evidence: float, clusters: int
) -> Verdict:
    """The figures of ``contestant``, for which ``evidence`` of ``clusters`` speaks.

    Args:
        rows: of sessions that began after the contestant was made.
    """
    if not len(rows):
        return Verdict(evidence, clusters)
    saved, _ = worth(champion, [contestant], [0.0], rows, costs)
    mae, others = (error_of(policy, rows) for policy in (contestant, champion))
    return Verdict(evidence, clusters, len(rows), float(saved.mean()), mae, others)


def error_of(policy: Policy, rows: Rows) -> float:
    """Mean absolute error in tokens, a prediction that is no number counting as none; 0 without
    rows."""
    if not len(rows):
        return 0.0
    with np.errstate(all="ignore"):
        expected = np.nan_to_num(predict(policy, rows.features))
    return float(residuals(expected, rows.accepted, rows.censored).mean(dtype=np.float64))
