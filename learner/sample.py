"""Which requests are learned from where more come than there is time, or memory, for.

A sample over time, by whole requests: those whose hash falls below a share. The share is halved and
doubled as the rows' own times say how many come, so it is the same whoever reads them and when, and
a request that is in a smaller sample is in every larger one.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from learner.rows import Rows

WINDOW: Final = 1_024
"""Rows between two looks at how many come."""
INNER: Final = (0.1, 0.9)
"""Quantiles of a window's times that stand for its span: a clock that is wrong, and the leap from
one worker's backlog to the next, move them little."""
SLACK: Final = 4.0
"""The share is doubled only where a quarter of what is wanted comes, or it would flutter."""
MOST_HALVINGS: Final = 30


class Sample:
    """The share of requests in force; at most ``per_second`` rows are wanted, about."""

    def __init__(self, per_second: float) -> None:
        self.per_second = per_second
        self.halvings = 0
        self._times: list[float] = []

    @property
    def share(self) -> float:
        """Of requests that are learned from."""
        return 0.5**self.halvings

    def take(self, rows: Rows) -> Rows:
        """Those of ``rows`` that are learned from. Mutates."""
        kept, at = [], 0
        while at < len(rows):
            end = min(len(rows), at + WINDOW - len(self._times))
            bound = np.uint64((1 << 64) - 1 >> self.halvings)
            kept.append(np.arange(at, end)[rows.request[at:end] <= bound])
            self._times += rows.time[at:end].tolist()
            at = end
            if len(self._times) == WINDOW:
                self._look()
        taken = np.concatenate(kept) if kept else np.arange(0)
        return rows if len(taken) == len(rows) else rows.take(taken)

    def _look(self) -> None:
        first, last = np.quantile(self._times, INNER)
        self._times.clear()
        if last <= first:
            return  # one moment says nothing of how many come in a second
        wanted = WINDOW * (INNER[1] - INNER[0]) / float(last - first) * self.share
        if wanted > self.per_second:
            self.halvings = min(self.halvings + 1, MOST_HALVINGS)
        elif self.halvings and wanted * SLACK < self.per_second:
            self.halvings -= 1

    def snapshot(self) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        """Everything :meth:`restored` needs."""
        return {"times": np.array(self._times, np.float64)}, {"halvings": self.halvings}

    @classmethod
    def restored(
        cls, per_second: float, snapshot: tuple[dict[str, NDArray[Any]], dict[str, Any]]
    ) -> Sample:
        """The sample as it was."""
        arrays, numbers = snapshot
        sample = cls(per_second)
        sample.halvings, sample._times = int(numbers["halvings"]), arrays["times"].tolist()
        return sample
