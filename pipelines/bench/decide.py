"""``hvd bench decide``: what one decision costs, suffix lookup aside.

Featurize and choose (the model draft's length included), the functions a worker runs, on drafts of
mixed lengths in one thread. The budget comes from hardware: 49 us is 1 % of the 4.9 ms in
which an H100 reads the weights of an 8B model once (16.4 GB at 3.35 TB/s).
"""

from __future__ import annotations

import itertools
import time
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from decoder.choice import choose
from decoder.contracts.bundle import OUTPUTS, Kind, Policy
from decoder.contracts.features import NUM_FEATURES, TOKEN_CLASSES
from decoder.drafting.drafts import CacheDraft
from decoder.payoff.featurize import DraftState, featurize
from decoder.payoff.memory import History, TenantMemory, memory_keys
from decoder.policy.pricing import MAX_TOKENS, CostTable
from decoder.rate import START
from learner.train import HIDDEN

KINDS: Final[tuple[Kind, ...]] = ("survival", "payoff", "frequency")
BATCH: Final = 64
VOCABULARY: Final = 49_152
MODEL_LEN: Final = 4
COSTS: Final = CostTable("bench", (1, MAX_TOKENS), (1.0, 25.0), draft_us=0.2)


def random_policy(kind: Kind, seed: int = 0) -> Policy:
    """A policy with a network of the shape that is trained, and random weights."""
    rng = np.random.default_rng(seed)
    widths = [NUM_FEATURES, *HIDDEN.get(kind, ()), OUTPUTS[kind]]
    layers = tuple(
        (rng.normal(0, a**-0.5, (a, b)).astype(np.float32), np.zeros(b, np.float32))
        for a, b in itertools.pairwise(widths)
    )
    return Policy("bench", 1, 2.0, kind, layers=layers if OUTPUTS[kind] else ())


def random_classes() -> NDArray[np.float32]:
    """Which classes each token of the vocabulary is of [VOCABULARY, classes]."""
    drawn = np.random.default_rng(1).random((VOCABULARY, len(TOKEN_CLASSES))) < 0.2
    return drawn.astype(np.float32)


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


def decide(
    policy: Policy, batch: list[DraftState], classes: NDArray[np.float32]
) -> tuple[float, float]:
    """One decision for each of ``batch``: seconds of featurizing and of choosing."""
    clock, n = time.perf_counter, len(batch)
    began = clock()
    features = featurize(batch, classes)
    featurized = clock()
    choose(policy, features, np.arange(n), n, n, COSTS, START, MODEL_LEN)
    return featurized - began, clock() - featurized


def measure(kind: Kind, rounds: int = 3_000) -> dict[str, Any]:
    """Microseconds of decisions of ``kind``, batches of one and of 64 interleaved; the batch's
    figure is per request."""
    classes, policy, pool = random_classes(), random_policy(kind), states(BATCH)
    singles, batches = [], []
    for i in range(rounds):
        singles.append(decide(policy, [pool[i % BATCH]], classes))
        if i % 10 == 0:
            batches.append(sum(decide(policy, pool, classes)) / BATCH)
    each = np.array(singles[rounds // 10 :]) * 1e6
    whole, (featurizing, choosing) = each.sum(axis=1), np.median(each, axis=0).tolist()
    return {
        "kind": kind,
        "p50_us_batch1": float(np.median(whole)),
        "p99_us_batch1": float(np.percentile(whole, 99)),
        "p50_us_per_request_batch64": float(np.median(batches[len(batches) // 10 :])) * 1e6,
        "featurize_us_batch1": featurizing,
        "choose_us_batch1": choosing,
        "features": NUM_FEATURES,
    }
