"""Which requests are told of where a worker makes more events than it may send.

Whole requests, drawn by a hash of their pseudonym: half of them, a quarter, and so on, so that a
request in a smaller share is in every larger one, and what is known of a request is known whole.
The draw is made when a request is first heard of, and stands.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final

from decoder.contracts.events import DraftEvent

LOOK_S: Final = 5.0
"""Between two looks at how many come: requests that began before the last one still speak."""
SLACK: Final = 4.0
"""The share is doubled only where a quarter of what may be sent comes, or it would flutter."""
MOST_HALVINGS: Final = 20
REQUESTS: Final = 65_536
"""Remembered, the ones heard of last."""


class Shedding:
    """Keeps about ``per_second`` events a second at most; 0 keeps all."""

    def __init__(self, per_second: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.per_second, self._clock = per_second, clock
        self.halvings = 0  # for requests that are new
        self._requests: OrderedDict[str, float] = OrderedDict()  # their shares; 0: not told of
        self._kept, self._since = 0, clock()

    def keep(self, events: Sequence[DraftEvent]) -> list[DraftEvent]:
        """Those of ``events`` that are told of, with the chance that they had. Mutates."""
        if not self.per_second:
            return list(events)
        kept = []
        for event in events:
            share = self._share(event.request)
            if share:
                kept.append(event if share == 1.0 else event._replace(share=share))
        self._kept += len(kept)
        self._look()
        return kept

    def _share(self, request: str) -> float:
        share = self._requests.get(request)
        if share is None:
            drawn = hashlib.blake2b(request.encode(), digest_size=8).digest()
            share = 0.5**self.halvings
            if int.from_bytes(drawn, "little") >= share * 2.0**64:
                share = 0.0
            self._requests[request] = share
            if len(self._requests) > REQUESTS:
                self._requests.popitem(last=False)
        else:
            self._requests.move_to_end(request)
        return share

    def _look(self) -> None:
        passed = self._clock() - self._since
        if passed < LOOK_S:
            return
        rate, self._kept, self._since = self._kept / passed, 0, self._clock()
        if rate > self.per_second:
            self.halvings = min(self.halvings + 1, MOST_HALVINGS)
        elif self.halvings and rate * SLACK < self.per_second:
            self.halvings -= 1
