"""What cache drafts paid before: in this request, for this tenant, and in like contexts.

Everything here is updated as labels resolve, so it adapts within one request, long before any
retraining, and holds nothing that was not known when the next draft is judged. A tenant's memory is
its own, bounded in bytes over all of them, and keeps hashes, no tokens.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import log1p
from typing import Final

from decoder.contracts.features import MEMORY_KEYS, RECENT
from decoder.tenancy.shares import ALONE, Shares, owner_of

SLOTS: Final = 1 << 14
"""Entries of a tenant's memory for each key; a newcomer takes over the slot it falls into."""
ENTRY_BYTES: Final = 448
"""Bytes of an entry, at most: 395 measured over 48,000."""
MEMORY_BYTES: Final = 1024
"""Bytes of a memory without entries."""
LATELY: Final = 64
"""Memories handed out last, whose growth is booked whenever one is handed out."""
FORGOTTEN: Final = 512
"""Entries of a memory given up that are freed at each new request: 0.3 us each."""
FADE: Final = 0.8
"""Weight of an entry's past at each new payoff: about five are remembered."""
PRIOR_LOG: Final = 0.7
PRIOR_SHARE: Final = 0.3
PRIOR_FIRST: Final = 0.5
"""What an average draft does: log1p(payoff), payoff / length, first token accepted."""
FAST, SLOW, FIRST, TENANT, MODEL_FADE = 0.3, 0.05, 0.1, 0.002, 0.1
RECENT_CYCLES: Final = 16
"""Cycles over which the cache-selection rate is taken."""
_ALL_CYCLES: Final = (1 << RECENT_CYCLES) - 1

Keys = tuple[int, ...]
Entry = tuple[int, float, float, float, tuple[float, float, float]]
"""Key, weight, decayed sums of log payoff and share, and the features made of them: what can be
computed when a label resolves is not computed when a draft waits."""
_NEW: Final[Entry] = (0, 0.0, 0.0, 0.0, (PRIOR_LOG, PRIOR_SHARE, 0.0))


@dataclass(slots=True)
class TenantMemory:
    """Payoffs of one tenant: an average, and entries by the hash of context and draft."""

    first: float = PRIOR_FIRST
    log_payoff: float = PRIOR_LOG
    _tables: tuple[dict[int, Entry], ...] = field(
        default_factory=lambda: tuple({} for _ in MEMORY_KEYS)
    )

    def __len__(self) -> int:
        return sum(len(table) for table in self._tables)

    def forget(self, most: int) -> int:
        """Drop entries, at most ``most``; how many it were. Mutates."""
        dropped = 0
        for table in self._tables:
            while table and dropped < most:
                table.popitem()
                dropped += 1
        return dropped

    def recall(self, keys: Keys) -> tuple[float, ...]:
        """Mean log payoff, mean share and log weight for each of ``keys``, flat."""
        flat: tuple[float, ...] = ()
        for key, table in zip(keys, self._tables, strict=True):
            entry = table.get(key % SLOTS, _NEW)
            flat += entry[4] if entry[0] == key else _NEW[4]
        return flat

    def learn(self, keys: Keys, accepted: int, length: int) -> None:
        """Take in a resolved payoff, in tokens, of a draft of ``length``. Mutates."""
        value, share = log1p(accepted), accepted / length
        self.first += TENANT * ((accepted > 0) - self.first)
        self.log_payoff += TENANT * (value - self.log_payoff)
        for key, table in zip(keys, self._tables, strict=True):
            entry = table.get(key % SLOTS, _NEW)
            _, weight, logs, shares, _ = entry if entry[0] == key else _NEW
            weight, logs, shares = weight * FADE + 1.0, logs * FADE + value, shares * FADE + share
            whole = weight + 1.0
            found = (logs + PRIOR_LOG) / whole, (shares + PRIOR_SHARE) / whole, log1p(weight)
            table[key % SLOTS] = key, weight, logs, shares, found


