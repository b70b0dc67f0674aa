"""Bounded memory divided among owners, so that none can drive out another's last megabytes.

When more is held than may be, what gives way is a part of the owner with the largest *excess*: what
it holds beyond its floor. That is max-min fairness: whoever holds little keeps it, however much
the others bring. Names cost nothing to invent, so not everybody who comes has a floor: the floors
of all together are at most half of the budget, first come, first served, and one is handed on only
after an hour without a request. Owners without a floor share the rest, fairly again.
"""

from __future__ import annotations

import heapq
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

ALONE: Final = "!"
"""The key of requests that share nothing with anybody: nobody knows whose they are."""
FLOORS: Final = 256
"""Owners with a floor. Together they may claim half of the budget: of 2 GiB, 4 MiB each, three
hundred outputs of five hundred tokens."""
IDLE_SECONDS: Final = 3600.0
"""Without a request for so long, an owner's floor may go to another."""
COARSE: Final = 1 << 14
"""Bytes by which an owner grows before its place among the largest is looked at again."""


def cache_key(tenant: str, salt: str = "") -> str:
    """What requests have in common that share text: a tenant and, within it, a salt."""
    return f"{tenant}/{salt}" if salt else tenant


def owner_of(key: str) -> str:
    """Whose share a :func:`cache_key` counts to: the tenant's, however many salts it uses."""
    return key.partition("/")[0]


@dataclass(slots=True)
class _Owner:
    name: str
    held: int = 0
    seen: float = 0.0  # seconds of the clock, of its last request
    has_floor: bool = False
    queued: int = -1  # bytes held when its entry in the heap was made
    entry: int = 0  # number of that entry; older ones are void


class Shares:
    """Bytes held by each owner; says who gives way. Owners that hold nothing are forgotten."""

    def __init__(self, budget: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin with nothing held.

        Args:
            budget: bytes that all owners together should not exceed.
            clock: seconds that only rise.
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
        """A request of ``name`` begins: it may get a floor. Mutates."""
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
        """``name`` holds ``count`` bytes more, or fewer if negative. Mutates."""
        owner = self._owners.get(name)
        if owner is None:
            owner = self._owners[name] = _Owner(name)
        owner.held += count
        self.held += count
        if owner.held - owner.queued >= COARSE or owner.queued < 0:
            self._queue(owner)

    def forget(self, name: str) -> None:
        """``name`` holds nothing more and nobody works for it. Mutates."""
        owner = self._owners.pop(name, None)
        if owner is not None:
            self.held -= owner.held
            self._floors.pop(name, None)

    def give_way(self, take: Callable[[str], bool]) -> bool:
        """Ask owners, the largest excess first, until one had something to give.

        Args:
            take: takes a part from an owner and books it with :meth:`grow`; False if there is none.

        Returns:
            False if nobody had anything.
        """
        nothing: list[tuple[int, int, str]] = []
        taken = False
        while self._heap and not taken:
            top = heapq.heappop(self._heap)
            owner = self._owners.get(top[2])
            if owner is None or owner.entry != top[1]:
                continue
            if -top[0] > self._excess(owner):  # it has shrunk since
                self._queue(owner)
                continue
            taken = take(owner.name)
            if not taken:
                nothing.append(top)
            elif owner.name in self._owners:
                self._queue(owner)
        for entry in nothing:
            heapq.heappush(self._heap, entry)
        return taken

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
