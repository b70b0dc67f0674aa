"""Max-min fair sharing of a bounded memory: no owner can evict another's last megabytes.

Over budget, the owner with the largest *excess* evicts: the bytes it holds beyond its floor. Names
cost nothing to invent, so not every owner has a floor. All floors together are at most half of the
budget. They are assigned first come, first served, and reassigned after an hour without a request.
Owners without a floor share the rest by the same rule.
"""

from __future__ import annotations

import heapq
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

ALONE: Final = "!"
"""The cache key of requests whose tenant is unknown: they share nothing."""
FLOORS: Final = 256
"""Owners with a floor. Together they reserve half of the budget: of 2 GiB, 4 MiB each, or 300
outputs of 500 tokens."""
IDLE_SECONDS: Final = 3600.0
"""An owner idle for so long may lose its floor to another."""
COARSE: Final = 1 << 14
"""Bytes by which an owner grows before it is re-queued by size."""


def cache_key(tenant: str, salt: str = "") -> str:
    """The key of a tenant, or of a salt within it: requests with one key share text."""
    return f"{tenant}/{salt}" if salt else tenant


def owner_of(key: str) -> str:
    """The owner that a :func:`cache_key` counts toward: the tenant, whatever its salts."""
    return key.partition("/")[0]


@dataclass(slots=True)
class _Owner:
    held: int = 0
    seen: float = 0.0  # seconds of the clock, of its last request
    has_floor: bool = False
    queued: int = -1  # bytes held when it was queued last


class Shares:
    """Bytes held by each owner, and who evicts next. Owners that hold nothing are forgotten."""

    def __init__(self, budget: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin with nothing held; ``budget``: bytes for all owners together."""
        self.budget = budget
        self.floor = budget // 2 // FLOORS
        self.held = 0
        self._clock = clock
        self._owners: defaultdict[str, _Owner] = defaultdict(_Owner)
        self._floors: OrderedDict[str, _Owner] = OrderedDict()  # longest without a request first
        self._heap: list[tuple[int, str]] = []  # minus excess, at most what it is now; name

    def of(self, name: str) -> int:
        """Bytes that ``name`` holds."""
        return self._owners[name].held if name in self._owners else 0

    def visit(self, name: str) -> None:
        """Record a request of ``name``, which may get a floor. Mutates."""
        owner = self._owners[name]
        owner.seen = self._clock()
        if len(self._floors) >= FLOORS and not owner.has_floor:
            idlest, other = next(iter(self._floors.items()))
            if owner.seen - other.seen < IDLE_SECONDS:
                return
            del self._floors[idlest]
            other.has_floor = False
            self._queue(idlest)
        self._floors[name], owner.has_floor = owner, True
        self._floors.move_to_end(name)

    def grow(self, name: str, count: int) -> None:
        """Add ``count`` bytes, negative or not, to what ``name`` holds. Mutates."""
        owner = self._owners[name]
        owner.held += count
        self.held += count
        if owner.held - owner.queued >= COARSE or owner.queued < 0:
            self._queue(name)

    def forget(self, name: str) -> None:
        """Remove ``name``, which holds nothing and has no requests. Mutates."""
        if name in self._owners:
            self.held -= self._owners.pop(name).held
            self._floors.pop(name, None)

    def evict(self, evict_from: Callable[[str], bool]) -> bool:
        """Evict from one owner, trying the largest excess first.

        Args:
            evict_from: evicts a part of an owner's memory and reports it by :meth:`grow`; False if
                there is none to evict.

        Returns:
            False if no owner had memory to evict.
        """
        skipped = set[str]()
        evicted = False
        while self._heap and not evicted:
            excess, name = heapq.heappop(self._heap)
            if name not in self._owners or name in skipped:
                continue
            if -excess > self._excess(name):  # it has shrunk since
                self._queue(name)
                continue
            evicted = evict_from(name)
            if not evicted:
                skipped.add(name)
            elif name in self._owners:
                self._queue(name)
        for name in skipped:
            self._queue(name)
        return evicted

    def _excess(self, name: str) -> int:
        owner = self._owners[name]
        return owner.held - self.floor * owner.has_floor

    def _queue(self, name: str) -> None:
        if len(self._heap) > 4 * len(self._owners) + 64:  # most are earlier entries of an owner
            self._heap = [(-self._excess(each), each) for each in self._owners]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (-self._excess(name), name))
        self._owners[name].queued = self._owners[name].held
