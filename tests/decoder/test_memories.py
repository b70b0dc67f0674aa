"""Memories of payoffs are bounded over all tenants, and each tenant has its fair share."""

from __future__ import annotations

import sys
from itertools import pairwise

import numpy as np
import pytest

from decoder.core.payoff.memory import ENTRY_BYTES, MEMORY_BYTES, TenantMemories, TenantMemory
from decoder.tenancy.shares import ALONE, FLOORS, cache_key

BUDGET = 1 << 20
SOME = (11, 22, 33)


def fill(memory: TenantMemory, seed: int, count: int) -> None:
    for keys in np.random.default_rng(seed).integers(1, 2**60, (count, 3)).tolist():
        memory.learn(tuple(keys), 3, 4)


def test_a_memory_is_the_keys_own_and_stays() -> None:
    memories = TenantMemories(BUDGET)
    memories.of("a").learn(SOME, 5, 8)
    fresh = TenantMemory().recall(SOME)
    assert memories.of("a").recall(SOME) != fresh
    for key in ("b", cache_key("a", "s"), "", ALONE):
        assert memories.of(key).recall(SOME) == fresh
    memories.of(ALONE).learn(SOME, 5, 8)
    assert memories.of(ALONE).recall(SOME) == fresh


@pytest.mark.parametrize(("names", "each"), [(10_000, 3), (5, 3000)])
@pytest.mark.parametrize("salts", [False, True])
def test_a_quiet_tenant_is_remembered_whatever_others_bring(
    names: int, each: int, salts: bool
) -> None:
    memories = TenantMemories(4 * BUDGET)
    memories.of("quiet").learn(SOME, 5, 8)
    assert MEMORY_BYTES + 3 * ENTRY_BYTES < 4 * BUDGET // 2 // FLOORS
    for i in range(names):
        key = cache_key("flood", str(i)) if salts else f"flood{i}"
        fill(memories.of(key), i, each)
        memories.of(key)
        assert memories.held_bytes <= 4 * BUDGET
    assert len(memories) < names or names == 5
    assert memories.of("quiet").recall(SOME) != TenantMemory().recall(SOME)


def test_what_gave_way_is_emptied_by_and_by_and_may_be_used_meanwhile() -> None:
    memories = TenantMemories(BUDGET)
    running = memories.of("a")
    fill(running, 1, 2000)
    memories.of("b")  # books what the first has grown by
    assert memories.held_bytes <= BUDGET
    sizes = []
    for _ in range(40):
        running.learn(SOME, 1, 2)
        memories.of("b")
        sizes.append(len(running))
    assert sizes[0] > sizes[5] > sizes[-1]
    assert max(a - b for a, b in pairwise(sizes)) <= 512
    assert memories.of("a") is not running


def test_an_entry_is_booked_with_no_fewer_bytes_than_it_takes() -> None:
    memory = TenantMemory()
    fill(memory, 2, 5000)
    entry = next(iter(memory._tables[0].values()))
    took = sys.getsizeof(entry) + sys.getsizeof(entry[4])
    took += sum(sys.getsizeof(value) for value in (*entry[:4], *entry[4]))
    table = sys.getsizeof(memory._tables[0]) / len(memory._tables[0])
    assert took + table + 32 <= ENTRY_BYTES  # 32: the key's own number
