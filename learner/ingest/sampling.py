"""Head sampling: the share of a scope's requests that is learned from when too many arrive.

Arrival rates are measured by the reader's clock, as event times come from many clocks. A backlog
arrives as fast as it is read; where it grows, at least as much arrives as was read. The learner
that holds a scope's lease decides and reports the rate in its status; others adopt it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final

WINDOW_SECONDS: Final = 10.0
HYSTERESIS: Final = 4.0
"""The rate is doubled only below a quarter of the limit, or it would oscillate."""
MIN_RATE: Final = 2.0**-14
"""Suffices for 1.6 million drafts a second, and a forged rate soon recovers."""
MAX_SCOPES: Final = 10_000  # the most recently updated: a forger may invent any number of scopes


class HeadSampler(dict[str, float]):
    """Sampling rates below one by scope, for about ``per_second`` drafts a second each."""

    def __init__(self, per_second: float, rates: Mapping[str, float] = {}) -> None:
        super().__init__(rates)
        self._per_second = per_second
        self._received: Counter[str] = Counter()
        self._since: float | None = None
        self._live, self._lag = False, 0

    def count(self, scope: str, drafts: int) -> None:
        """Count trainable drafts that arrived. Mutates."""
        self._received[scope] += drafts

    def adjust(self, now: float, live: bool, holds: Callable[[str], bool], lag: int = 0) -> None:
        """Adjust rates after a window that was live throughout, or whose lag grew. Mutates.

        Args:
            now: monotonic seconds.
            live: whether the reader is near the end of the topic.
            holds: whether this learner decides about a scope.
            lag: records up to that end, as far as known.
        """
        seconds = -1.0 if self._since is None else now - self._since
        if 0.0 <= seconds < WINDOW_SECONDS and live == self._live:
            return
        valid = seconds >= 0.0 and live == self._live and (live or lag >= self._lag > 0)
        for scope in filter(holds, {*self._received, *self} if valid else ()):
            rate = self.get(scope, 1.0)
            per_second = self._received[scope] / seconds * rate
            if live and per_second * HYSTERESIS < self._per_second:
                rate *= 2.0
            while per_second > self._per_second and rate > MIN_RATE:
                rate, per_second = rate / 2.0, per_second / 2.0
            self._set(scope, rate)
        self._received.clear()
        self._since, self._live, self._lag = now, live, lag

    def adopt(self, reported: Mapping[str, float]) -> None:
        """Adopt rates that the holders of scopes report. Mutates."""
        for scope, rate in reported.items():
            self._set(scope, max(rate, MIN_RATE))

    def _set(self, scope: str, rate: float) -> None:
        self.pop(scope, None)
        if rate < 1.0:
            self[scope] = rate
        if len(self) > MAX_SCOPES:
            del self[next(iter(self))]
