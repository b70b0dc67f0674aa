"""Accuracy of predicted accepted lengths: river's metrics, test-then-train.

Drafts are scored before they are learned from (prequential evaluation, Gama et al. 2013, "On
evaluating stream learning algorithms"). High payoff means at least six accepted tokens, as in the
paper's Table 2 (Section 5.3, Appendix G).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from river import metrics

from decoder.contracts.bundle import Policy
from decoder.policy.estimate import PAPER_THRESHOLD, predict
from learner.training.rows import Rows

WINDOW: Final = 512  # newest drafts in a scope's figures
FIGURES: Final = ("mae", "precision", "recall", "f1")
POINTS: Final = 32  # points of a version's curves in MLflow


class Skill:
    """Prediction errors over the newest ``window`` drafts; 0: all drafts.

    A lower bound counts by how far a prediction falls below it, and as high payoff if it is that
    high; otherwise its class is unknown.
    """

    def __init__(self, window: int = 0) -> None:
        self.absolute = metrics.MAE()
        self.confusion = metrics.ConfusionMatrix()
        shared: Any = self.confusion
        self._at_six = metrics.Precision(shared), metrics.Recall(shared), metrics.F1(shared)
        self._newest = deque[tuple[float, float, bool, bool, float]]()
        self._window = window

    def update(self, policy: Policy, rows: Rows) -> None:
        """Score the predictions of ``policy``. Mutates."""
        with np.errstate(all="ignore"):
            predicted = np.nan_to_num(predict(policy, rows.features)).astype(np.float64)
        accepted = rows.accepted.astype(np.float64)
        bounded = np.where(rows.censored, np.minimum(predicted, accepted), predicted)
        high, selected = accepted >= PAPER_THRESHOLD, predicted >= PAPER_THRESHOLD
        known = np.where(rows.censored & ~high, 0.0, 1.0)
        columns = (each.tolist() for each in (accepted, bounded, high, selected, known))
        for each in zip(*columns, strict=True):
            self._count(each, 1.0)
            if self._window:
                self._newest.append(each)
                if len(self._newest) > self._window:
                    self._count(self._newest.popleft(), -1.0)

    def figures(self) -> dict[str, float]:
        """``FIGURES``: mean absolute error in tokens; the others, in 0..1, at six tokens."""
        values = self.absolute.get(), *(each.get() for each in self._at_six)
        return dict(zip(FIGURES, map(float, values), strict=True))

    def table(self) -> dict[str, float]:
        """:meth:`figures`, the number of ``drafts`` with a known class, and the shares of them that
        are of ``high_payoff``, and ``selected``."""
        drafts = float(self.confusion.total_weight)
        high, selected = self.confusion.sum_row[True], self.confusion.sum_col[True]
        whole = max(drafts, 1.0)
        counts = {"drafts": drafts, "high_payoff": high / whole, "selected": selected / whole}
        return {**counts, **self.figures()}

    def _count(self, scored: tuple[float, float, bool, bool, float], sign: float) -> None:
        accepted, predicted, high, selected, known = scored
        if sign > 0:
            self.absolute.update(accepted, predicted)
        else:
            self.absolute.revert(accepted, predicted)
        if known:
            self.confusion.update(high, selected, sign)


def skill_of(policy: Policy, rows: Rows, window: int = 0) -> Skill:
    """Skill of ``policy`` on ``rows``."""
    skill = Skill(window)
    skill.update(policy, rows)
    return skill


def curves(policies: Mapping[str, Policy], rows: Rows) -> dict[str, Sequence[float]]:
    """Learning curves: figures of each policy after each of ``POINTS`` parts of unseen ``rows``, by
    name of the policy and figure."""
    points: dict[str, list[float]] = {}
    for name, policy in policies.items():
        skill = Skill()
        for part in np.array_split(np.arange(len(rows)), min(POINTS, max(len(rows), 1))):
            skill.update(policy, rows.take(part))
            for figure, value in skill.figures().items():
                points.setdefault(f"{name}{figure}", []).append(value)
    return dict(points)
