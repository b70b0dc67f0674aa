"""Chi-square tests, as the probability that counts this far off arise by chance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from typing import Any

import torch

LEAST = 5.0
"""Expected count of a cell below which the chi-square approximation is poor: such are pooled."""


def _tail(statistic: float, freedom: int) -> float:
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def goodness_of_fit(counts: Counter[Any], expected: Mapping[Any, float]) -> float:
    """p-value of ``counts`` under the probabilities ``expected``; 0 for an impossible outcome."""
    total = counts.total()
    possible = {cell for cell, p in expected.items() if p > 0}
    if set(counts) - possible:
        return 0.0
    seen, wanted, rest_seen, rest = [], [], 0.0, 0.0
    for cell in possible:
        if expected[cell] * total >= LEAST:
            seen.append(float(counts[cell]))
            wanted.append(expected[cell] * total)
        else:
            rest_seen += counts[cell]
            rest += expected[cell] * total
    if rest > 0:
        seen.append(rest_seen)
        wanted.append(rest)
    statistic = sum((s - w) ** 2 / w for s, w in zip(seen, wanted, strict=True))
    return _tail(statistic, len(seen) - 1) if len(seen) > 1 else 1.0


def homogeneity(one: Counter[Any], other: Counter[Any]) -> float:
    """p-value of both counts coming from one distribution."""
    n, m = one.total(), other.total()
    cells: dict[Hashable, tuple[int, int]] = {}
    rest = (0, 0)
    for cell in set(one) | set(other):
        pair = one[cell], other[cell]
        if sum(pair) * min(n, m) / (n + m) >= LEAST:
            cells[cell] = pair
        else:
            rest = rest[0] + pair[0], rest[1] + pair[1]
    rows = [*cells.values(), rest] if sum(rest) else list(cells.values())
    statistic = 0.0
    for pair in rows:
        for count, size in zip(pair, (n, m), strict=True):
            wanted = sum(pair) * size / (n + m)
            statistic += (count - wanted) ** 2 / wanted
    return _tail(statistic, len(rows) - 1) if len(rows) > 1 else 1.0
