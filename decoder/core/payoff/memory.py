"""Per-tenant running means of accepted length by context hash.

They are updated as labels resolve, so they adapt within one request, long before retraining, and
contain only what is known when the next draft is judged. Each cache key has its own memory. All
memories together are bounded in bytes. They store hashes, not tokens.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Annotated, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from decoder.compiled import Int32Array, Int64Array, compiled, entry_point
from decoder.contracts.features import MEMORY_KEYS
from decoder.drafting.blocks import Blocks
from decoder.drafting.pages import mixed
from decoder.tenancy.shares import ALONE, Shares, owner_of

SLOTS: Final = 1 << 14
"""Entries of a memory per kind of key; a new key overwrites the entry in its slot."""
KINDS: Final = len(MEMORY_KEYS)
PLACE_BYTES: Final = 4 + 8 + 3 * 8
MEMORY_BYTES: Final = 256
"""Bytes of a memory without entries."""
LEAST, MOST = 6, (4 * KINDS * SLOTS // 3 - 1).bit_length()
"""log2 of the smallest and the largest table, in entries; the maximum load factor is 3/4."""
FADE: Final = 0.8
"""Decay of an entry at each new payoff: a window of about five."""
TENANT: Final = 0.002
PRIOR_LOG: Final = 0.7
PRIOR_SHARE: Final = 0.3
PRIOR_FIRST: Final = 0.5
"""Priors, from an average draft: log1p(payoff), payoff / length, share of accepted first tokens."""
MEMORY: Final = np.dtype(
    [
        ("begin", "i8"),  # start of its hash table
        ("size", "i8"),  # size of its hash table, a power of two
        ("count", "i8"),  # entries used
        ("first", "f8"),  # decayed share of drafts whose first token was accepted
        ("log_payoff", "f8"),  # decayed mean of log1p(payoff)
    ],
    align=True,
)
SUMS: Final = np.dtype([("weight", "f8"), ("log_payoff", "f8"), ("share", "f8")], align=True)
"""Decayed sums of an entry."""


class Payoffs(NamedTuple):
    """Hash tables (open addressing) of all memories; memory 0 is unused."""

    memories: Annotated[NDArray[Any], MEMORY]
    idents: Int32Array  # [entries], kind and slot of the key, plus 1; 0 if empty
    keys: Int64Array  # [entries]
    sums: Annotated[NDArray[Any], SUMS]  # [entries]


@compiled
def hashed(tokens: NDArray[np.int32], first: int, end: int, state: int) -> int:
    """62-bit hash of ``tokens[first:end]``, seeded with ``state``."""
    low, high = state, state + 1
    for i in range(first, end):
        low = mixed(low, int(tokens[i]))
        high = mixed(high, int(tokens[i]) + 0x5BD1)
    return ((high & 0x3FFFFFFF) << 32) | low


@compiled
def place_of(payoffs: Payoffs, row: int, kind: int, key: int) -> int:
    """Index where an entry is, or would be inserted; -1 without a table."""
    begin, size = payoffs.memories[row]["begin"], payoffs.memories[row]["size"]
    if size == 0:
        return -1
    ident = kind * SLOTS + (key & (SLOTS - 1)) + 1
    at = ident & (size - 1)
    while payoffs.idents[begin + at] != 0 and payoffs.idents[begin + at] != ident:
        at = (at + 1) & (size - 1)
    return int(begin + at)


@compiled
def lacks(payoffs: Payoffs, row: int, labels: int) -> bool:
    """Whether a memory must grow before it learns ``labels`` labels."""
    memory = payoffs.memories[row]
    needed = memory["count"] + KINDS * labels
    return bool(memory["size"] < 1 << MOST and 4 * needed > 3 * memory["size"])


@compiled
def recall(payoffs: Payoffs, row: int, keys: NDArray[np.int64], out: NDArray[Any]) -> None:
    """Fill ``out`` [KINDS] of ``contracts.features.RECALLED`` with the entries of ``keys``."""
    for kind in range(KINDS):
        at = place_of(payoffs, row, kind, keys[kind])
        weight, logs, shares = 0.0, 0.0, 0.0
        if at >= 0 and payoffs.idents[at] and payoffs.keys[at] == keys[kind]:
            entry = payoffs.sums[at]
            weight, logs, shares = entry["weight"], entry["log_payoff"], entry["share"]
        recalled = out[kind]
        recalled["log_payoff"] = (logs + PRIOR_LOG) / (weight + 1.0)
        recalled["share"] = (shares + PRIOR_SHARE) / (weight + 1.0)
        recalled["log_weight"] = np.log1p(weight)


@compiled
def learn(payoffs: Payoffs, row: int, keys: NDArray[np.int64], accepted: int, length: int) -> None:
    """Update a memory with a draft of ``length`` of which ``accepted`` tokens were accepted.
    Mutates. An entry is skipped if the table is full.
    """
    value, share = np.log1p(float(accepted)), accepted / length
    memory = payoffs.memories[row]
    memory["first"] += TENANT * ((1.0 if accepted > 0 else 0.0) - memory["first"])
    memory["log_payoff"] += TENANT * (value - memory["log_payoff"])
    for kind in range(KINDS):
        at = place_of(payoffs, row, kind, keys[kind])
        if at < 0:
            continue
        if not payoffs.idents[at]:
            if 4 * (memory["count"] + 1) > 3 * memory["size"]:
                continue
            memory["count"] += 1
            payoffs.idents[at] = kind * SLOTS + (keys[kind] & (SLOTS - 1)) + 1
            payoffs.keys[at] = -1
        sums = payoffs.sums[at]
        if payoffs.keys[at] != keys[kind]:
            payoffs.keys[at] = keys[kind]
            sums["weight"], sums["log_payoff"], sums["share"] = 0.0, 0.0, 0.0
        sums["weight"] = sums["weight"] * FADE + 1.0
        sums["log_payoff"] = sums["log_payoff"] * FADE + value
        sums["share"] = sums["share"] * FADE + share


@entry_point
def move(payoffs: Payoffs, row: int, begin: int, size: int) -> None:
    """Move a memory to a free block of ``size`` entries at ``begin``. Mutates."""
    memory = payoffs.memories[row]
    old, old_size = memory["begin"], memory["size"]
    memory["begin"], memory["size"] = begin, size
    for at in range(old, old + old_size):
        ident = payoffs.idents[at]
        if ident:
            kind = (ident - 1) // SLOTS
            new = place_of(payoffs, row, kind, payoffs.keys[at])
            payoffs.idents[new], payoffs.keys[new] = ident, payoffs.keys[at]
            payoffs.sums[new] = payoffs.sums[at]
            payoffs.idents[at] = 0


class Memories:
    """Memories by cache key, bounded in bytes together, with a fair share for each tenant.

    A request that shares nothing (:data:`ALONE`) has a memory of its own.
    """

    def __init__(self, budget: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin empty. ``budget`` is in bytes, ``clock`` in seconds."""
        size = max((budget // PLACE_BYTES).bit_length(), MOST)
        self.payoffs = Payoffs(
            np.zeros(64, MEMORY), np.zeros(1 << size, np.int32), np.zeros(1 << size, np.int64),
            np.zeros(1 << size, SUMS),
        )  # fmt: skip
        self._blocks, self._rows = Blocks(size), list(range(63, 0, -1))
        self._shares = Shares(budget, clock)
        self._rows_by_owner: dict[str, OrderedDict[str, int]] = {}  # rows, by owner and key
        self._owners: dict[int, str] = {}  # of those rows
        self._users: dict[int, int] = {}

    @property
    def held_bytes(self) -> int:
        """Upper bound of the bytes of all memories."""
        return self._shares.held

    def __len__(self) -> int:
        return len(self._owners)

    def begin(self, key: str) -> int:
        """Acquire the memory of ``key`` for a request; :meth:`end` releases it. Mutates.

        When a memory is evicted, its active requests continue with an empty one.
        """
        if key == ALONE:
            row = self._new_row()
            self._users[row] = 1
            return row
        owner = owner_of(key)
        self._shares.visit(owner)
        rows = self._rows_by_owner.setdefault(owner, OrderedDict())
        known = rows.get(key)
        row = rows[key] = self._new_row() if known is None else known
        rows.move_to_end(key)
        self._users[row] = self._users.get(row, 0) + 1
        if known is None:
            self._owners[row] = owner
            self._account(row, MEMORY_BYTES)
        return row

    def end(self, row: int) -> None:
        """Release ``row``: a request that used it has ended. Mutates."""
        self._users[row] -= 1
        if not self._users[row]:
            del self._users[row]
            self._free_unused(row)

    def grow(self, row: int, labels: int) -> None:
        """Grow a memory for ``labels`` more labels if a block is free. Mutates."""
        old_begin, old_size, count, *_ = self.payoffs.memories[row].item()
        needed = count + KINDS * labels
        size = min(max((4 * needed // 3).bit_length(), LEAST), MOST)
        begin = self._blocks.take(size)
        if begin < 0:
            return
        move(self.payoffs, row, begin, 1 << size)
        if old_size:
            self._blocks.give(old_begin, old_size.bit_length() - 1)
        self._account(row, ((1 << size) - old_size) * PLACE_BYTES)

    def _account(self, row: int, count: int) -> None:
        owner = self._owners.get(row)
        if owner is not None:
            self._shares.grow(owner, count)
            while self._shares.held > self._shares.budget and self._shares.evict(self._take):
                pass

    def _take(self, owner: str) -> bool:
        """Evict the owner's least recently used memory."""
        rows = self._rows_by_owner.get(owner)
        if not rows:
            return False
        _, row = rows.popitem(last=False)
        size = int(self.payoffs.memories["size"][row])
        self._shares.grow(owner, -(MEMORY_BYTES + size * PLACE_BYTES))
        del self._owners[row]
        self._clear(row)
        self._free_unused(row)
        if not rows:
            del self._rows_by_owner[owner]
            self._shares.forget(owner)
        return True

    def _new_row(self) -> int:
        if not self._rows:
            old = self.payoffs.memories
            self._rows = list(range(2 * len(old) - 1, len(old) - 1, -1))
            grown = np.concatenate([old, np.zeros_like(old)])
            self.payoffs = self.payoffs._replace(memories=grown)
        row = self._rows.pop()
        self.payoffs.memories[row] = 0, 0, 0, PRIOR_FIRST, PRIOR_LOG
        return row

    def _clear(self, row: int) -> None:
        begin, size, *_ = self.payoffs.memories[row].item()
        if size:
            self.payoffs.idents[begin : begin + size] = 0
            self._blocks.give(begin, size.bit_length() - 1)
        self.payoffs.memories[row] = 0, 0, 0, PRIOR_FIRST, PRIOR_LOG

    def _free_unused(self, row: int) -> None:
        """Free a row without key and users."""
        if row not in self._owners and row not in self._users:
            self._clear(row)
            self._rows.append(row)
