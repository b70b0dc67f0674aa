"""Notices that the champion has become worse, and since when. The only module that imports river.

ADWIN (Bifet and Gavalda, 2007) keeps the longest recent window of numbers with one mean; when it
cuts the window, what remains is what came after the change.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from river.drift import ADWIN

from decoder.contracts.features import FloatArray

DELTA: Final = 0.002
"""river's default: the chance of a false alarm at a check, for independent numbers. Drafts of one
request are not independent, so alarms are a little more frequent; the floor makes them cheap."""

FLOOR: Final = 50
"""Events trusted at least after an alarm. Where the change was noticed at once, some of them are
older: with 300, their contrary labels doubled the error for the next two thousand events."""


def residuals(
    predicted: FloatArray, accepted: FloatArray, censored: NDArray[np.bool_]
) -> FloatArray:
    """Absolute error [n] in tokens; where ``censored``, only how far the bound was missed."""
    error = predicted - accepted
    missed: FloatArray = np.where(censored, np.minimum(error, 0.0), error)
    return np.abs(missed)


class Detector:
    """Watches one scope's stream of the champion's residuals. Not kept over a restart.

    ``reset`` belongs to every change of champion: another network has another error, which says
    nothing about the traffic.
    """

    def __init__(self) -> None:
        self._adwin: Any = ADWIN(delta=DELTA)
        self._fed = 0

    def reset(self, baseline: FloatArray | None = None) -> None:
        """Start anew, from the new champion's residuals [n] on held-out drafts it already met.

        Without them, a change that comes together with a new champion would pass for its usual
        error.
        """
        self._adwin = ADWIN(delta=DELTA)
        self._fed = 0
        for error in () if baseline is None else baseline.tolist():
            self._adwin.update(error)

    def update(self, errors: FloatArray) -> int | None:
        """Feed residuals [n] in order of arrival.

        Returns:
            After a rise of the error, how many of the newest events came since, at least ``FLOOR``;
            None otherwise. A fall also moves the window, but it is no reason to forget anything.
        """
        rise: int | None = None
        for index, error in enumerate(errors.tolist()):
            before = self._adwin.estimation
            self._adwin.update(error)
            self._fed += 1
            if self._adwin.drift_detected and self._adwin.estimation > before:
                rise = min(int(self._adwin.width), self._fed) + len(errors) - 1 - index
        return None if rise is None else max(rise, FLOOR)
