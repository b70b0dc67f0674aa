"""Networks that learn side by side, and which of them foresees best.

They differ in their memory and in nothing else: the careful one learns from all drafts that are
held, the quick one from the newest. So while nothing changes the quick one is no better, however
much there is to learn; after a change it is, which is what ``evaluation.drift`` waits for. With two
learning rates instead, the faster one was the better for a thousand requests of the same traffic.
What each foresees of drafts before it learns from them is added up, with a share that always goes
on to the other (the fixed share of Herbster and Warmuth 1998, "Tracking the best expert"): so the
better one of late is found within some dozen drafts of its becoming so, and nothing that was
learned is thrown away.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np

from decoder.contracts.bundle import Policy
from learner.training import train
from learner.training.losses import Faced, Floats, bounded, survival_likelihood
from learner.training.rows import Buffer, Rows

NAMES: Final = ("careful", "quick")
CAREFUL, QUICK = range(2)
BATCH: Final = 128
RECENT: Final = 600
"""Newest drafts, which the quick one learns from."""
STEPS: Final = 8
"""Of each network for a block of drafts, each of which is seen sixteen times by either."""
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
    """The networks of a scope, side by side in ``abreast``; none before :meth:`begin`.

    ``weights`` [networks] add up to one: how much each is trusted to foresee best. ``updates``
    counts optimiser steps of each.
    """

    abreast: train.Trainer | None = None
    weights: Floats = field(default_factory=_alike)
    updates: int = 0

    @property
    def trainers(self) -> list[train.Trainer]:
        """Each network by itself, in views; empty before :meth:`begin`."""
        return [] if self.abreast is None else train.apart(self.abreast)

    @property
    def begun(self) -> bool:
        """Whether there are networks."""
        return self.abreast is not None

    @property
    def leader(self) -> int:
        """Index of the one that foresees best of late."""
        return int(self.weights.argmax())

    def begin(self, champion: Policy, buffer: Buffer) -> None:
        """Start from the champion's weights, or at random where it is of another kind. Mutates."""
        self.weights = _alike()
        if champion.kind == "survival":
            held = champion.mean, champion.std, champion.layers
            begins = train.start("survival", *held, rate=train.CAREFUL)
            self.abreast = train.abreast([begins for _ in NAMES])
            return
        seen = train.normaliser(buffer.recent(len(buffer)).features)
        begins = train.start("survival", *seen)
        self.abreast = train.abreast([begins for _ in NAMES])
        self.learn(buffer, WARM_UP)

    def weigh(self, rows: Rows, found: Faced) -> Floats:
        """Compare the networks on drafts that they have not learned from. Mutates ``weights``.

        Returns:
            float64 [n], how much better the quick one foresaw them, in nats.
        """
        assert self.abreast is not None
        outputs = train.outputs_of(self.abreast, rows.features)
        said = bounded(survival_likelihood(outputs, found))
        total = said.sum(axis=1)
        held = self.weights * np.exp(total - total.max())
        held = held / held.sum()
        self.weights = (1.0 - SHARE) * held + SHARE / len(NAMES)
        advantages: Floats = said[QUICK] - said[CAREFUL]
        return advantages

    def learn(self, buffer: Buffer, steps: int = STEPS) -> None:
        """Take ``steps`` of every network on minibatches of the buffer. Mutates.

        What is drawn depends on how many rows the buffer has ever had, and on nothing else.
        """
        assert self.abreast is not None
        spans = np.array([[len(buffer)], [min(len(buffer), RECENT)]])
        draw = np.random.default_rng(buffer.total)
        ago = draw.integers(0, spans, (steps, len(NAMES), BATCH))
        train.updates(self.abreast, buffer.at(buffer.total - 1 - ago.ravel()), BATCH)
        self.updates += steps

    def follow(self) -> None:
        """Let who is far behind go on from where the leader stands. Mutates."""
        leader = self.leader
        trainers = self.trainers
        for index, weight in enumerate(self.weights):
            if weight < BEHIND and index != leader:
                train.take_over(trainers[index], trainers[leader])
