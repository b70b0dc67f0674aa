"""Memories of payoffs are bounded over all tenants, and each tenant has its fair share."""

from __future__ import annotations

import numpy as np
import pytest

from decoder.contracts.features import RECALLED
from decoder.core.payoff.memory import (
    KINDS,
    LEAST,
    MEMORY_BYTES,
    PLACE_BYTES,
    SLOTS,
    Memories,
    lacks,
    learn,
    recall,
)  # fmt: skip
from decoder.tenancy.shares import ALONE, FLOORS, cache_key

BUDGET = 1 << 20
SOME = (11, 22, 33)


def take_in(memories: Memories, row: int, keys: tuple[int, ...], accepted: int, of: int) -> None:
    if lacks(memories.payoffs, row, 1):
        memories.grow(row, 1)
    learn(memories.payoffs, row, np.array(keys), accepted, of)


def told(memories: Memories, row: int, keys: tuple[int, ...] = SOME) -> list[float]:
    """Mean log payoff, mean share and log weight by key."""
    out = np.zeros(KINDS, RECALLED)
    recall(memories.payoffs, row, np.array(keys), out)
    return out.view(np.float32).tolist()


def asked(memories: Memories, key: str) -> list[float]:
    """What the memory of ``key`` tells to a request that begins."""
    row = memories.begin(key)
    found = told(memories, row)
    memories.end(row)
    return found


def fill(memories: Memories, key: str, seed: int, count: int) -> None:
    row = memories.begin(key)
    for keys in np.random.default_rng(seed).integers(1, 2**60, (count, 3)).tolist():
        take_in(memories, row, tuple(keys), 3, 4)
    memories.end(row)


UNKNOWN = [0.7, 0.3, 0.0] * KINDS


def test_a_memory_is_the_keys_own_and_stays() -> None:
    memories = Memories(BUDGET)
    row = memories.begin("a")
    take_in(memories, row, SOME, 5, 8)
    memories.end(row)
    assert asked(memories, "a") != pytest.approx(UNKNOWN)
    for key in ("b", cache_key("a", "s"), "", ALONE):
        assert asked(memories, key) == pytest.approx(UNKNOWN)
    row = memories.begin(ALONE)
    take_in(memories, row, SOME, 5, 8)
    assert asked(memories, ALONE) == pytest.approx(UNKNOWN)
    assert told(memories, row) != pytest.approx(UNKNOWN)


@pytest.mark.parametrize(("names", "each"), [(10_000, 3), (5, 9000)])
@pytest.mark.parametrize("salts", [False, True])
def test_a_quiet_tenant_is_remembered_whatever_others_bring(
    names: int, each: int, salts: bool
) -> None:
    memories = Memories(4 * BUDGET)
    row = memories.begin("quiet")
    take_in(memories, row, SOME, 5, 8)
    memories.end(row)
    assert MEMORY_BYTES + (PLACE_BYTES << LEAST) < 4 * BUDGET // 2 // FLOORS
    for i in range(names):
        fill(memories, cache_key("flood", str(i)) if salts else f"flood{i}", i, each)
        assert memories.held_bytes <= 4 * BUDGET
    assert len(memories) < names or names == 5
    assert asked(memories, "quiet") != pytest.approx(UNKNOWN)
    while memories._shares.evict(memories._take):
        pass
    assert memories.held_bytes == len(memories) == 0, "what is booked is freed"


def test_who_learns_while_its_memory_gives_way_goes_on_with_an_empty_one() -> None:
    memories = Memories(BUDGET)
    running = memories.begin("a")
    take_in(memories, running, SOME, 5, 8)
    for i in range(5000):
        fill(memories, f"a/{i}", i, 3)
    assert told(memories, running) == pytest.approx(UNKNOWN)
    take_in(memories, running, SOME, 5, 8)
    assert told(memories, running) != pytest.approx(UNKNOWN)
    assert asked(memories, "a") == pytest.approx(UNKNOWN)
    assert memories.held_bytes <= BUDGET
    rows = len(memories._rows)
    memories.end(running)
    assert len(memories._rows) == rows + 1


def test_a_memory_is_what_a_dictionary_with_as_many_slots_is() -> None:
    memories, rng = Memories(64 * BUDGET), np.random.default_rng(3)
    row, known = memories.begin("a"), [dict[int, list[float]]() for _ in range(KINDS)]
    for keys in rng.integers(1, 2**20, (40_000, KINDS)).tolist():
        accepted, length = int(rng.integers(0, 5)), 5
        take_in(memories, row, tuple(keys), accepted, length)
        for key, entries in zip(keys, known, strict=True):
            entry = entries.get(key % SLOTS)
            if entry is None or entry[0] != key:
                entry = [key, 0.0, 0.0, 0.0]
            entries[key % SLOTS] = [
                key, entry[1] * 0.8 + 1.0, entry[2] * 0.8 + np.log1p(accepted),
                entry[3] * 0.8 + accepted / length,
            ]  # fmt: skip
    assert memories.payoffs.memories["count"][row] == sum(map(len, known))
    for _ in range(300):
        keys = [int(rng.choice([e[0] for e in list(entries.values())[:50]])) for entries in known]
        expected: list[float] = []
        for key, entries in zip(keys, known, strict=True):
            _, weight, logs, shares = entries[key % SLOTS]
            expected += [(logs + 0.7) / (weight + 1), (shares + 0.3) / (weight + 1)]
            expected.append(float(np.log1p(weight)))
        assert told(memories, row, tuple(keys)) == pytest.approx(expected, rel=1e-5)
