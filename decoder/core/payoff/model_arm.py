"""What a model draft yields at this worker, as far as model drafts were seen.

A cache draft's payoff is known in every cycle; the model draft's only where one was verified. What
is known of it is kept by **place** in the draft, since a drafter that found the thread holds on to
it: the log-odds that each token is accepted, given those before it. A draft tells of its places up
to the first token that was refused, and each of these moves by what came less what was expected
(a logistic model followed by stochastic gradient). Whether the cache has a draft at hand tells next
to nothing of the drafter: one curve serves every state.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

from decoder.policy.survival import yields_of

START: Final = 1.0
"""Accepted tokens expected of a whole draft of a drafter of which nothing is known: enough to try
it, and about what one accepts that was trained for its target."""
RATE: Final = 0.1
"""Log-odds that a place moves by where it was taken for impossible: some forty of its outcomes are
remembered."""
FIRST_RATE: Final = 1.0
"""The same of the first step that is seen, falling as their number grows to :data:`RATE`."""
FURTHEST: Final = 4.0
"""Log-odds that nothing goes beyond: a chance of 0.018 or 0.982, from which one comes back."""
AGES: Final = 150.0
"""Steps without a model draft in which what is known of them loses most of its weight."""
LOOK_RATE: Final = 25.0
"""The rate after so long that all weight is lost, by the square of what was lost: a drafter that
nobody used may have changed, and one look must be able to bring it back."""


class ModelArm:
    """Chances of one worker's model drafts; ``odds`` is float64 [length], by place."""

    def __init__(self, payoff: float, length: int) -> None:
        """Begin from ``payoff``, the accepted length expected of a draft of ``length`` tokens."""
        self.unseen = 0
        """Steps since a model draft was verified."""
        chance = min(max(chance_of(payoff, length), chance_at(-FURTHEST)), chance_at(FURTHEST))
        self.odds: NDArray[np.float64] = np.full(length, math.log(chance / (1.0 - chance)))
        self._seen = 0.0  # steps with model drafts
        self._left, self._aged = 0, 0.0  # drafts to come of the step under way; how old the past is

    def payoff(self, length: int) -> float:
        """Accepted length to expect of a draft of ``length`` tokens."""
        total, alive = 0.0, 1.0
        for odds in self.odds[:length].tolist():
            alive *= chance_at(odds)
            total += alive
        return total

    def holds(self, length: int) -> float:
        """Chance that a draft of ``length`` tokens is accepted whole."""
        chances = (chance_at(odds) for odds in self.odds[:length].tolist())
        return math.prod(chances) if length <= len(self.odds) else 0.0

    def observe(self, accepted: int, verified: int, drafts: int = 1) -> None:
        """Take in a verified model draft. Mutates.

        Args:
            drafts: model drafts that its step verified: together they count for one step.
        """
        if self._left <= 0 or self.unseen:
            self._left, self._aged = drafts, 1.0 - math.exp(-self.unseen / AGES)
        self._left -= 1
        self.unseen = 0
        self._seen += 1.0 / drafts
        first = FIRST_RATE / (1.0 + self._seen)
        rate = max(RATE, first, LOOK_RATE * self._aged**2) / drafts
        for place in range(min(accepted + 1, verified, len(self.odds))):
            odds = self.odds[place] + rate * ((place < accepted) - chance_at(self.odds[place]))
            self.odds[place] = min(max(odds, -FURTHEST), FURTHEST)


def chance_at(odds: float) -> float:
    """The chance that log-odds stand for."""
    return 1.0 / (1.0 + math.exp(-odds))


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
