"""Head sampling by request, where the event rate exceeds the limit.

Whole requests are sampled, by a hash of their pseudonym, with probability 1/2, 1/4, and so on. A
request in a smaller sample is in every larger one. The decision is made at a request's first event
and stands, so a request's events are all sent or all dropped.
"""

from __future__ import annotations

import time
import zlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final

ADJUST_S: Final = 5.0
"""Interval between adjustments, long since requests keep the decision made at their start."""
RECOVERY_FACTOR: Final = 4.0
"""The probability is doubled only below a quarter of the limit, or it would oscillate."""
MAX_HALVINGS: Final = 20
MAX_REQUESTS: Final = 65_536
"""Most requests remembered, by latest event."""


class HeadSampler:
    """Keeps at most about ``per_second`` events a second."""

    def __init__(self, per_second: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.per_second, self._clock = per_second, clock
        self.halvings = 0  # of the probability, for new requests
        self._requests: OrderedDict[bytes, float] = OrderedDict()  # probabilities; 0: dropped
        self._kept, self._since = 0, clock()

    def shares(self, requests: Sequence[bytes]) -> list[float]:
        """The sampling probability of each event's request; 0 where it is dropped. Mutates."""
        shares = [self._share(request) for request in requests]
        self._kept += sum(map(bool, shares))
        now = self._clock()
        if now - self._since >= ADJUST_S:
            rate, self._kept, self._since = self._kept / (now - self._since), 0, now
            if rate > self.per_second:
                self.halvings = min(self.halvings + 1, MAX_HALVINGS)
            elif self.halvings and rate * RECOVERY_FACTOR < self.per_second:
                self.halvings -= 1
        return shares

    def _share(self, request: bytes) -> float:
        share = self._requests.pop(request, None)
        if share is None:
            share = 0.5**self.halvings
            if zlib.crc32(request) >= share * 2.0**32:
                share = 0.0
        self._requests[request] = share
        if len(self._requests) > MAX_REQUESTS:
            self._requests.popitem(last=False)
        return share
