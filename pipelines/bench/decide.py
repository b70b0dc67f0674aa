"""``hvd bench decide``: what one decision costs, suffix lookup aside.

Featurize and choose (the model draft's length included), the functions a worker runs, on drafts of
mixed lengths in one thread. The budget comes from hardware: 49 us is 1 % of the 4.9 ms in
which an H100 reads the weights of an 8B model once (16.4 GB at 3.35 TB/s).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from decoder.choice import choose
from decoder.contracts.bundle import OUTPUTS, Kind, Policy
from decoder.contracts.features import NUM_FEATURES, TOKEN_CLASSES
from decoder.drafting.drafts import CacheDraft
from decoder.payoff.featurize import DraftState, featurize
from decoder.payoff.memory import History, TenantMemory, memory_keys
from decoder.policy.pricing import MAX_TOKENS, CostTable
from decoder.rate import START
from learner.train import HIDDEN

BATCH: Final = 64
VOCABULARY: Final = 49_152
MODEL_LEN: Final = 4


@dataclass(frozen=True)
class Timing:
    """Microseconds of one decision step; the batch figure is per request."""

    kind: Kind
    p50_us_batch1: float
    p99_us_batch1: float
    p50_us_per_request_batch64: float
    featurize_us_batch1: float
    choose_us_batch1: float
    features: int = NUM_FEATURES

    def as_dict(self) -> dict[str, float | str]:
        """For ``--json``."""
        return asdict(self)


def random_policy(kind: Kind, seed: int = 0) -> Policy:
    """A policy with a network of the shape that is trained, and random weights."""
    rng = np.random.default_rng(seed)
    widths = [NUM_FEATURES, *HIDDEN.get(kind, ()), OUTPUTS[kind]]
    layers = tuple(
        (rng.normal(0, a**-0.5, (a, b)).astype(np.float32), np.zeros(b, np.float32))
        for a, b in itertools.pairwise(widths)
    )
    return Policy("bench", 1, 2.0, kind, layers=layers if OUTPUTS[kind] else ())


def states(n: int) -> list[DraftState]:
    """``n`` drafts of 1 to 64 tokens, half of them with a rival, in requests with a past."""
    rng = np.random.default_rng(0)
    made, tenant = [], TenantMemory()
    for i in range(n):
        history = History()
        for payoff in rng.integers(0, 20, 8).tolist():
            history.learn(payoff, 20, 50)
        for cache in (rng.random(16) < 0.3).tolist():
            history.took(cache)
        tokens = rng.integers(0, VOCABULARY, int(rng.integers(1, 65))).tolist()
        probs = np.cumprod(rng.uniform(0.8, 1.0, len(tokens))).tolist()
        rival = CacheDraft(tokens[:5], probs[:5], 3.0, 4, False) if i % 2 else None
        draft = CacheDraft(tokens, probs, sum(probs), 9, True, rival, len(tokens[:5]))
        keys = memory_keys(rng.integers(0, VOCABULARY, 2).tolist(), tokens)
        tenant.learn(keys, 3, len(tokens))
        made.append(DraftState(draft, 700, 120, 512, 4, history, tenant, keys))
    return made


def _timed(
    policy: Policy, batch: list[DraftState], table: NDArray[np.float32], costs: CostTable
) -> tuple[float, float]:
    clock, n = time.perf_counter, len(batch)
    began = clock()
    features = featurize(batch, table)
    featurized = clock()
    choose(policy, features, np.arange(n), n, n, costs, START, MODEL_LEN)
    return featurized - began, clock() - featurized


def measure(kind: Kind, rounds: int = 3_000) -> Timing:
    """Time decisions of ``kind``, batches of one and of 64 interleaved."""
    rng = np.random.default_rng(1)
    table = (rng.random((VOCABULARY, len(TOKEN_CLASSES))) < 0.2).astype(np.float32)
    policy, pool = random_policy(kind), states(BATCH)
    costs = CostTable("bench", (1, MAX_TOKENS), (1.0, 25.0), draft_us=0.2)
    singles, batches = [], []
    for i in range(rounds):
        singles.append(_timed(policy, [pool[i % BATCH]], table, costs))
        if i % 10 == 0:
            batches.append(sum(_timed(policy, pool, table, costs)) / BATCH)
    each = np.array(singles[rounds // 10 :]) * 1e6
    whole = each.sum(axis=1)
    middle = np.median(each, axis=0)
    return Timing(
        kind,
        float(np.median(whole)),
        float(np.percentile(whole, 99)),
        float(np.median(batches[len(batches) // 10 :])) * 1e6,
        float(middle[0]),
        float(middle[1]),
    )


def measure_all(rounds: int = 3_000) -> list[Timing]:
    """:func:`measure` for each kind of policy."""
    return [measure(kind, rounds) for kind in ("survival", "payoff", "frequency")]


def table(timings: Sequence[Timing]) -> Table:
    """For a terminal."""
    shown = Table(
        "kind", "p50, one", "p99, one", f"p50 a request of {BATCH}", title="us a decision"
    )
    for t in timings:
        figures = t.p50_us_batch1, t.p99_us_batch1, t.p50_us_per_request_batch64
        shown.add_row(t.kind, *(f"{figure:.1f}" for figure in figures))
    return shown
