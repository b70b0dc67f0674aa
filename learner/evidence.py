"""Evidence that may be looked at as often as one likes: what a gambler has won.

A number comes for each of many clusters of drafts, positive where one policy foresaw them better
than another. As long as their mean, given what came before, is not above zero, no way of betting on
positive ones is expected to win: wealth that began at 1 ever reaches ``1 / alpha`` with a chance of
at most ``alpha`` (Ville's inequality; Waudby-Smith and Ramdas 2024, "Estimating means of bounded
random variables by betting"). Nobody knows the best stake, so the money is spread over several.

Where what is looked for may begin at any time, a new gambler starts at every cluster, and the sum
of what all of them hold is watched (the e-detector of Shin, Ramdas and Rinaldo 2023, in the form of
Shiryaev and Roberts): until a false alarm at the bound ``b`` it takes at least ``b`` clusters in
the mean.

A number counts at most ``REACH`` times what is usual of those before it, up or down: so the claims
are about means of numbers cut there.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

STAKES: Final = np.array([0.05, 0.1, 0.2, 0.4, 0.8])
"""Shares of a gambler's wealth that a cluster may cost: the best for an advantage of a twentieth of
its own spread to one of its whole spread."""
REACH: Final = 1.0
"""Mean distances from zero at which a number is cut."""
SETTLING: Final = 3
"""Clusters that tell what is usual before the first bet."""
MEMORY: Final = 64.0
"""Clusters over which what is usual is taken."""


class Bets:
    """What is held on one side against another; ``restarts`` makes it the detector's sum.

    ``evidence`` is the logarithm of the wealth, or of the sum.
    """

    def __init__(self, restarts: bool = False) -> None:
        self.restarts = restarts
        self.taken = 0
        self._usual = 0.0
        self._held = np.full(len(STAKES), -np.inf if restarts else 0.0)  # logarithms

    @property
    def evidence(self) -> float:
        """What the gamblers of all stakes hold, in the mean: its logarithm."""
        return float(np.logaddexp.reduce(self._held) - np.log(len(STAKES)))

    @property
    def hope(self) -> float:
        """What the middle stake holds: where it is nearly ruined, nothing is to be won soon."""
        return float(self._held[len(STAKES) // 2])

    def take(self, number: float) -> None:
        """Take in a cluster's number. Mutates."""
        if self.taken >= SETTLING and self._usual > 0.0:
            outcome = min(max(number / (REACH * self._usual), -1.0), 1.0)
            if self.restarts:
                self._held = np.logaddexp(self._held, 0.0)
            self._held += np.log1p(STAKES * outcome)
        self.taken += 1
        self._usual += (abs(number) - self._usual) / min(self.taken, MEMORY)

    def snapshot(self) -> dict[str, Any]:
        """Everything :meth:`restored` needs, JSON-ready."""
        held = [None if np.isneginf(log) else log for log in self._held.tolist()]
        return {"restarts": self.restarts, "taken": self.taken, "usual": self._usual, "held": held}

    @classmethod
    def restored(cls, numbers: dict[str, Any]) -> Bets:
        """Bets as they were.

        Raises:
            KeyError, ValueError, TypeError: the numbers are not of this version.
        """
        bets = cls(bool(numbers["restarts"]))
        bets.taken, bets._usual = int(numbers["taken"]), float(numbers["usual"])
        held = [-np.inf if log is None else float(log) for log in numbers["held"]]
        bets._held[:] = held
        return bets
