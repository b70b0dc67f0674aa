"""Machines of several shapes, and a worker that decides, prices and is priced on them.

Drafts are drawn once from what the policy expects of them, so its estimates are right, and what is
lost is lost by prices alone. Times are computed: regret is a number here, whoever else is busy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np

from decoder.contracts.bundle import BUCKETS, Policy
from decoder.contracts.features import FEATURES, NUM_FEATURES
from decoder.core.choice import Chosen, choose
from decoder.core.costs import LiveCosts
from decoder.core.rate import LiveRate
from decoder.policy.estimate import survival
from decoder.policy.pricing import MAX_TOKENS, CostTable, plain_steps
from decoder.policy.rule import CACHE, MODEL
from tests.decoder.simulated import yields_of

K = 4
"""Tokens of a model draft at most."""
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


@dataclass
class Run:
    """What each step was expected to commit, and what it took."""

    tokens: list[float] = field(default_factory=list)
    time: list[float] = field(default_factory=list)

    def rate(self, first: int, last: int | None = None) -> float:
        """Tokens a microsecond."""
        return sum(self.tokens[first:last]) / sum(self.time[first:last])


def expected(offer: Offer, chosen: Chosen) -> np.ndarray:
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
        chosen = choose(
            judge, offer.features, offer.owners, batch, batch, table,
            at if rate is None else rate.value, K, odds=ODDS,
        )  # fmt: skip
        drafts = int(chosen.lengths.sum())
        drafted = chosen.model_len if (chosen.arms == MODEL).any() else 0
        us = machine.step(batch, drafts, drafted)
        run.tokens.append(batch + float(expected(offer, chosen).sum()))
        run.time.append(us)
        measured = us * float(np.exp(noise.normal(0.0, machine.noise)))
        costs.observe(batch + drafts, batch, drafted, measured)
        if rate is not None:
            spent = plain_steps(costs.table, batch, drafts, drafted)
            rate.observe(run.tokens[-1], batch, spent)  # type: ignore[arg-type] -- in the mean
    return run


def best(machine: Machine, batch: int, steps: int) -> Run:
    """The same under the true costs, at the rate that deciding by it achieves."""
    costs, rate, calm = LiveCosts(machine.true, live=False), 2.0, replace(machine, noise=0.0)
    for _ in range(6):
        run = serve(calm, batch, steps, costs, at=rate)
        rate = run.rate(0) * machine.verify(batch) / batch
    return run
