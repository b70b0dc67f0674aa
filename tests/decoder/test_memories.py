"""Memories of payoffs are bounded over all tenants, and each tenant has its fair share."""

from __future__ import annotations

import numpy as np
import pytest

from decoder.contracts.features import RECALLED
from decoder.core.payoff.memory import ENTRY, KINDS, ROWS, Memories, learn, recall
from decoder.tenancy.shares import ALONE, cache_key

BUDGET = 1 << 20
SOME = (11, 22, 33)


def take_in(memories: Memories, row: int, keys: tuple[int, ...], accepted: int, of: int) -> None:
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
    for i in range(names):
        fill(memories, cache_key("flood", str(i)) if salts else f"flood{i}", i, each)
        assert memories._shares.held <= 4 * BUDGET
    assert asked(memories, "quiet") != pytest.approx(UNKNOWN)
    while memories._shares.evict(memories._evict):
        pass
    assert memories._shares.held == 0 and not memories._rows, "what is booked is freed"
    assert not memories.payoffs.entries["weight"].any() and len(memories._free) == ROWS - 1


def test_a_memory_in_use_stays_and_one_too_many_learns_nothing() -> None:
    memories = Memories(BUDGET)
    running = [memories.begin(cache_key("a", str(i))) for i in range(ROWS - 1)]
    assert sorted(running) == list(range(1, ROWS))
    take_in(memories, running[0], SOME, 5, 8)
    for key in ("b", ALONE):
        assert memories.begin(key) == 0
    take_in(memories, 0, SOME, 5, 8)
    assert told(memories, 0) == pytest.approx(UNKNOWN) != told(memories, running[0])
    memories.end(running[0])
    assert memories.begin("b") == running[0]
    assert told(memories, running[0]) == pytest.approx(UNKNOWN)
    assert memories._shares.held <= BUDGET


def test_a_memory_is_what_a_dictionary_with_as_many_slots_is() -> None:
    memories, rng = Memories(64 * BUDGET), np.random.default_rng(3)
    size = 64 * BUDGET // ROWS // ENTRY.itemsize
    row, known = memories.begin("a"), dict[int, list[float]]()
    for drawn in rng.integers(1, 2**20, (20_000, KINDS)).tolist():
        accepted, length = int(rng.integers(0, 5)), 5
        keys = [key * 0x9E3779B97F4A7C15 % 2**62 for key in drawn]
        take_in(memories, row, tuple(keys), accepted, length)
        for key in keys:
            entry = known.get(key % size)
            if entry is None or entry[0] != key:
                entry = [key, 0.0, 0.0, 0.0]
            known[key % size] = [
                key, entry[1] * 0.8 + 1.0, entry[2] * 0.8 + np.log1p(accepted),
                entry[3] * 0.8 + accepted / length,
            ]  # fmt: skip
    for _ in range(300):
        entries = [known[int(rng.choice(list(known)[:50]))] for _ in range(KINDS)]
        expected: list[float] = []
        for _, weight, logs, shares in entries:
            expected += [(logs + 0.7) / (weight + 1), (shares + 0.3) / (weight + 1)]
            expected.append(float(np.log1p(weight)))
        held = tuple(int(entry[0]) for entry in entries)
        assert told(memories, row, held) == pytest.approx(expected, rel=1e-5)