class TenantMemories:
    """Memories by cache key, bounded in bytes over all of them; each tenant has its fair share.

    A request that shares nothing (:data:`ALONE`) has a memory of its own.
    """

    def __init__(self, budget: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin empty. ``budget`` is in bytes, ``clock`` in seconds."""
        self._shares = Shares(budget, clock)
        self._kept: dict[str, OrderedDict[str, TenantMemory]] = {}  # by owner, by key
        self._booked: dict[str, int] = {}
        self._lately: deque[str] = deque(maxlen=LATELY)
        self._dying: deque[TenantMemory] = deque()

    @property
    def held_bytes(self) -> int:
        """Bytes of all memories at most, as of the last request that began."""
        return self._shares.held

    def __len__(self) -> int:
        return len(self._booked)

    def of(self, key: str) -> TenantMemory:
        """The memory that a request of ``key`` learns into. Mutates.

        Where a memory gives way, requests under way keep it, while it is emptied by and by.
        """
        self._free()
        if key == ALONE:
            return TenantMemory()
        owner = owner_of(key)
        self._shares.visit(owner)
        mine = self._kept.setdefault(owner, OrderedDict())
        found = mine.setdefault(key, TenantMemory())
        mine.move_to_end(key)
        self._booked.setdefault(key, 0)
        self._lately.append(key)
        for name in dict.fromkeys(self._lately):
            self._book(name)
        while self._shares.held > self._shares.budget and self._shares.give_way(self._take):
            pass
        return found

    def book(self, key: str) -> None:
        """Count what the memory of ``key`` has grown by; one that gave way is none. Mutates."""
        if key in self._booked:
            self._book(key)

    def _book(self, key: str) -> None:
        owner = owner_of(key)
        memory = self._kept[owner].get(key) if owner in self._kept else None
        if memory is not None:
            now = MEMORY_BYTES + len(memory) * ENTRY_BYTES
            self._shares.grow(owner, now - self._booked[key])
            self._booked[key] = now

    def _take(self, owner: str) -> bool:
        """Give up the memory of the owner's that was asked for longest ago."""
        mine = self._kept.get(owner)
        if not mine:
            return False
        key, memory = mine.popitem(last=False)
        self._shares.grow(owner, -self._booked.pop(key))
        self._dying.append(memory)
        if not mine:
            del self._kept[owner]
            self._shares.forget(owner)
        return True

    def _free(self) -> None:
        left = FORGOTTEN
        while left > 0 and self._dying:
            left -= max(self._dying[0].forget(left), 1)
            if not len(self._dying[0]):
                self._dying.popleft()


def memory_keys(context: Sequence[int], draft: Sequence[int]) -> Keys:
    """Keys of ``draft`` token ids after ``context``, its last token ids.

    The order is that of ``MEMORY_KEYS``. Hashes of integers are the same in every process.
    """
    last = context[-1] if context else -1
    return hash(tuple(draft[:8])), hash(tuple(context[-2:])), hash((last, draft[0]))


@dataclass(slots=True)
class History:
    """What a request has shown so far. Holds only labels already resolved: no leak."""

    payoffs: deque[int] = field(default_factory=lambda: deque(maxlen=RECENT))
    payoff_features: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0, 0.0)
    """Last, second last, third last, mean and maximum of ``payoffs``."""
    cache_share: float = 0.0
    first: float = PRIOR_FIRST
    fast: float = PRIOR_LOG
    slow: float = PRIOR_LOG
    broke_at: int = 0  # output tokens committed when a draft last broke off
    model: float = 1.0
    _arms: int = 0  # a bit for each of the last cycles, the newest lowest
    _cycles: int = 0  # that it tells of

    def took(self, cache: bool) -> None:
        """Take in whether a cycle verifies a cache draft. Mutates."""
        self._arms = (self._arms << 1 | cache) & _ALL_CYCLES
        self._cycles = min(self._cycles + 1, RECENT_CYCLES)
        self.cache_share = self._arms.bit_count() / self._cycles

    def learn(self, accepted: int, length: int, generated: int) -> None:
        """Take in a resolved payoff of a draft of ``length``, known after ``generated`` tokens."""
        payoffs = self.payoffs
        payoffs.append(accepted)
        count = len(payoffs)
        before = payoffs[-2] if count > 1 else 0
        earlier = payoffs[-3] if count > 2 else 0
        self.payoff_features = accepted, before, earlier, sum(payoffs) / count, max(payoffs)
        value = log1p(accepted)
        self.first += FIRST * ((accepted > 0) - self.first)
        self.fast += FAST * (value - self.fast)
        self.slow += SLOW * (value - self.slow)
        if accepted < length:
            self.broke_at = generated

    def learn_model(self, accepted: float) -> None:
        """Take in what the target accepts of a model draft of full length. Mutates."""
        self.model += MODEL_FADE * (accepted - self.model)
