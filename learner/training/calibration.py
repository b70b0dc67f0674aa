"""A challenger that only recalibrates what is served: online Platt scaling by bucket.

The log-odds of each bucket of positions are moved by a slope and a bias, which river's logistic
regression learns draft by draft (Gupta and Ramdas 2023, "Online Platt scaling with calibeating",
arXiv 2305.00070). After a change of meaning a dozen drafts suffice, where a network needs some
hundred. Folded into the last layer, it is a policy like any other.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from river.linear_model import LogisticRegression
from river.optim import SGD
from river.optim.initializers import Constant

from decoder.contracts.bundle import BUCKETS, Policy
from decoder.policy.estimate import network
from learner.training.losses import Floats, Labels
from learner.training.rows import Rows

RATE: Final = 0.01
"""Three times as much gained as much where drafts keep their meaning and lost 2 to 11% where copies
break off, whose position in the draft varies; a third gained half."""
STEEPEST: Final = 6.0
"""Log-odds that are learned from at most, either way: one absurd draft would decide for ever."""


@dataclass
class Calibration:
    """``slopes`` and ``biases`` [BUCKETS] of the log-odds of a served survival network."""

    slopes: Floats = field(default_factory=lambda: np.ones(BUCKETS))
    biases: Floats = field(default_factory=lambda: np.zeros(BUCKETS))

    def update(self, served: Policy, rows: Rows, labels: Labels) -> None:
        """Learn from ``rows`` in their order. Mutates."""
        with np.errstate(all="ignore"):
            logits = np.nan_to_num(network(served, rows.features)).clip(-STEEPEST, STEEPEST)
        survived = labels.at_risk - labels.events
        for bucket in np.flatnonzero(labels.at_risk.any(axis=0)).tolist():
            model = LogisticRegression(
                SGD(RATE), intercept_init=float(self.biases[bucket]), intercept_lr=RATE,
                initializer=Constant(float(self.slopes[bucket])),
            )  # fmt: skip
            columns = logits[:, bucket], survived[:, bucket], labels.events[:, bucket]
            for logit, passed, rejected in zip(*(c.tolist() for c in columns), strict=True):
                if passed:
                    model.learn_one({"logit": logit}, False, passed)
                if rejected:
                    model.learn_one({"logit": logit}, True)
            self.slopes[bucket], self.biases[bucket] = model.weights["logit"], model.intercept

    def of(self, served: Policy) -> Policy:
        """``served`` with its log-odds moved."""
        *inner, (weight, bias) = served.layers
        slopes = self.slopes.astype(np.float32)
        last = weight * slopes, bias * slopes + self.biases.astype(np.float32)
        return replace(served, layers=(*inner, last))
