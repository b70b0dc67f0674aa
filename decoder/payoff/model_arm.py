"""What the model draft yields at this worker, as far as it was seen.

A cache draft's payoff is known in every cycle; the model draft's only where one was verified. So
this arm keeps the recent chance that one more of its tokens is accepted, how the policy's estimates
of it turned out, and how long nobody has looked. Drafts differ in length: a chance, unlike a mean
accepted length, can be told from all of them, one accepted whole saying only that it held so far.
"""

from __future__ import annotations

import math
from typing import Final

from decoder.policy.survival import yields_of

MEMORY: Final = 24.0
"""Steps with model drafts over which chance and ratio are taken, however many drafts they have."""
AGES: Final = 150.0
"""Steps without a model draft in which what is known of them loses most of its weight: a drafter
that nobody used may have changed, and one look must be able to bring it back."""
PRIOR: Final = 0.5
"""Tokens added to both sides of the ratio: with little evidence it stays near one."""


class ModelArm:
    """Recent yield of the model arm of one worker; lengths in tokens."""

    def __init__(self, payoff: float, length: int) -> None:
        """Begin from ``payoff``, the accepted length expected of a draft of ``length`` tokens."""
        self.unseen = 0
        """Steps since a model draft was verified."""
        chance = chance_of(payoff, length)
        self._held, self._tried = chance, 1.0
        self._foreseen: dict[str, tuple[float, float]] = {}  # observed and predicted, by whose word
        self._seen = 0
        self._left, self._aged = 0, 0.0  # drafts to come of the step under way; how old the past is

    @property
    def chance(self) -> float:
        """That one more token of a draft is accepted."""
        return self._held / self._tried

    def payoff(self, length: int) -> float:
        """Accepted length to expect of a draft of ``length`` tokens."""
        return yields_of(self.chance, length)[-1] if length else 0.0

    @property
    def ratio(self) -> float:
        """What was accepted over what had been predicted, recently: corrects the predictions."""
        return self.ratio_of("")

    def ratio_of(self, whose: str) -> float:
        """:attr:`ratio` of one of the policies that decide by turns, "" being the champion."""
        observed, predicted = self._foreseen.get(whose, (0.0, 0.0))
        return (observed + PRIOR) / (predicted + PRIOR)

    def observe(
        self,
        accepted: int,
        verified: int,
        predicted: float | None,
        drafts: int = 1,
        whose: str = "",
    ) -> None:
        """Take in a verified model draft and the network's own estimate of it. Mutates.

        Args:
            predicted: None where no network was asked: then the ratio learns nothing.
            drafts: model drafts that its step verified: together they count for one step.
            whose: as of :meth:`ratio_of`.
        """
        if self._left <= 0 or self.unseen:
            self._left, self._aged = drafts, 1.0 - math.exp(-self.unseen / AGES)
        self._left -= 1
        self.unseen = 0
        self._seen += 1
        usual = max(1.0 / MEMORY, self._aged) / drafts
        weight = max(usual, 1.0 / (1 + self._seen))
        self._held += weight * (accepted - self._held)
        self._tried += weight * (accepted + (accepted < verified) - self._tried)
        if predicted is not None:
            observed, before = self._foreseen.get(whose, (0.0, 0.0))
            observed += usual * (accepted - observed)
            self._foreseen[whose] = observed, before + usual * (predicted - before)


def chance_of(payoff: float, length: int) -> float:
    """The chance at which a draft of ``length`` tokens has ``payoff`` to expect; by bisection."""
    low, high = 0.0, 1.0
    if length < 1:
        return 0.5
    for _ in range(30):
        middle = (low + high) / 2.0
        if yields_of(middle, length)[-1] < payoff:
            low = middle
        else:
            high = middle
    return (low + high) / 2.0
