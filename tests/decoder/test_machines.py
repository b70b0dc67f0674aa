"""On machines like those it is meant for, what a worker learns of costs loses it next to nothing.

Drafts are drawn once from what the policy expects of them, so its estimates are right, and what is
lost is lost by prices alone. Times are computed: regret is a number here, whoever else is busy.
Ratios are those of ``docs/how-it-works.md``; ``python -m tests.decoder.test_machines`` prints them.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Final

import numpy as np
import pytest

from decoder.contracts.bundle import BUCKETS, Policy
from decoder.contracts.features import FEATURES, NUM_FEATURES
from decoder.core.costs import LiveCosts
from decoder.core.profiling import levels
from decoder.core.rate import LiveRate
from decoder.policy.estimate import survival
from decoder.policy.pricing import MAX_TOKENS, CostTable, step_time
from decoder.policy.rule import CACHE, MODEL
from tests.decoder.simulated import K, Run, Wanted, trusting_policy, wanted_of, yields_of

CHANCE = 0.6
ODDS = np.full(K, np.log(CHANCE / (1.0 - CHANCE)))
"""That one more of its tokens is accepted."""
SHARE = 0.6
"""Of requests that have a cache draft."""
SCORE, LENGTH = FEATURES.index("score"), FEATURES.index("draft_len")


@dataclass(frozen=True)
class Machine:
    """``verify`` is the time of a step by its tokens, in us; ``profile`` what was measured of it.

    The drafter takes ``draft_us`` a token and ``draft_row_us`` more for each request of the step.
    """

    verify: Callable[[int], float]
    profile: CostTable
    draft_us: float = 300.0
    draft_row_us: float = 2.0
    noise: float = 0.0

    def step(self, rows: int, drafts: int, drafted: int) -> float:
        """Time of a step."""
        drafting = drafted * (self.draft_us + self.draft_row_us * rows)
        return self.verify(rows + drafts) + drafting

    @property
    def true(self) -> CostTable:
        """A table that says what is."""
        tokens = tuple(range(1, MAX_TOKENS + 1))
        return CostTable(
            "true", tokens, tuple(self.verify(n) for n in tokens),
            draft_token_us=self.draft_us, draft_row_us=self.draft_row_us,
        )  # fmt: skip


def policy() -> Policy:
    """Expects of a draft what its score says: the log-odds of breaking off at each position."""
    weight = np.zeros((NUM_FEATURES, BUCKETS + 1), np.float32)
    weight[SCORE, :BUCKETS] = 1.0
    bias = np.zeros(BUCKETS + 1, np.float32)
    bias[BUCKETS] = np.log(CHANCE / (1 - CHANCE))
    return Policy("s", 1, 2.0, "survival", layers=((weight, bias),), model_payoff=1.3)


@dataclass(frozen=True)
class Offer:
    """The cache drafts of a step: features [m, features], owners [m], survivals [n, width]."""

    features: np.ndarray
    owners: np.ndarray
    curves: np.ndarray


@cache
def offers(batch: int, steps: int) -> list[Offer]:
    """Drafts of 1 to 64 tokens, from hopeless to nearly sure, of 60 % of the requests."""
    rng, made = np.random.default_rng(0), []
    for _ in range(steps):
        owners = np.flatnonzero(rng.random(batch) < SHARE)
        features = np.zeros((len(owners), NUM_FEATURES), np.float32)
        hazards = np.exp(rng.uniform(np.log(0.01), np.log(0.7), len(owners)))
        features[:, SCORE] = np.log(hazards / (1 - hazards))
        features[:, LENGTH] = rng.integers(1, 65, len(owners))
        logits = np.repeat(features[:, SCORE, None], BUCKETS, axis=1)
        curves = np.zeros((batch, 64), np.float32)
        own = survival(logits, features[:, LENGTH].astype(np.int64))
        curves[owners, : own.shape[1]] = own
        made.append(Offer(features, owners, curves))
    return made


def expected(offer: Offer, chosen: Wanted) -> np.ndarray:
    """Draft tokens [n] that the target accepts of what was chosen, in the mean."""
    width = offer.curves.shape[1]
    taken = np.where(chosen.arms == CACHE, chosen.lengths, 0)
    found = (offer.curves * (np.arange(width) < taken[:, None])).sum(axis=1)
    yields = [0.0, *yields_of(CHANCE, K)]
    return np.where(chosen.arms == MODEL, yields[chosen.model_len], found)


def serve(
    machine: Machine,
    batch: int,
    steps: int,
    costs: LiveCosts,
    rate: LiveRate | None = None,
    at: float = 2.0,
) -> Run:
    """``steps`` steps of ``batch`` requests by the worker's own choice, costs, and rate, or the one
    that it stays at."""
    noise, run, judge = np.random.default_rng(1), Run(), policy()
    for offer in offers(batch, steps):
        table = costs.table
        chosen = wanted_of(
            judge, offer.features, offer.owners, batch, table,
            at if rate is None else rate.value, K, odds=ODDS,
        )  # fmt: skip
        drafts = int(chosen.lengths.sum())
        drafted = chosen.model_len if (chosen.arms == MODEL).any() else 0
        us = machine.step(batch, drafts, drafted)
        run.tokens.append(batch + float(expected(offer, chosen).sum()))
        run.time.append(us)
        measured = us * float(np.exp(noise.normal(0.0, machine.noise)))
        costs.observe(batch + drafts, batch, drafted, measured)
        table = costs.table
        if rate is not None:
            spent = step_time(table, batch, drafts, drafted) / table.time(batch)
            rate.observe(run.tokens[-1], batch, spent)  # type: ignore[arg-type] -- in the mean
    return run


def best(machine: Machine, batch: int, steps: int) -> Run:
    """The same under the true costs, at the rate that deciding by it achieves."""
    costs, rate, calm = LiveCosts(machine.true, live=False), 2.0, replace(machine, noise=0.0)
    for _ in range(3):  # Dinkelbach: the second is near, the third is there
        run = serve(calm, batch, steps, costs, at=rate)
        rate = run.rate(0) * machine.verify(batch) / batch
    return run


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


@pytest.mark.parametrize("name", MACHINES)
def test_within_a_hundred_steps_decisions_are_as_good_as_under_true_costs(name: str) -> None:
    for batch in BATCHES:
        _, later = ratios(name, batch, noise=0.1)
        assert later >= LEAST, (name, batch, later)


GPU = CostTable("gpu", (1, 256, MAX_TOKENS), (5_000.0, 5_500.0, 5_500.0 + 25.0 * 3_840))
"""Memory bounds a step of up to 256 tokens, arithmetic a larger one."""


def lengths_of(rows: int, hazard: float, rate: float, beside: int = 0) -> int:
    """Tokens of each draft that are verified, where all have drafts of 16 that are alike."""
    features = np.zeros((rows, NUM_FEATURES), np.float32)
    features[:, FEATURES.index("draft_len")] = 16
    asked = trusting_policy(hazard), features, np.arange(rows), rows, GPU, rate, 0
    chosen = wanted_of(*asked, prefill=beside)
    return round(float(chosen.lengths.mean()))


@pytest.mark.parametrize("prompt", [512, 2_048])
@pytest.mark.parametrize("hazard", [0.15, 0.3])
@pytest.mark.parametrize("rows", [16, 64])
def test_beside_prompts_drafts_are_as_long_as_brings_the_most_requests_a_second(
    rows: int, hazard: float, prompt: int
) -> None:
    """So many requests at a time, each of ``prompt`` tokens, read in one step, and 400 to write."""

    def committed(length: int) -> float:
        return rows * (1.0 + sum((1.0 - hazard) ** j for j in range(1, length + 1)))

    def time(beside: int, alone: int) -> float:
        """Of a request, by the lengths of drafts beside prompts and in all other steps."""
        steps = (400 - committed(beside)) / committed(alone)
        return GPU.time(rows + prompt + beside * rows) + steps * GPU.time(rows + alone * rows)

    rate = LiveRate()
    for step in range(3_000):
        reads = prompt if step % 50 == 0 else 0
        length = lengths_of(rows, hazard, rate.value, reads)
        taken = step_time(GPU, rows, rows * length, prefill=reads) / GPU.time(rows)
        rate.observe(round(committed(length)), rows, taken)
    mine = lengths_of(rows, hazard, rate.value, prompt), lengths_of(rows, hazard, rate.value)
    best = min(itertools.product(range(17), repeat=2), key=lambda lengths: time(*lengths))
    assert time(*mine) < 1.002 * time(*best), (mine, best)


if __name__ == "__main__":
    print("| machine |", " | ".join(f"{b}" for b in BATCHES), "|")
    for name in MACHINES:
        for noise in (0.0, 0.1):
            found = [ratios(name, b, noise) for b in BATCHES]
            cells = " | ".join(f"{a:.2f} / {b:.3f}" for a, b in found)
            print(f"| {name}, noise {noise} | {cells} |")
