"""Drift detection: the fast network, which learned from the newest drafts alone, predicts better.

Two networks learn alike, one from all drafts that are held and one from the newest. While nothing
changes, the first has the more to go by; after a change, what it knows is in its way. The
difference of their log-likelihoods, a number a cluster of drafts, goes through river's Page-Hinkley
test (Page 1954; Hinkley 1971). Model drafts are a stream of their own, since a drafter that was
swapped says nothing of the text: there a long and a short memory of how many of their tokens were
accepted stand in for the networks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from river.drift import PageHinkley

from decoder.contracts.features import FloatArray
from learner.training.losses import Floats, Labels

STREAMS: Final = ("cache", "model")
MARGINS: Final = np.array([0.02, 0.01])
"""By how much the fast one must be better, in nats a cache draft and a token of a model draft: with
so much more of the newest in its memory, it is a little better on some unchanging traffic."""
MEMORIES: Final = np.array([20_000.0, 400.0])
"""Tokens of model drafts over which the chance of one is taken, by the slow and by the fast."""


SETTLING: Final = 3
"""Clusters that set the scale before the first is tested."""
FEWEST: Final = 30
"""Clusters tested before an alarm."""
MEMORY: Final = 64.0
"""Clusters over which the scale, their mean distance from zero, is taken."""
SLACK: Final = 0.1
"""By how much of the scale a number may be above the mean before it without being counted."""
RISE: Final = 15.0
"""Rise of the sum, in the scale, that is an alarm. At a slack of 0.3 none came in ten million
drafts of decision 28's streams, at 0.1 six in a million, in half the time: an alarm only seats a
challenger."""


@dataclass(frozen=True)
class Alarm:
    """The traffic changed for the drafts of ``stream``; found at ``row`` of those learned from."""

    row: int
    stream: str


@dataclass
class Drafter:
    """Chances that a token of a model draft is accepted, over two memories."""

    held: Floats = field(default_factory=lambda: np.full(len(MEMORIES), 1.0))
    tried: Floats = field(default_factory=lambda: np.full(len(MEMORIES), 2.0))

    def update(self, labels: Labels) -> Floats:
        """How much better the short memory predicted the model drafts of ``labels``, [n], nats;
        then both take them in. Mutates."""
        chances = self.held / self.tried
        held, broke = np.log(chances), np.log1p(-chances)
        advantages: Floats = labels.model_accepted * (held[1] - held[0])
        advantages += (labels.model_tried - labels.model_accepted) * (broke[1] - broke[0])
        tokens = float(labels.model_tried.sum())
        kept = (1.0 - 1.0 / MEMORIES) ** tokens
        # Half a token either way: a chance is neither none nor certain, however long it looked so.
        self.held = 0.5 + kept * (self.held - 0.5) + float(labels.model_accepted.sum())
        self.tried = 1.0 + kept * (self.tried - 1.0) + tokens
        return advantages

    def forget(self) -> None:
        """Start the long memory from the short one: a change was found. Mutates."""
        self.held[0], self.tried[0] = self.held[1], self.tried[1]


def beyond(cache: Floats, model: Floats, tried: FloatArray) -> Floats:
    """The fast ones' advantages [n] over n drafts beyond the margins: [n, streams].

    Args:
        tried: [n], tokens that the model drafts faced.
    """
    found: Floats = np.stack([cache - MARGINS[0], model - MARGINS[1] * tried], axis=1)
    return found


@dataclass
class Watch:
    """One stream's scale, and the state of its Page-Hinkley test in numbers. A number counts at
    most as much as the scale, up or down."""

    count: int = 0
    scale: float = 0.0
    tested: float = 0.0
    mean: float = 0.0
    increase: float = 0.0
    least_increase: float = 0.0

    def update(self, number: float) -> bool:
        """Take in a cluster's number; whether that is an alarm. Mutates."""
        alarm = False
        if self.count >= SETTLING and self.scale > 0.0:
            alarm = self._tested(min(max(number / self.scale, -1.0), 1.0))
        self.count += 1
        self.scale += (abs(number) - self.scale) / min(self.count, MEMORY)
        return alarm

    def _tested(self, number: float) -> bool:
        test: Any = PageHinkley(FEWEST, SLACK, RISE, alpha=1.0, mode="up")
        test._x_mean.n, test._x_mean._mean = self.tested, self.mean
        test._sum_increase, test._min_increase = self.increase, self.least_increase
        test.update(number)
        self.tested, self.mean = test._x_mean.n, test._x_mean.get()
        self.increase, self.least_increase = test._sum_increase, test._min_increase
        return bool(test.drift_detected)


@dataclass
class Detector:
    """Watches one scope. After an alarm the test of its stream starts anew."""

    drafter: Drafter = field(default_factory=Drafter)
    watches: dict[str, Watch] = field(default_factory=lambda: {s: Watch() for s in STREAMS})

    def update(self, advantages: Sequence[Floats], row: int) -> list[Alarm]:
        """Take in, of final clusters, the sums [streams] of :func:`beyond`. Mutates."""
        alarms = []
        for cluster in advantages:
            for stream, advantage in zip(STREAMS, cluster.tolist(), strict=True):
                # a cluster may hold no model draft that was verified
                if advantage and self.watches[stream].update(advantage):
                    alarms.append(Alarm(row, stream))
                    self.watches[stream] = Watch()
                    if stream == "model":
                        self.drafter.forget()
        return alarms
