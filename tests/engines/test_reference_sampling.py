"""Acceptance and whole methods under sampling: in distribution what the target alone would say.

Draws are seeded; each test fails by chance with a probability below 1e-4.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Hashable, Mapping
from functools import cache
from typing import Any

import pytest
import torch

from decoder.engines.reference.acceptance import accept_greedy, accept_sampled, distribution
from decoder.engines.reference.engine import ReferenceEngine
from decoder.engines.reference.session import Sampling
from decoder.settings import WorkerSettings
from decoder.tenancy.shares import ALONE
from pipelines.replay.method import Method
from pipelines.replay.rivals import METHODS, method
from tests.engines.tiny import labelling, learned_policy, session_of, tiny_head, tiny_target

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


VOCABULARY, LENGTH, DRAWS = 4, 4, 200
TEMPERATURE = 0.7
FALSE_ALARM = 1e-4
PROMPT = [0, 1, 2, 3, 1, 2, 0, 1, 3, 1, 2, 0, 1]

SAMPLED = list(METHODS)


@cache
def engine() -> ReferenceEngine:
    """One layer, so that thousands of requests are a matter of seconds."""
    return ReferenceEngine(
        tiny_target(13, vocabulary=VOCABULARY, layers=1),
        tiny_head(13, VOCABULARY, drafted=3, aux_layers=(0, 0, 0)),
        settings=WorkerSettings.load(),
    )


@cache
def enumerated() -> dict[tuple[int, ...], float]:
    """Probability of every output, from the target alone: each prefix is read from nothing."""
    model = engine().target.model
    found: dict[tuple[int, ...], float] = {}

    @cache
    def after(tokens: tuple[int, ...]) -> torch.Tensor:
        with torch.inference_mode():
            logits = model(torch.tensor([[*PROMPT, *tokens]])).logits[0, -1:]
        return distribution(logits, TEMPERATURE)[0]

    for output in itertools.product(range(VOCABULARY), repeat=LENGTH):
        probability = 1.0
        for position, token in enumerate(output):
            probability *= float(after(output[:position])[token])
        found[output] = probability
    return found


def sampled(m: Method, draws: int, length: int, seed: int) -> list[list[int]]:
    """Outputs of one session: earlier ones are in its suffix cache, and so among the drafts."""
    session, _ = session_of(engine(), m)
    return [
        session.generate(PROMPT, length, sampling=Sampling(TEMPERATURE, seed + i)).tokens
        for i in range(draws)
    ]


def test_the_enumerated_distribution_is_not_degenerate() -> None:
    expected = enumerated()
    assert sum(expected.values()) == pytest.approx(1.0)
    assert sum(p * DRAWS >= 5 for p in expected.values()) >= 10


@pytest.mark.parametrize("name", SAMPLED)
def test_committed_tokens_have_the_targets_distribution(name: str) -> None:
    policy = learned_policy() if name.startswith("hybrid") else None
    outputs = sampled(method(name, policy=policy), DRAWS, LENGTH, 10_000 * SAMPLED.index(name))
    counts = Counter(tuple(tokens) for tokens in outputs)
    assert goodness_of_fit(counts, enumerated()) > FALSE_ALARM


def test_the_test_detects_a_slightly_wrong_target() -> None:
    """Power: the same number of draws at a temperature a third lower is refused."""
    session = method("greedy").session(engine())
    counts = Counter(
        tuple(session.generate(PROMPT, LENGTH, sampling=Sampling(0.65 * TEMPERATURE, i)).tokens)
        for i in range(DRAWS)
    )
    assert goodness_of_fit(counts, enumerated()) < FALSE_ALARM


def labels(threshold: float, seed: int, kind: str) -> Counter[tuple[int, int, int]]:
    """How often the first draft of a request had which accepted length.

    Nothing of earlier requests is kept, so the draft follows from the first token alone; the
    prompt ends in what the target likes to say, so that drafts come true now and then.
    """
    prompt = [*PROMPT, *method("greedy").session(engine()).generate(PROMPT, 24).tokens]
    counts: Counter[tuple[int, int, int]] = Counter()
    session, log = session_of(engine(), labelling(threshold, model=False))
    for i in range(DRAWS):
        made = session.generate(prompt, 6, sampling=Sampling(TEMPERATURE, seed + i), tenant=ALONE)
        first = [e for e in log.every if e.position == 1]
        log.clear()
        for event in first:
            assert event.label == kind and not event.censored
            counts[made.tokens[0], event.draft_len, event.accepted] += 1
    return counts


def test_hindsight_labels_have_the_distribution_of_verified_ones() -> None:
    verified = labels(0.0, 0, "verified")
    hindsight = labels(float("inf"), 500_000, "hindsight")
    assert min(verified.total(), hindsight.total()) > DRAWS / 2
    assert len({accepted for _, _, accepted in verified}) > 3
    assert homogeneity(verified, hindsight) > FALSE_ALARM


MANY = 5_000


def test_greedy_follows_the_target_as_far_as_the_draft_agrees() -> None:
    assert accept_greedy([4, 5, 6], [4, 5, 9, 1]) == (2, 9)
    assert accept_greedy([4, 5, 6], [4, 5, 6, 1]) == (3, 1)
    assert accept_greedy([4], [7, 0]) == (0, 7)
    assert accept_greedy([], [7]) == (0, 7)


DRAFTS: list[list[int]] = [[], [2], [0, 2, 3], [3, 3, 3], [0, 1, 0], [3, 2, 1], [2, 0]]


@pytest.mark.parametrize("draft", DRAFTS, ids=str)
def test_accepted_and_bonus_tokens_have_the_targets_distribution(draft: list[int]) -> None:
    """First two tokens, with a target that depends on the token before."""
    first = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    after = torch.tensor(
        [[0.1, 0.6, 0.1, 0.2], [0.7, 0.1, 0.1, 0.1], [0.25] * 4, [0.0, 0.0, 0.9, 0.1]],
        dtype=torch.float64,
    )
    rows = [first, *(after[token] for token in draft)]
    generator = torch.Generator().manual_seed(1)
    counts: Counter[tuple[int, int]] = Counter()
    for _ in range(MANY):
        accepted, bonus = accept_sampled(draft, torch.stack(rows), generator)
        tokens = [*draft[:accepted], bonus]
        if len(tokens) == 1:
            tokens.append(int(torch.multinomial(after[bonus], 1, generator=generator)))
        counts[tokens[0], tokens[1]] += 1
    expected = {(a, b): float(first[a] * after[a, b]) for a in range(4) for b in range(4)}
    assert goodness_of_fit(counts, expected) > 1e-4


def test_temperature_sharpens() -> None:
    logits = torch.tensor([[1.0, 2.0]])
    assert distribution(logits, 1.0)[0, 1] == pytest.approx(1 / (1 + torch.e**-1))
    assert distribution(logits, 0.5)[0, 1] == pytest.approx(1 / (1 + torch.e**-2))
