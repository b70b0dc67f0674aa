"""Evidence that may be looked at as often as one likes: what a gambler has won.

A number comes for each of many sessions, positive where one policy's choices brought more than
another's, and with it the most that they might have lost, whatever became of the drafts. As long as
the mean of the numbers is not above zero, no way of betting on positive ones is expected to win:
wealth that began at 1 ever reaches ``1 / alpha`` with a chance of at most ``alpha`` (Ville's
inequality; Waudby-Smith and Ramdas 2024, "Estimating means of bounded random variables by
betting"). Nobody knows the best stake, so the money is spread over several.

Losses count in full, however rare and large: a stake is a part of the wealth that the worst loss
may cost. A gain counts at most as much, since anybody may send absurd numbers.

Where what is looked for may begin at any time, a new gambler starts at every session, and the sum
of what all of them hold is watched (the e-detector of Shin, Ramdas and Rinaldo 2023, in the form of
Shiryaev and Roberts): until a false alarm at the bound ``b`` it takes at least ``b`` sessions in
the mean.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

STAKES: Final = np.array([0.05, 0.1, 0.2, 0.4, 0.8])
"""Shares of a gambler's wealth that a session may cost."""
MEMORY: Final = 512.0
"""Sessions after which an exposure that was never met again has lost most of its weight."""


class Bets:
    """What is held on one side against another; ``restarts`` makes it the detector's sum.

    ``evidence`` is the logarithm of the wealth, or of the sum.
    """

    def __init__(self, restarts: bool = False) -> None:
        self.restarts = restarts
        self._most = 0.0
        self._held = np.full(len(STAKES), -np.inf if restarts else 0.0)  # logarithms

    @property
    def evidence(self) -> float:
        """What the gamblers of all stakes hold, in the mean: its logarithm."""
        return float(np.logaddexp.reduce(self._held) - np.log(len(STAKES)))

    @property
    def hope(self) -> float:
        """What the middle stake holds: where it is nearly ruined, nothing is to be won soon."""
        return float(self._held[len(STAKES) // 2])

    def take(self, number: float, exposed: float) -> None:
        """Take in a session's ``number``, which could not be below ``-exposed``. Mutates."""
        most = max(self._most, exposed)
        if most > 0.0:
            if self.restarts:
                self._held = np.logaddexp(self._held, 0.0)
            self._held += np.log1p(STAKES * min(max(number / most, -1.0), 1.0))
        self._most = max(exposed, most * (1.0 - 1.0 / MEMORY))

    def snapshot(self) -> dict[str, Any]:
        """Everything :meth:`restored` needs, JSON-ready."""
        held = [None if np.isneginf(log) else log for log in self._held.tolist()]
        return {"restarts": self.restarts, "most": self._most, "held": held}

    @classmethod
    def restored(cls, numbers: dict[str, Any]) -> Bets:
        """Bets as they were.

        Raises:
            KeyError, ValueError, TypeError: the numbers are not of this version.
        """
        bets = cls(bool(numbers["restarts"]))
        bets._most = float(numbers["most"])
        bets._held[:] = [-np.inf if log is None else float(log) for log in numbers["held"]]
        return bets
