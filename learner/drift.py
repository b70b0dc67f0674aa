"""Notices that the traffic changed: who learned from the newest drafts alone foresees it better.

Two networks learn alike, one from all drafts that are held and one from the newest. While nothing
changes, the first has the more to go by; after a change, what it knows is in its way. The
difference of their log-likelihoods, a number for each cluster of drafts, is watched by a sum of
bets that may begin at any time (:mod:`learner.evidence`). Model drafts are a stream of their own,
since a drafter that was swapped says nothing of the text: there a long and a short memory of how
many of their tokens were accepted stand in for the networks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from decoder.contracts.features import FloatArray
from learner.evidence import Bets
from learner.losses import Faced, Floats

STREAMS: Final = ("cache", "model")
MARGINS: Final = np.array([0.02, 0.01])
"""By which the quick one must be the better to tell of a change, in nats for a cache draft and for
a token of a model draft: with so much more of the newest in its memory, it is by less on some
traffic of which nothing changes."""
BOUND: Final = math.log(3_000.0)
"""Evidence that is an alarm. Were the quick one ahead by the whole margin, three thousand clusters
of drafts would raise one at most; on eight kinds of recorded traffic, resampled, it is ahead by
less and ten million drafts raised one."""
MEMORIES: Final = np.array([20_000.0, 400.0])
"""Tokens of model drafts over which the chance of one is taken, by the careful and by the quick."""


SETTLING: Final = 3
"""Clusters that tell what is usual before the first bet."""
MEMORY: Final = 64.0
"""Clusters over which what is usual, the mean distance from zero, is taken."""


@dataclass(frozen=True)
class Alarm:
    """The traffic changed for the drafts of ``stream``; found at ``row`` of those learned from."""

    row: int
    stream: str


class Drafter:
    """Chances that a token of a model draft is accepted, over two memories."""

    def __init__(self) -> None:
        self.held: Floats = np.full(len(MEMORIES), 1.0)
        self.tried: Floats = np.full(len(MEMORIES), 2.0)

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


class Watch:
    """Watches one stream: a number counts at most as much as is usual of those before it, up or
    down, so that what is told is about means of numbers cut there."""

    def __init__(self) -> None:
        self.bets = Bets(restarts=True)
        self.taken, self.usual = 0, 0.0

    def take(self, number: float) -> None:
        """Take in a cluster's number. Mutates."""
        if self.taken >= SETTLING and self.usual > 0.0:
            self.bets.take(min(max(number / self.usual, -1.0), 1.0), 1.0)
        self.taken += 1
        self.usual += (abs(number) - self.usual) / min(self.taken, MEMORY)


class Detector:
    """Watches one scope. After an alarm it starts anew, and nothing is forgotten."""

    def __init__(self) -> None:
        self.drafter = Drafter()
        self.watches = {stream: Watch() for stream in STREAMS}

    def take(self, advantages: Sequence[Floats], row: int) -> list[Alarm]:
        """Take in, of final clusters, the sums [streams] of :func:`beyond`. Mutates."""
        alarms = []
        for cluster in advantages:
            for stream, advantage in zip(STREAMS, cluster.tolist(), strict=True):
                watch = self.watches[stream]
                if advantage:  # a cluster may hold no model draft that was verified
                    watch.take(advantage)
                if watch.bets.evidence >= BOUND:
                    alarms.append(Alarm(row, stream))
                    self.watches[stream] = Watch()
                    if stream == "model":
                        self.drafter.settle()
        return alarms

    def snapshot(self) -> dict[str, Any]:
        """Everything :meth:`restored` needs, JSON-ready."""
        told = {n: [w.taken, w.usual, w.bets.snapshot()] for n, w in self.watches.items()}
        return told | {"drafter": [self.drafter.held.tolist(), self.drafter.tried.tolist()]}

    @classmethod
    def restored(cls, numbers: dict[str, Any]) -> Detector:
        """The detector as it was.

        Raises:
            KeyError, ValueError, TypeError: the numbers are not of this version.
        """
        detector = cls()
        held, tried = (np.array(column, np.float64) for column in numbers["drafter"])
        detector.drafter.held, detector.drafter.tried = held, tried
        for stream, watch in detector.watches.items():
            taken, usual, bets = numbers[stream]
            watch.taken, watch.usual, watch.bets = int(taken), float(usual), Bets.restored(bets)
        return detector
