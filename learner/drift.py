"""Notices that the traffic changed: a quick learner foresees it better than a careful one.

Two learners see the same drafts. While nothing changes, the careful one is the better; after a
change, what it knows is in its way. The difference of their log-likelihoods, a number for each
cluster of drafts, is watched by a sum of bets that may begin at any time (:mod:`learner.evidence`),
cache drafts and model drafts in streams of their own: a drafter that was swapped says nothing of
the text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from learner.clusters import Floats
from learner.evidence import Bets

STREAMS: Final = ("cache", "model")
BOUND: Final = math.log(5e5)
"""Evidence that is an alarm: without a change once in 200,000 clusters of a stream at most, which
are some eight million drafts."""


@dataclass(frozen=True)
class Alarm:
    """The traffic changed for the drafts of ``stream``; found at ``row`` of those learned from."""

    row: int
    stream: str
    evidence: float  # logarithm


class Detector:
    """Watches one scope. After an alarm it starts anew, and nothing is forgotten."""

    def __init__(self) -> None:
        self.bets = {stream: Bets(restarts=True) for stream in STREAMS}

    def take(self, advantages: Sequence[Floats], row: int) -> list[Alarm]:
        """Take in, of final clusters, the quick learner's advantages [streams]. Mutates."""
        alarms = []
        for cluster in advantages:
            for stream, advantage in zip(STREAMS, cluster.tolist(), strict=True):
                bets = self.bets[stream]
                if advantage:  # a cluster may hold no model draft that was verified
                    bets.take(advantage)
                if bets.evidence >= BOUND:
                    alarms.append(Alarm(row, stream, bets.evidence))
                    self.bets[stream] = Bets(restarts=True)
        return alarms

    def snapshot(self) -> dict[str, Any]:
        """Everything :meth:`restored` needs, JSON-ready."""
        return {stream: bets.snapshot() for stream, bets in self.bets.items()}

    @classmethod
    def restored(cls, numbers: dict[str, Any]) -> Detector:
        """The detector as it was.

        Raises:
            KeyError, ValueError, TypeError: the numbers are not of this version.
        """
        detector = cls()
        detector.bets = {stream: Bets.restored(numbers[stream]) for stream in STREAMS}
        return detector
