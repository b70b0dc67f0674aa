"""What share of candidates that are better, equal and worse pass the gate, after how many requests.

Long: a new stream of requests for every candidate.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from decoder.contracts.bundle import Policy
from learner import train
from learner.buffer import Buffer
from learner.clusters import Clusters
from learner.contest import SEATS, Contest, Contestant
from learner.gate import judge
from learner.measured import NOMINAL, measure
from learner.rows import Rows, from_events
from learner.tune import speed
from tests.learner.traffic import Traffic

REQUESTS = (50, 100, 300)
STREAMS = 20


@cache
def trained() -> Policy:
    rows = from_events(Traffic(seed=1, prefix="l").events(300))
    return train.export(train.fit(rows, "survival", 20), "s", 6.0, rows.features)


@cache
def drawn() -> Rows:
    return from_events(Traffic(seed=2, prefix="d").events(1_000))


def spoiled(policy: Policy, share: float) -> Policy:
    """The same network with its last layer shrunk: it tells drafts apart the less."""
    *others, (weight, bias) = policy.layers
    return replace(policy, layers=(*others, (weight * np.float32(1.0 - share), bias)))


def loss_of(share: float) -> float:
    costs = measure(drawn()) or NOMINAL
    return 1.0 - speed(spoiled(trained(), share), drawn(), costs) / speed(trained(), drawn(), costs)


def slower_by(loss: float) -> Policy:
    """A policy whose rate is by ``loss`` below that of the trained one."""
    low, high = 0.0, 1.0
    for _ in range(14):
        middle = (low + high) / 2.0
        low, high = (middle, high) if loss_of(middle) < loss else (low, middle)
    return spoiled(trained(), high)


def passes(candidate: Policy, champion: Policy, seed: int) -> int | None:
    """After how many requests ``candidate`` replaces ``champion``; None within the longest."""
    rows = from_events(Traffic(seed=seed, prefix=f"p{seed}").events(REQUESTS[-1]))
    contest, clusters, buffer = Contest(champion), Clusters(SEATS), Buffer(len(rows))
    contest.seats[0] = one = Contestant(candidate, 0, "test")
    for first in range(0, len(rows), 60):
        block = rows.take(np.arange(first, first + 60))
        costs = measure(buffer.recent(len(buffer))) or NOMINAL
        contest.take(clusters.add(block.session, contest.advantages(block, costs)))
        buffer.add(block)
        if contest.passed() == [0]:
            judged = buffer.begun_since(0, len(rows), 0)
            costs = measure(judged) or NOMINAL
            if judge(candidate, champion, judged, costs, one.bets.evidence, one.judged).promote:
                return (first + 60) // 20
    return None


def power(candidate: Policy, champion: Policy) -> list[float]:
    """Share of streams in which it passed, by ``REQUESTS``."""
    found = [passes(candidate, champion, 100 + n) for n in range(STREAMS)]
    return [sum(at is not None and at <= n for at in found) / STREAMS for n in REQUESTS]


@pytest.mark.long
@pytest.mark.parametrize(("gain", "least"), [(0.01, (0.0, 0.5, 0.9)), (0.02, (0.5, 0.9, 0.95))])
def test_a_candidate_that_is_better_passes(gain: float, least: tuple[float, ...]) -> None:
    found = power(trained(), slower_by(gain))
    assert all(share >= bound for share, bound in zip(found, least, strict=True)), found


@pytest.mark.long
def test_a_candidate_that_is_half_a_per_cent_worse_does_not() -> None:
    assert power(slower_by(0.005), trained())[-1] <= 0.05


@pytest.mark.long
def test_neither_does_one_that_is_as_good() -> None:
    assert power(replace(trained(), version=3), trained())[-1] == 0.0
