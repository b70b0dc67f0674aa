"""Notices that the traffic changed: who learned from the newest drafts alone foresees it better.

Two networks learn alike, one from all drafts that are held and one from the newest. While nothing
changes, the first has the more to go by; after a change, what it knows is in its way. The
difference of their log-likelihoods, a number for each cluster of drafts, is watched by a sum of
bets that may begin at any time (:mod:`learner.evidence`), cache drafts and model drafts in streams
of their own: a drafter that was swapped says nothing of the text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from decoder.contracts.features import FloatArray
from learner.evidence import Bets
from learner.losses import Floats

STREAMS: Final = ("cache", "model")
MARGINS: Final = np.array([0.02, 0.01])
"""By which the quick one must be the better to tell of a change, in nats for a cache draft and for
a token of a model draft: with so much more of the newest in its memory, it is by less on some
traffic of which nothing changes."""
BOUND: Final = math.log(3_000.0)
"""Evidence that is an alarm. Were the quick one ahead by the whole margin, three thousand clusters
of drafts would raise one at most; on four kinds of recorded traffic, resampled, it is ahead by less
and 4.8 million drafts raised one."""


@dataclass(frozen=True)
class Alarm:
    """The traffic changed for the drafts of ``stream``; found at ``row`` of those learned from."""

    row: int
    stream: str
    evidence: float  # logarithm


def beyond(advantages: Floats, tried: FloatArray) -> Floats:
    """What of the quick one's ``advantages`` [n, streams] over n drafts tells of a change.

    Args:
        tried: [n], tokens that the model drafts faced.
    """
    found: Floats = advantages - MARGINS * np.stack([np.ones(len(tried)), tried], axis=1)
    return found


class Detector:
    """Watches one scope. After an alarm it starts anew, and nothing is forgotten."""

    def __init__(self) -> None:
        self.bets = {stream: Bets(restarts=True) for stream in STREAMS}

    def take(self, advantages: Sequence[Floats], row: int) -> list[Alarm]:
        """Take in, of final clusters, the sums [streams] of :func:`beyond`. Mutates."""
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
