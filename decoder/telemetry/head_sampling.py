"""Head sampling by request, where the event rate exceeds the limit.

Whole requests, drawn by a hash of their pseudonym: half of them, a quarter, and so on, so that a
request in a smaller share is in every larger one, and what is known of a request is known whole.
The draw is made when a request is first heard of, and stands.
"""

from __future__ import annotations

import time
import zlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final

LOOK_S: Final = 5.0
"""Between two looks at how many come: requests that began before the last one still speak."""
SLACK: Final = 4.0
"""The share is doubled only where a quarter of what may be sent comes, or it would flutter."""
MOST_HALVINGS: Final = 20
REQUESTS: Final = 65_536
"""Remembered, the ones heard of last."""


class HeadSampler:
    """Keeps about ``per_second`` events a second at most."""

    def __init__(self, per_second: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.per_second, self._clock = per_second, clock
        self.halvings = 0  # for requests that are new
        self._requests: OrderedDict[bytes, float] = OrderedDict()  # their shares; 0: not told of
        self._kept, self._since = 0, clock()

    def shares(self, requests: Sequence[bytes]) -> list[float]:
        """The chance that each event's request had to be told of; 0 where it is not. Mutates."""
        shares = [self._share(request) for request in requests]
        self._kept += sum(map(bool, shares))
        now = self._clock()
        if now - self._since >= LOOK_S:
            rate, self._kept, self._since = self._kept / (now - self._since), 0, now
            if rate > self.per_second:
                self.halvings = min(self.halvings + 1, MOST_HALVINGS)
            elif self.halvings and rate * SLACK < self.per_second:
                self.halvings -= 1
        return shares

    def _share(self, request: bytes) -> float:
        share = self._requests.pop(request, None)
        if share is None:
            share = 0.5**self.halvings
            if zlib.crc32(request) >= share * 2.0**32:
                share = 0.0
        self._requests[request] = share
        if len(self._requests) > REQUESTS:
            self._requests.popitem(last=False)
        return share
