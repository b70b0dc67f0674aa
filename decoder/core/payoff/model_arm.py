"""Online estimate of a model draft's accepted length, by position in the draft.

A cache draft's payoff is known in every cycle, a model draft's only if one was verified. The
estimate is the log-odds that each **position** is accepted given the ones before, because a drafter
that is right once tends to stay right. A verified draft is an observation of each position up to
the first rejected token. The log-odds follow by stochastic gradient on the logistic loss: observed
minus expected. Whether a cache draft exists says almost nothing about the drafter, so one curve
serves all states.

A position that no draft reached for a while may have changed. Each position has its own age, by
which its past loses weight, and one acceptance can restore a position that had been given up. The
learning rate depends on the prior estimate, not on the outcome: the estimate stays unbiased, and a
single rejection cannot ruin a position.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

from decoder.compiled import Float64Array, entry_point

START: Final = 2.0
"""Prior accepted length of an unknown drafter, tokens: about that of one trained for its target
(2.2 to 3.2 in the paper). With less, a batch, for which drafting is expensive, would never try it.
One step shows how good it is."""
RATE: Final = 0.1
"""Learning rate of the log-odds, the largest change by one outcome: a window of about forty."""
FIRST: Final = 4.0
"""Weight of the prior, in outcomes. While a position has few outcomes, its learning rate is higher:
the first ones replace the prior."""
FURTHEST: Final = 4.0
"""Bound of the log-odds: a chance of 0.018 or 0.982, from which a position can recover."""
AGES: Final = 600.0
"""Time constant, in steps without a draft that reaches a position, by which its past decays."""
PROBE_RATE: Final = 25.0
"""Learning rate of a probe at a position that was given up, times the square of the weight lost
since with time constant ``PROBE_AGES`` (steps). An unused drafter may have changed, and one probe
must be able to restore it. It is bounded by ``FURTHEST`` and shrinks as the estimate grows."""
PROBE_AGES: Final = 150.0
GIVEN_UP: Final = 6
"""Exponent of the rejection chance in the learning rate of a probe."""


@entry_point
def chance_at(odds: float) -> float:
    """Logistic function: the chance with log-odds ``odds``."""
    return float(1.0 / (1.0 + np.exp(-odds)))


@entry_point
def payoff_of(odds: Float64Array, length: int) -> float:
    """Expected accepted length of a draft of ``length`` tokens."""
    total, alive = 0.0, 1.0
    for position in range(min(length, len(odds))):
        alive *= chance_at(odds[position])
        total += alive
    return total


@entry_point
def observe_model(
    odds: Float64Array, seen: Float64Array, accepted: int, verified: int, drafts: int
) -> None:
    """Update the log-odds with one of ``drafts`` model drafts that a step verified, which count as
    one together at a known position. Mutates.

    ``seen`` [2 * length]: steps since a draft reached each position, then its outcomes.
    """
    length = len(odds)
    for position in range(min(accepted + 1, verified, length)):
        accept, chance, unseen = position < accepted, chance_at(odds[position]), seen[position]
        outcomes = min(seen[length + position], FIRST * drafts / RATE) * np.exp(-unseen / AGES)
        rate = max(RATE / drafts, FIRST / (FIRST + outcomes))
        probe_rate = min(PROBE_RATE * (1.0 - np.exp(-unseen / PROBE_AGES)) ** 2, FURTHEST)
        probe_rate *= (1.0 - chance) ** GIVEN_UP
        if probe_rate > rate:
            rate, outcomes = probe_rate, 0.0 if accept else outcomes  # the past no longer holds
        updated = odds[position] + rate * ((1.0 if accept else 0.0) - chance)
        odds[position] = min(max(updated, -FURTHEST), FURTHEST)
        seen[position], seen[length + position] = 0.0, outcomes + 1.0
    for position in range(1, length):
        if seen[length + position] == 0.0:  # unobserved: at least as likely as the one before
            odds[position] = max(odds[position], odds[position - 1])


class ModelArm:
    """Acceptance of one worker's model drafts; ``odds`` is float64 [length], by position."""

    def __init__(self, payoff: float, length: int) -> None:
        """Begin with ``payoff`` as expected accepted length of a draft of ``length`` tokens."""
        chance = min(max(chance_of(payoff, length), chance_at(-FURTHEST)), chance_at(FURTHEST))
        self.odds: NDArray[np.float64] = np.full(length, math.log(chance / (1.0 - chance)))
        self.seen = np.zeros(2 * length)

    @property
    def unseen(self) -> int:
        """Steps since a model draft was verified."""
        return int(self.seen[0]) if len(self.odds) else 0

    def age(self) -> None:
        """Age all positions by one step. Mutates."""
        self.seen[: len(self.odds)] += 1.0

    def payoff(self, length: int) -> float:
        """Expected accepted length of a draft of ``length`` tokens."""
        return float(payoff_of(self.odds, length))

    def observe(self, accepted: int, verified: int, drafts: int = 1) -> None:
        """Update with a verified model draft, one of ``drafts`` in its step. Mutates."""
        observe_model(self.odds, self.seen, accepted, verified, drafts)


def chance_of(payoff: float, length: int) -> float:
    """The chance per token at which a draft of ``length`` tokens has expected accepted length
    ``payoff``, by bisection."""
    low, high = 0.0, 1.0
    if length < 1:
        return 0.5
    for _ in range(30):
        middle = (low + high) / 2.0
        if sum(middle**position for position in range(1, length + 1)) < payoff:
            low = middle
        else:
            high = middle
    return (low + high) / 2.0
