"""What the model draft yields at this worker, as far as it was seen.

A cache draft's payoff is known in every cycle; the model draft's only where one was verified. So
this arm keeps its recent mean, how the policy's estimates of it turned out, and how long nobody has
looked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MEMORY: Final = 24.0
"""Model drafts over which mean and ratio are taken."""
PRIOR: Final = 0.5
"""Tokens added to both sides of the ratio: with little evidence it stays near one."""


@dataclass(slots=True)
class ModelArm:
    """Recent yield of the model arm of one worker; lengths in tokens."""

    mean: float = 1.0
    unseen: int = 0  # cycles since a model draft was verified
    _observed: float = 0.0
    _predicted: float = 0.0
    _seen: int = 0

    @property
    def ratio(self) -> float:
        """What was accepted over what had been predicted, recently: corrects the predictions."""
        return (self._observed + PRIOR) / (self._predicted + PRIOR)

    def observe(self, accepted: int, predicted: float | None) -> None:
        """Take in a verified model draft and the network's own estimate of it. Mutates.

        ``predicted`` is None where no network was asked: then the ratio learns nothing.
        """
        self._seen += 1
        weight = max(1.0 / MEMORY, 1.0 / self._seen)
        self.mean += weight * (accepted - self.mean)
        self.unseen = 0
        if predicted is not None:
            self._observed += (accepted - self._observed) / MEMORY
            self._predicted += (predicted - self._predicted) / MEMORY
