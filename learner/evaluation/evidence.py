"""Evidence that may be looked at as often as one likes: what a gambler has won.

A number comes for each of many clusters of drafts, positive where one policy's choices brought more
than another's, and with it the most that they might have lost, whatever became of the drafts. As
long as the mean of the numbers is not above zero, no way of betting on positive ones is expected to
win: wealth that began at 1 ever reaches ``1 / alpha`` with a chance of at most ``alpha`` (Ville's
inequality; Waudby-Smith and Ramdas 2024, "Estimating means of bounded random variables by
betting"). Nobody knows the best stake, so the money is spread over several.

Losses count in full, however rare and large: a stake is a part of the wealth that the worst loss
may cost, by what is usually at stake. Where more is, gain and loss weigh less alike. A gain counts
at most as much as the worst loss might have, since anybody may send absurd numbers.

Where what is looked for may begin at any time, a new gambler starts at every cluster, and the sum
of what all of them hold is watched (the e-detector of Shin, Ramdas and Rinaldo 2023, in the form of
Shiryaev and Roberts): until a false alarm at the bound ``b`` it takes at least ``b`` clusters in
the mean.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from typing import Final

import numpy as np
from numpy.typing import NDArray

STAKES: Final = np.array([0.1, 0.3, 0.9])
"""Shares of a gambler's wealth that a cluster may cost."""
MEMORY: Final = 64
"""Clusters over which what is usually at stake, the median, is taken."""


@dataclass
class Bets:
    """What is held on one side against another; ``restarts`` makes it the detector's sum.

    ``evidence`` is the logarithm of the wealth, or of the sum. ``exposed`` is what was at stake of
    late, and ``held`` [stakes] what the gamblers hold, in logarithms.
    """

    restarts: bool = False
    exposed: list[float] = field(default_factory=list)
    held: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))

    def __post_init__(self) -> None:
        if not len(self.held):
            self.held = np.full(len(STAKES), -np.inf if self.restarts else 0.0)

    @property
    def evidence(self) -> float:
        """What the gamblers of all stakes hold, in the mean: its logarithm."""
        return float(np.logaddexp.reduce(self.held) - np.log(len(STAKES)))

    @property
    def hope(self) -> float:
        """What the middle stake holds: where it is nearly ruined, nothing is to be won soon."""
        return float(self.held[len(STAKES) // 2])

    def take(self, number: float, exposed: float) -> None:
        """Take in a cluster's ``number``, which could not be below ``-exposed``. Mutates."""
        usual = median(self.exposed) if self.exposed else 0.0
        if (scale := max(usual, exposed)) > 0.0:
            if self.restarts:
                self.held = np.logaddexp(self.held, 0.0)
            self.held += np.log1p(STAKES * min(max(number / scale, -1.0), 1.0))
            self.exposed = [*self.exposed[1 - MEMORY :], exposed]
