"""What a model draft yields at this worker, as far as model drafts were seen.

A cache draft's payoff is known in every cycle; the model draft's only where one was verified. What
is known of it is kept by **place** in the draft, since a drafter that found the thread holds on to
it: the log-odds that each token is accepted, given those before it. A draft tells of its places up
to the first token that was refused, and each of these moves by what came less what was expected
(a logistic model followed by stochastic gradient). Whether the cache has a draft at hand tells next
to nothing of the drafter: one curve serves every state.

A place that no draft reached for a while may have changed meanwhile. So each has a clock of its
own, by which its past loses weight, and one outcome brings back a place that had been given up.
The rate hangs on what was believed before, never on what came: that flatters no place, and one
refusal sinks none.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

from decoder.compiled import Float64Array, entry_point

START: Final = 2.0
"""Accepted tokens expected of a whole draft of a drafter of which nothing is known: what one
accepts that was trained for its target (2.2 to 3.2 in the paper), or a batch, for which its pass is
dear, would never try it. One step tells how good it is."""
RATE: Final = 0.1
"""Log-odds that a place moves by where it was taken for impossible: some forty of its outcomes are
remembered."""
FIRST: Final = 4.0
"""Outcomes of a place that what was expected of it counts for, while these are few: the first ones
move it by the slope of a logarithm of odds, until it stands as they say."""
FURTHEST: Final = 4.0
"""Log-odds that nothing goes beyond: a chance of 0.018 or 0.982, from which one comes back."""
AGES: Final = 600.0
"""Steps without a draft that reaches a place, after which its past has lost most of its weight."""
LOOK_RATE: Final = 25.0
"""The rate of a place that was given up, by the square of what was lost in so many steps as
``LOOK_AGES``: a drafter that nobody used may have changed, and one look must be able to bring it
back. ``FURTHEST`` is its bound, and the more is believed of a place, the less it counts."""
LOOK_AGES: Final = 150.0
GIVEN_UP: Final = 6
"""Power of the chance of a refusal that the rate of a look is taken by."""


@entry_point
def chance_at(odds: float) -> float:
    """The chance that log-odds stand for."""
    return float(1.0 / (1.0 + np.exp(-odds)))


@entry_point
def payoff_of(odds: Float64Array, length: int) -> float:
    """Accepted length to expect of a draft of ``length`` tokens."""
    total, alive = 0.0, 1.0
    for place in range(min(length, len(odds))):
        alive *= chance_at(odds[place])
        total += alive
    return total


@entry_point
def observe_model(
    odds: Float64Array, seen: Float64Array, accepted: int, verified: int, drafts: int
) -> None:
    """Take in a verified model draft. Mutates.

    Args:
        seen: [2 * length], of each place steps since a draft reached it, then its outcomes.
        drafts: model drafts that its step verified: once a place is known, they count for one.
    """
    length = len(odds)
    for place in range(min(accepted + 1, verified, length)):
        came, chance, unseen = place < accepted, chance_at(odds[place]), seen[place]
        outcomes = min(seen[length + place], FIRST * drafts / RATE) * np.exp(-unseen / AGES)
        rate = max(RATE / drafts, FIRST / (FIRST + outcomes))
        look = min(LOOK_RATE * (1.0 - np.exp(-unseen / LOOK_AGES)) ** 2, FURTHEST)
        look *= (1.0 - chance) ** GIVEN_UP
        if look > rate:
            rate, outcomes = look, 0.0 if came else outcomes  # what was known is no longer true
        moved = odds[place] + rate * ((1.0 if came else 0.0) - chance)
        odds[place] = min(max(moved, -FURTHEST), FURTHEST)
        seen[place], seen[length + place] = 0.0, outcomes + 1.0
    for place in range(1, length):
        if seen[length + place] == 0.0:  # a drafter that found the thread holds on to it
            odds[place] = max(odds[place], odds[place - 1])


class ModelArm:
    """Chances of one worker's model drafts; ``odds`` is float64 [length], by place."""

    def __init__(self, payoff: float, length: int) -> None:
        """Begin from ``payoff``, the accepted length expected of a draft of ``length`` tokens."""
        chance = min(max(chance_of(payoff, length), chance_at(-FURTHEST)), chance_at(FURTHEST))
        self.odds: NDArray[np.float64] = np.full(length, math.log(chance / (1.0 - chance)))
        self.seen = np.zeros(2 * length)

    @property
    def unseen(self) -> int:
        """Steps since a model draft was verified."""
        return int(self.seen[0]) if len(self.odds) else 0

    def passed(self) -> None:
        """A step begins. Mutates."""
        self.seen[: len(self.odds)] += 1.0

    def payoff(self, length: int) -> float:
        """Accepted length to expect of a draft of ``length`` tokens."""
        return float(payoff_of(self.odds, length))

    def observe(self, accepted: int, verified: int, drafts: int = 1) -> None:
        """Take in a verified model draft, one of so many of its step. Mutates."""
        observe_model(self.odds, self.seen, accepted, verified, drafts)


def chance_of(payoff: float, length: int) -> float:
    """The chance at which a draft of ``length`` tokens has ``payoff`` to expect; by bisection."""
    low, high = 0.0, 1.0
    if length < 1:
        return 0.5
    for _ in range(30):
        middle = (low + high) / 2.0
        if sum(middle**place for place in range(1, length + 1)) < payoff:
            low = middle
        else:
            high = middle
    return (low + high) / 2.0
