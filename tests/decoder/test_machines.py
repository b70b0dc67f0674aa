"""On machines like those it is meant for, what a worker learns of costs loses it next to nothing.

Ratios are those of ``docs/how-it-works.md``; ``python -m tests.decoder.test_machines`` prints them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from functools import cache
from typing import Final

import numpy as np
import pytest

from decoder.core.costs import LiveCosts
from decoder.core.profiling import levels
from decoder.core.rate import LiveRate
from decoder.policy.pricing import CostTable
from tests.decoder.machines import Machine, Run, best, serve

STEPS: Final = 300
LEARNING: Final = 100
LEAST: Final = 0.97
BATCHES: Final = (1, 8, 64, 256)
GRAPHS: Final = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))
"""What vLLM captures on a GPU unless told otherwise."""

Verify = Callable[[int], float]


def flat_to(bend: int, slope: float = 25.0, base: float = 5_000.0) -> Verify:
    """Flat to ``bend`` tokens, then ``slope`` us a token: weights to read, then sums to do."""
    return lambda n: base + slope * max(n - bend, 0)


def padded(n: int) -> float:
    """The same in graphs, and 1.5 ms more for launches behind the largest of them."""
    if n > GRAPHS[-1]:
        return flat_to(200)(n) + 1_500.0
    return flat_to(200)(GRAPHS[bisect_left(GRAPHS, n)])


def profiled(
    verify: Verify, most: int = 4096, *, graphs: tuple[int, ...] = (), off: float = 1.0,
    noise: float = 0.0, drafter: float = 1.0,
) -> CostTable:  # fmt: skip
    """What a start would have measured of it, too low or high by factors."""
    rng = np.random.default_rng(3)
    sizes = tuple(sorted(n for level in levels(most, graphs) for n in level))
    times = tuple(off * verify(n) * float(np.exp(rng.normal(0.0, noise))) for n in sizes)
    return CostTable(
        "start", sizes, times, draft_token_us=300.0 * off * drafter,
        draft_row_us=2.0 * off * drafter, graphs=graphs,
    )  # fmt: skip


H100: Final = flat_to(200)
MACHINES: Final[dict[str, tuple[Verify, CostTable]]] = {
    "flat to 200, then steep": (H100, profiled(H100)),
    "the same, 1.7 times slower than at start": (H100, profiled(H100, off=0.6)),
    "the same, twice faster than at start": (H100, profiled(H100, off=2.0)),
    "2 ms a step that no profile sees": (lambda n: 2_000.0 + H100(n), profiled(H100)),
    "a drafter three times dearer than measured": (H100, profiled(H100, drafter=0.33)),
    "a profile to 64 tokens": (H100, profiled(H100, 64)),
    "graphs to 512 tokens": (padded, profiled(padded, graphs=GRAPHS)),
    "flat to 30": (flat_to(30), profiled(flat_to(30))),
    "steep from the first token (CPU)": (
        lambda n: 48e3 + 3.6e3 * n,
        profiled(lambda n: 48e3 + 3.6e3 * n, 64),
    ),
}


@cache
def reference(name: str, batch: int) -> Run:
    verify, profile = MACHINES[name]
    return best(Machine(verify, profile), batch, STEPS)


def ratios(name: str, batch: int, noise: float) -> tuple[float, float]:
    """Rate under learned costs over that under the true ones: first steps, and those after."""
    verify, profile = MACHINES[name]
    machine = Machine(verify, profile, noise=noise)
    run = serve(machine, batch, STEPS, LiveCosts(profile), LiveRate(2.0))
    known = reference(name, batch)
    first = run.rate(0, LEARNING) / known.rate(0, LEARNING)
    return first, run.rate(LEARNING) / known.rate(LEARNING)


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("name", MACHINES)
def test_within_a_hundred_steps_decisions_are_as_good_as_under_true_costs(
    name: str, noise: float
) -> None:
    for batch in BATCHES:
        _, later = ratios(name, batch, noise)
        assert later >= LEAST, (name, batch, noise, later)


if __name__ == "__main__":
    print("| machine |", " | ".join(f"{b}" for b in BATCHES), "|")
    for name in MACHINES:
        for noise in (0.0, 0.1):
            found = [ratios(name, b, noise) for b in BATCHES]
            cells = " | ".join(f"{a:.2f} / {b:.3f}" for a, b in found)
            print(f"| {name}, noise {noise} | {cells} |")
