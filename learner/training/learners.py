"""Networks that learn side by side, and which of them predicts best.

They differ in their memory and in nothing else: the slow one learns from all drafts that are held,
the fast one from the newest. So while nothing changes the fast one is no better, however much there
is to learn; after a change it is, which is what ``learner.evaluation.drift`` waits for. With two
learning rates instead, the faster one was the better for a thousand requests of the same traffic.
The better one of late is found by the fixed share of Herbster and Warmuth 1998 ("Tracking the best
expert"): a share of each weight always goes on to the other, so a change of the best is followed
within some dozen drafts, and nothing that was learned is thrown away.
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
RECENT: Final = 600
"""Newest drafts, which the fast one learns from."""
STEPS: Final = 8
"""Of each network for a block of drafts, each of which is seen sixteen times by either."""
PER_SECOND: Final = 100.0
"""Drafts a second from which on steps are fewer: with more drafts each need not be seen so often,
and learning takes the same part of a core."""
WARM_UP: Final = 150
"""Steps that networks which begin at random take at once."""
SHARE: Final = 0.02
"""Of each one's weight that goes to the others with every block."""
BEHIND: Final = 0.05
"""Weight below which a network goes on from where the leader stands."""


def _alike() -> Floats:
    return np.full(len(NAMES), 1.0 / len(NAMES))


@dataclass
class Learners:
    """The networks of a scope, side by side in ``trainer``; none before :meth:`begin`.

    ``weights`` [networks] add up to one: how much each is trusted to predict best. ``updates``
    counts optimiser steps of each.
    """

    trainer: train.Trainer | None = None
    weights: Floats = field(default_factory=_alike)
    updates: int = 0

    @property
    def leader(self) -> int:
        """Index of the one that predicts best of late."""
        return int(self.weights.argmax())

    def begin(self, kind: Kind, champion: Policy, buffer: Buffer) -> None:
        """Start from the champion's weights, or at random where it is of another kind. Mutates."""
        self.weights, networks = _alike(), len(NAMES)
        if champion.kind == kind:
            normal = champion.mean, champion.std
            self.trainer = train.start(kind, normal, champion.layers, train.SLOW, networks)
            return
        normal = train.normaliser(buffer.recent(len(buffer)).features)
        self.trainer = train.start(kind, normal, networks=networks)
        self.learn(buffer, WARM_UP)

    def compare(self, rows: Rows, labels: Labels) -> Floats:
        """Compare the networks on drafts that they have not learned from. Mutates ``weights``.

        Returns:
            float64 [n], how much better the fast one predicted them, in nats.
        """
        assert self.trainer is not None
        outputs = train.outputs_of(self.trainer, rows.features)
        found = scores(self.trainer.kind, outputs, tensors(labels))
        total = found.sum(axis=1)
        held = self.weights * np.exp(total - total.max())
        held = held / held.sum()
        self.weights = (1.0 - SHARE) * held + SHARE / len(NAMES)
        advantages: Floats = found[FAST] - found[SLOW]
        return advantages

    def learn(self, buffer: Buffer, steps: int = 0) -> None:
        """Take ``steps`` of every network, or as many as suit the buffer's pace, on minibatches of
        it. Mutates.

        What is drawn depends on how many rows the buffer has ever had, and on nothing else.
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
        """Let who is far behind go on from where the leader stands. Mutates."""
        assert self.trainer is not None
        for index, weight in enumerate(self.weights):
            if weight < BEHIND and index != self.leader:
                self.trainer.copy(self.leader, index)


def steps_at(buffer: Buffer) -> int:
    """Optimiser steps for a block, by how fast the newest drafts came by their workers' clocks; a
    clock that stands still says nothing."""
    drafts, ends = min(len(buffer), RECENT), buffer.times(RECENT)
    seconds = ends["time_to"] - ends["time_from"]
    if seconds <= 0.0:
        return STEPS
    return max(1, min(STEPS, round(STEPS * PER_SECOND * seconds / drafts)))
