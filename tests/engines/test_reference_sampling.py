"""Under sampling every method commits what target-only sampling would, in distribution.

The target has four tokens, so the distribution of a whole four-token output can be enumerated. All
draws are seeded; each test fails by chance with a probability below 1e-4.
"""

from __future__ import annotations

import itertools
from collections import Counter
from functools import cache

import pytest
import torch

from decoder.engines.reference.acceptance import distribution
from decoder.engines.reference.engine import ReferenceEngine
from decoder.engines.reference.generation import Sampling
from decoder.engines.reference.method import METHODS, Method, method
from decoder.engines.reference.session import Session
from decoder.settings import WorkerSettings
from decoder.tenancy.shares import ALONE
from tests.engines.chi_square import goodness_of_fit, homogeneity
from tests.engines.tiny import labelling, learned_policy, tiny_head, tiny_target

VOCABULARY, LENGTH, DRAWS = 4, 4, 300
TEMPERATURE = 0.7
FALSE_ALARM = 1e-4
PROMPT = [0, 1, 2, 3, 1, 2, 0, 1, 3, 1, 2, 0, 1]

SAMPLED = [name for name in METHODS if name != "oracle"]


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
    session = Session(engine(), m)
    return [
        session.generate(PROMPT, length, sampling=Sampling(TEMPERATURE, seed + i)).tokens
        for i in range(draws)
    ]


def test_the_enumeration_is_a_distribution_worth_testing() -> None:
    expected = enumerated()
    assert sum(expected.values()) == pytest.approx(1.0)
    assert sum(p * DRAWS >= 5 for p in expected.values()) > 10


@pytest.mark.parametrize("name", SAMPLED)
def test_committed_tokens_have_the_targets_distribution(name: str) -> None:
    policy = learned_policy() if name.startswith("hybrid") else None
    outputs = sampled(method(name, policy=policy), DRAWS, LENGTH, 10_000 * SAMPLED.index(name))
    counts = Counter(tuple(tokens) for tokens in outputs)
    assert goodness_of_fit(counts, enumerated()) > FALSE_ALARM


def test_the_test_notices_a_target_that_is_a_little_off() -> None:
    """Power: the same number of draws at a temperature a third lower is refused."""
    session = Session(engine(), method("greedy"))
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
    prompt = [*PROMPT, *Session(engine(), method("greedy")).generate(PROMPT, 24).tokens]
    counts: Counter[tuple[int, int, int]] = Counter()
    session = Session(engine(), labelling(threshold, "none"))
    for i in range(DRAWS):
        made = session.generate(prompt, 6, sampling=Sampling(TEMPERATURE, seed + i), tenant=ALONE)
        first = [e for e in session.sink if e.position == 1]
        session.sink.clear()
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
