"""Baselines from river: online regressions of accepted length on a policy's features.

Drafts are a worker's, and arms are chosen as a survival policy's are, so only the estimate differs.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from river.linear_model import LinearRegression
from river.optim import SGD
from river.preprocessing import StandardScaler
from river.tree import HoeffdingTreeRegressor

from decoder.contracts.bundle import Policy, frequency_policy
from decoder.contracts.features import FEATURES, FloatArray
from decoder.core.choice import Chosen, Step
from pipelines.replay.method import Method
from pipelines.replay.rivals import ALWAYS, LENGTH, POSITIONS, priced

RATE: Final = 0.001  # learning rate of the linear regression


class Regression:
    """Predicts accepted length with a river model; used instead of
    :func:`decoder.core.choice.choose`. The model learns from complete labels, one by one."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def update(self, rows: NDArray[Any]) -> None:
        """Learn from the labels of cache drafts. Mutates.

        Args:
            rows: [n] of :data:`decoder.contracts.fields.ROW`.
        """
        rows = rows[(rows["draft_len"] > 0) & (rows["censored"] == 0)]
        for features, accepted in zip(rows["features"], rows["accepted"].tolist(), strict=True):
            self._model.learn_one(_named(features), float(accepted))

    def __call__(self, policy: Policy, step: Step) -> Chosen:
        """See :func:`decoder.core.choice.choose`. A predicted mean becomes a geometric survival
        curve."""
        predicted = [float(self._model.predict_one(_named(each))) for each in step.features]
        lengths = step.features[:, LENGTH]
        mean = np.clip(np.nan_to_num(np.array(predicted, np.float32)), 0.0, lengths)
        chance = mean / (1.0 + mean)
        curves = chance[:, None] ** np.arange(1, POSITIONS + 1)
        curves[np.arange(POSITIONS) >= lengths[:, None]] = 0.0
        return priced(curves.astype(np.float32), step)


def _named(features: FloatArray) -> dict[str, float]:
    return dict(zip(FEATURES, features.tolist(), strict=True))


def linear() -> Regression:
    """river's linear regression on standardised features. Gradients are clipped, since a rare
    feature can lie a hundred deviations off."""
    return Regression(StandardScaler() | LinearRegression(SGD(RATE), clip_gradient=10.0))


def tree() -> Regression:
    """river's Hoeffding tree with its defaults."""
    return Regression(StandardScaler() | HoeffdingTreeRegressor())


RIVALS: Final = {
    name: Method(name, frequency_policy("", ALWAYS), rule=rule)
    for name, rule in {"river-linear": linear, "river-tree": tree}.items()
}
