"""Per-tenant running means of accepted length by context hash.

They are updated as labels resolve, so they adapt within one request, long before retraining, and
contain only what is known when the next draft is judged. Each cache key has its own memory: a row
of one hash table of bounded size. It holds hashes, not tokens.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from itertools import count
from typing import Annotated, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from decoder.compiled import compiled
from decoder.contracts.features import MEMORY_KEYS
from decoder.drafting.windows import mixed
from decoder.tenancy.shares import ALONE, FLOORS, Shares, owner_of

KINDS: Final = len(MEMORY_KEYS)
ROWS: Final = 2 * FLOORS  # memories, at most: an owner's guaranteed share holds one
FADE: Final = 0.8  # decay of an entry at each new payoff: a window of about five
TENANT: Final = 0.002
PRIOR_LOG: Final = 0.7
PRIOR_SHARE: Final = 0.3
PRIOR_FIRST: Final = 0.5
"""Priors, from an average draft: log1p(payoff), payoff / length, share of accepted first tokens."""
MEMORY: Final = np.dtype(
    [
        ("first", "f8"),  # decayed share of drafts whose first token was accepted
        ("log_payoff", "f8"),  # decayed mean of log1p(payoff)
    ],
    align=True,
)
ENTRY: Final = np.dtype(
    [("tag", "u4"), ("weight", "f4"), ("log_payoff", "f4"), ("share", "f4")], align=True
)
"""Upper bits of a key, and decayed sums."""


class Payoffs(NamedTuple):
    """All memories; memory 0 stays empty."""

    memories: Annotated[NDArray[Any], MEMORY]  # [rows]
    entries: Annotated[NDArray[Any], ENTRY]  # [rows * entries of each]; a new key overwrites


@compiled
def hashed(tokens: NDArray[np.int32], first: int, end: int, state: int) -> int:
    """62-bit hash of ``tokens[first:end]``, seeded with ``state``."""
    low, high = state, state + 1
    for i in range(first, end):
        low = mixed(low, int(tokens[i]))
        high = mixed(high, int(tokens[i]) + 0x5BD1)
    return ((high & 0x3FFFFFFF) << 32) | low


@compiled
def place_of(payoffs: Payoffs, row: int, key: int) -> int:
    """Index of the entry for ``key``, which may be another key's."""
    size = len(payoffs.entries) // ROWS
    return row * size + (key & (size - 1))


@compiled
def recall(payoffs: Payoffs, row: int, keys: NDArray[np.int64], out: NDArray[Any]) -> None:
    """Fill ``out`` [KINDS] of ``contracts.features.RECALLED`` with the entries of ``keys``."""
    for kind in range(KINDS):
        entry, recalled = payoffs.entries[place_of(payoffs, row, keys[kind])], out[kind]
        known = entry["tag"] == keys[kind] >> 30
        weight = float(entry["weight"]) if known else 0.0
        logs, shares = (entry["log_payoff"], entry["share"]) if known else (0.0, 0.0)
        recalled["log_payoff"] = (logs + PRIOR_LOG) / (weight + 1.0)
        recalled["share"] = (shares + PRIOR_SHARE) / (weight + 1.0)
        recalled["log_weight"] = np.log1p(weight)


@compiled
def learn(payoffs: Payoffs, row: int, keys: NDArray[np.int64], accepted: int, length: int) -> None:
    """Update a memory with a draft of ``length`` of which ``accepted`` tokens were accepted.
    Mutates."""
    if row == 0:
        return
    value, share = np.log1p(float(accepted)), accepted / length
    memory = payoffs.memories[row]
    memory["first"] += TENANT * ((1.0 if accepted > 0 else 0.0) - memory["first"])
    memory["log_payoff"] += TENANT * (value - memory["log_payoff"])
    for kind in range(KINDS):
        entry, tag = payoffs.entries[place_of(payoffs, row, keys[kind])], keys[kind] >> 30
        fade = FADE if entry["tag"] == tag else 0.0
        entry["tag"] = tag
        entry["weight"] = entry["weight"] * fade + 1.0
        entry["log_payoff"] = entry["log_payoff"] * fade + value
        entry["share"] = entry["share"] * fade + share


class Memories:
    """Memories by cache key, in a table of ``ROWS`` with a fair share for each tenant.

    A request that shares nothing (:data:`ALONE`) has a memory of its own.
    """

    def __init__(self, budget: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin empty. ``budget`` is in bytes, ``clock`` in seconds."""
        size = 1 << max((budget // ROWS // ENTRY.itemsize).bit_length() - 1, 0)
        self._row_bytes = size * ENTRY.itemsize
        self.payoffs = Payoffs(np.zeros(ROWS, MEMORY), np.zeros(ROWS * size, ENTRY))
        self.payoffs.memories[:] = PRIOR_FIRST, PRIOR_LOG
        self._free = list(range(ROWS - 1, 0, -1))
        self._shares = Shares(budget, clock)
        self._rows: dict[str, OrderedDict[str, int]] = {}  # by owner and key, least recent first
        self._users = np.zeros(ROWS, np.int64)
        self._alone = count()

    def begin(self, key: str) -> int:
        """Acquire the memory of ``key`` for a request; :meth:`end` releases it. Mutates.

        Returns:
            its row; 0, which learns nothing, if active requests have all.
        """
        owner = owner_of(key)
        if key == ALONE:
            key = f"{ALONE}/{next(self._alone)}"
        self._shares.visit(owner)
        rows = self._rows.setdefault(owner, OrderedDict())
        if key in rows:
            rows.move_to_end(key)
        elif self._free or self._shares.evict(self._evict):
            self._rows.setdefault(owner, rows)[key] = self._free.pop()
            self._shares.grow(owner, self._row_bytes)
        row = rows.get(key, 0)
        self._users[row] += 1
        return row

    def end(self, row: int) -> None:
        """Release ``row``: a request that used it has ended. Mutates."""
        self._users[row] -= 1

    def _evict(self, owner: str) -> bool:
        """Evict the owner's least recent memory without active requests."""
        rows = self._rows.get(owner, OrderedDict())
        idle = next((key for key, row in rows.items() if not self._users[row]), None)
        if idle is None:
            return False
        row, size = rows.pop(idle), len(self.payoffs.entries) // ROWS
        self.payoffs.entries[row * size : (row + 1) * size] = 0
        self.payoffs.memories[row] = PRIOR_FIRST, PRIOR_LOG
        self._free.append(row)
        self._shares.grow(owner, -self._row_bytes)
        if not rows:
            del self._rows[owner]
            self._shares.forget(owner)
        return True
