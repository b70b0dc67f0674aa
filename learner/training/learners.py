"""A slow and a fast network that learn side by side, and the better one of late.

They differ in memory only: the slow one learns from all buffered drafts, the fast one from the
newest. So the fast one is better only after a change, which ``learner.evaluation.drift`` detects.
(With two learning rates instead, the faster one was better for a thousand requests of stationary
traffic.) The better one is tracked by the fixed-share algorithm (Herbster and Warmuth 1998,
"Tracking the best expert"): each weight passes a share to the other, so that a change is followed
within some dozen drafts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np

from decoder.contracts.bundle import Kind, Policy
from learner.training import train
from learner.training.losses import Floats, Labels, scores, tensors
from learner.training.rows import Buffer, Rows

NAMES: Final = ("slow", "fast")
SLOW, FAST = range(2)
BATCH: Final = 128
RECENT: Final = 600  # newest drafts, from which the fast network learns
STEPS: Final = 8  # optimiser steps a block of drafts: each network sees a draft sixteen times
PER_SECOND: Final = 100.0
"""Above so many drafts a second, steps are reduced: learning takes the same share of a core."""
WARM_UP: Final = 150  # steps of randomly initialised networks at the start
SHARE: Final = 0.02  # share of each weight that passes to the others with every block
BEHIND: Final = 0.05  # weight below which a network is replaced by a copy of the leader


def _uniform() -> Floats:
    return np.full(len(NAMES), 1.0 / len(NAMES))


@dataclass
class Learners:
    """The networks of a scope in ``trainer``; None before :meth:`begin`.

    ``weights`` [networks] are the fixed-share weights, ``updates`` counts optimiser steps of each.
    """

    trainer: train.Trainer | None = None
    weights: Floats = field(default_factory=_uniform)
    updates: int = 0

    @property
    def leader(self) -> int:
        """Index of the best network of late."""
        return int(self.weights.argmax())

    def begin(self, kind: Kind, champion: Policy, buffer: Buffer) -> None:
        """Start from the champion's weights, or at random if it is of another kind. Mutates."""
        self.weights, networks = _uniform(), len(NAMES)
        if champion.kind == kind:
            normal = champion.mean, champion.std
            self.trainer = train.start(kind, normal, champion.layers, train.SLOW, networks)
            return
        normal = train.normaliser(buffer.recent(len(buffer)).features)
        self.trainer = train.start(kind, normal, networks=networks)
        self.learn(buffer, WARM_UP)

    def compare(self, rows: Rows, labels: Labels) -> Floats:
        """Compare the networks on unseen drafts: by how much the fast one predicts better, float64
        [n] in nats. Mutates ``weights``."""
        assert self.trainer is not None
        outputs = train.outputs_of(self.trainer, rows.features)
        score = scores(self.trainer.kind, outputs, tensors(labels))
        total = score.sum(axis=1)
        posterior = self.weights * np.exp(total - total.max())
        posterior = posterior / posterior.sum()
        self.weights = (1.0 - SHARE) * posterior + SHARE / len(NAMES)
        advantages: Floats = score[FAST] - score[SLOW]
        return advantages

    def learn(self, buffer: Buffer, steps: int = 0) -> None:
        """Take ``steps`` of every network, by default as many as suit the arrival rate, on
        minibatches of the buffer. Mutates.

        The draw is seeded by the buffer's total number of rows only.
        """
        assert self.trainer is not None
        steps = steps or steps_at(buffer)
        rows = buffer.training()
        spans = np.array([[len(rows)], [min(len(rows), RECENT)]])
        draw = np.random.default_rng(buffer.total)
        ago = draw.integers(0, spans, (steps, len(NAMES), BATCH))
        train.update(self.trainer, buffer.at(rows[-1 - ago.ravel()]), BATCH)
        self.updates += steps

    def follow(self) -> None:
        """Replace networks far behind by copies of the leader. Mutates."""
        assert self.trainer is not None
        for index, weight in enumerate(self.weights):
            if weight < BEHIND and index != self.leader:
                self.trainer.copy(self.leader, index)


def steps_at(buffer: Buffer) -> int:
    """Optimiser steps for a block, by the arrival rate of the newest drafts by workers' clocks, if
    these advance."""
    drafts, ends = min(len(buffer), RECENT), buffer.times(RECENT)
    seconds = ends["time_to"] - ends["time_from"]
    if seconds <= 0.0:
        return STEPS
    return max(1, min(STEPS, round(STEPS * PER_SECOND * seconds / drafts)))
