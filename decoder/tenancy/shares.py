"""Max-min fair sharing of a bounded memory: no owner can evict another's last megabytes.

Over budget, the owner with the largest *excess* evicts: the bytes it holds beyond its floor. Names
cost nothing to invent, so not every owner has a floor. All floors together are at most half of the
budget. They are assigned first come, first served, and reassigned after an hour without a request.
Owners without a floor share the rest by the same rule.
"""

from __future__ import annotations

import heapq
import time
from collections import OrderedDict
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
    name: str
    held: int = 0
    seen: float = 0.0  # seconds of the clock, of its last request
    has_floor: bool = False
    queued: int = -1  # bytes held when its entry in the heap was made
    entry: int = 0  # number of that entry; older entries are stale


class Shares:
    """Bytes held by each owner, and who evicts next. Owners that hold nothing are forgotten."""

    def __init__(self, budget: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin with nothing held.

        Args:
            budget: bytes for all owners together.
            clock: monotonic seconds.
        """
        self.budget = budget
        self.floor = budget // 2 // FLOORS
        self.held = 0
        self._clock = clock
        self._owners: dict[str, _Owner] = {}
        self._floors: OrderedDict[str, _Owner] = OrderedDict()  # longest without a request first
        self._heap: list[tuple[int, int, str]] = []  # minus excess, entry, name
        self._entries = 0

    def of(self, name: str) -> int:
        """Bytes that ``name`` holds."""
        owner = self._owners.get(name)
        return 0 if owner is None else owner.held

    def visit(self, name: str) -> None:
        """Record a request of ``name``, which may get a floor. Mutates."""
        owner = self._owners.get(name)
        if owner is None:
            owner = self._owners[name] = _Owner(name)
        owner.seen = self._clock()
        if owner.has_floor:
            self._floors.move_to_end(name)
            return
        if len(self._floors) >= FLOORS:
            longest = next(iter(self._floors.values()))
            if owner.seen - longest.seen < IDLE_SECONDS:
                return
            del self._floors[longest.name]
            longest.has_floor = False
            self._queue(longest)
        self._floors[name] = owner
        owner.has_floor = True

    def grow(self, name: str, count: int) -> None:
        """Add ``count`` bytes, negative or not, to what ``name`` holds. Mutates."""
        owner = self._owners.get(name)
        if owner is None:
            owner = self._owners[name] = _Owner(name)
        owner.held += count
        self.held += count
        if owner.held - owner.queued >= COARSE or owner.queued < 0:
            self._queue(owner)

    def forget(self, name: str) -> None:
        """Remove ``name``, which holds nothing and has no requests. Mutates."""
        owner = self._owners.pop(name, None)
        if owner is not None:
            self.held -= owner.held
            self._floors.pop(name, None)

    def evict(self, evict_from: Callable[[str], bool]) -> bool:
        """Evict from one owner, trying the largest excess first.

        Args:
            evict_from: evicts a part of an owner's memory and reports it by :meth:`grow`; False if
                there is none to evict.

        Returns:
            False if no owner had memory to evict.
        """
        skipped: list[tuple[int, int, str]] = []
        evicted = False
        while self._heap and not evicted:
            top = heapq.heappop(self._heap)
            owner = self._owners.get(top[2])
            if owner is None or owner.entry != top[1]:
                continue
            if -top[0] > self._excess(owner):  # it has shrunk since
                self._queue(owner)
                continue
            evicted = evict_from(owner.name)
            if not evicted:
                skipped.append(top)
            elif owner.name in self._owners:
                self._queue(owner)
        for entry in skipped:
            heapq.heappush(self._heap, entry)
        return evicted

    def _excess(self, owner: _Owner) -> int:
        return owner.held - (self.floor if owner.has_floor else 0)

    def _queue(self, owner: _Owner) -> None:
        self._entries += 1
        owner.queued, owner.entry = owner.held, self._entries
        heapq.heappush(self._heap, (-self._excess(owner), owner.entry, owner.name))
        if len(self._heap) > 4 * len(self._owners) + 64:
            self._heap = [e for e in self._heap if self._live(e)]
            heapq.heapify(self._heap)

    def _live(self, entry: tuple[int, int, str]) -> bool:
        owner = self._owners.get(entry[2])
        return owner is not None and owner.entry == entry[1]
