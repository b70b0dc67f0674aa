"""Notices that the traffic changed: who learned from the newest drafts alone foresees it better.

Two networks learn alike, one from all drafts that are held and one from the newest. While nothing
changes, the first has the more to go by; after a change, what it knows is in its way. The
difference of their log-likelihoods, a number for each cluster of drafts, is watched by a
Page-Hinkley test (Page 1954; Hinkley 1971): how far its sum has risen above the lowest it was.
Model drafts are a stream of their own, since a drafter that was swapped says nothing of the text:
there a long and a short memory of how many of their tokens were accepted stand in for the networks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from decoder.contracts.features import FloatArray
from learner.training.losses import Faced, Floats

STREAMS: Final = ("cache", "model")
MARGINS: Final = np.array([0.02, 0.01])
"""By which the quick one must be the better to tell of a change, in nats for a cache draft and for
a token of a model draft: with so much more of the newest in its memory, it is by less on some
traffic of which nothing changes."""
MEMORIES: Final = np.array([20_000.0, 400.0])
"""Tokens of model drafts over which the chance of one is taken, by the careful and by the quick."""


SETTLING: Final = 3
"""Clusters that tell what is usual before the first is watched."""
FEWEST: Final = 30
"""Clusters watched before an alarm."""
MEMORY: Final = 64.0
"""Clusters over which what is usual, the mean distance from zero, is taken."""
SLACK: Final = 0.3
"""Of what is usual, that a number may be above the mean of those before it without telling."""
RISE: Final = 15.0
"""Rise of the sum, in what is usual, that is an alarm. Slack and rise are river's Page-Hinkley at
its best of a few on the streams of decision 28."""


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

    def weigh(self, found: Faced) -> Floats:
        """How much better the short memory foresaw the model drafts of ``found``, [n], nats; then
        both take them in. Mutates."""
        chances = self.held / self.tried
        held, broke = np.log(chances), np.log1p(-chances)
        advantages: Floats = found.held * (held[1] - held[0])
        advantages += (found.tried - found.held) * (broke[1] - broke[0])
        tokens = float(found.tried.sum())
        kept = (1.0 - 1.0 / MEMORIES) ** tokens
        # Half a token either way: a chance is neither none nor certain, however long it looked so.
        self.held = 0.5 + kept * (self.held - 0.5) + float(found.held.sum())
        self.tried = 1.0 + kept * (self.tried - 1.0) + tokens
        return advantages

    def settle(self) -> None:
        """What was before a change is no measure of what comes after it. Mutates."""
        self.held[0], self.tried[0] = self.held[1], self.tried[1]


def beyond(cache: Floats, model: Floats, tried: FloatArray) -> Floats:
    """What of the quick ones' advantages [n] over n drafts tells of a change: [n, streams].

    Args:
        tried: [n], tokens that the model drafts faced.
    """
    found: Floats = np.stack([cache - MARGINS[0], model - MARGINS[1] * tried], axis=1)
    return found


@dataclass
class Watch:
    """Watches one stream: a number counts at most as much as is usual of those before it, up or
    down."""

    taken: int = 0
    usual: float = 0.0
    mean: float = 0.0
    sum: float = 0.0
    least: float = 0.0

    def take(self, number: float) -> bool:
        """Take in a cluster's number; whether that is an alarm. Mutates."""
        watched, rise = self.taken - SETTLING, 0.0
        if watched >= 0 and self.usual > 0.0:
            outcome = min(max(number / self.usual, -1.0), 1.0)
            self.mean += (outcome - self.mean) / (watched + 1)
            self.sum += outcome - self.mean - SLACK
            self.least = min(self.least, self.sum)
            rise = self.sum - self.least
        self.taken += 1
        self.usual += (abs(number) - self.usual) / min(self.taken, MEMORY)
        return watched + 1 >= FEWEST and rise > RISE


@dataclass
class Detector:
    """Watches one scope. After an alarm it starts anew, and nothing is forgotten."""

    drafter: Drafter = field(default_factory=Drafter)
    watches: dict[str, Watch] = field(default_factory=lambda: {s: Watch() for s in STREAMS})

    def take(self, advantages: Sequence[Floats], row: int) -> list[Alarm]:
        """Take in, of final clusters, the sums [streams] of :func:`beyond`. Mutates."""
        alarms = []
        for cluster in advantages:
            for stream, advantage in zip(STREAMS, cluster.tolist(), strict=True):
                # a cluster may hold no model draft that was verified
                if advantage and self.watches[stream].take(advantage):
                    alarms.append(Alarm(row, stream))
                    self.watches[stream] = Watch()
                    if stream == "model":
                        self.drafter.settle()
        return alarms
