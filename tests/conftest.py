"""Small real things for tests: a policy that learned nothing, a sink that keeps its events."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np
import pytest

with warnings.catch_warnings():
    # importing kafka-python warns about what it imports, which is theirs to mend
    warnings.simplefilter("ignore")
    import kafka.admin  # noqa: F401

from decoder.contracts.bundle import Policy
from decoder.contracts.events import DraftEvent
from decoder.contracts.features import NUM_FEATURES, TOKEN_CLASSES
from decoder.hindsight import Resolved, event_of

VOCABULARY = 32


class KeepingSink:
    """An event sink that keeps the events."""

    def __init__(self) -> None:
        self.every: list[DraftEvent] = []

    def put(self, resolved: Resolved) -> None:
        self.every.append(event_of(resolved))

    @property
    def events(self) -> list[DraftEvent]:
        """Those of cache drafts."""
        return [event for event in self.every if event.draft_len]


@pytest.fixture
def sink() -> KeepingSink:
    return KeepingSink()


@pytest.fixture
def token_classes() -> np.ndarray:
    rng = np.random.default_rng(0)
    return (rng.random((VOCABULARY, len(TOKEN_CLASSES))) < 0.3).astype(np.float32)


def random_policy(seed: int = 0, scope: str = "scope", version: int = 1) -> Policy:
    """A payoff policy with random weights of the paper's shape, carrying probes."""
    rng = np.random.default_rng(seed)
    shapes = ((NUM_FEATURES, 256), (256, 256), (256, 1))
    layers = tuple(
        ((rng.normal(size=s) / np.sqrt(s[0])).astype(np.float32), np.full(s[1], 0.1, np.float32))
        for s in shapes
    )
    policy = Policy(scope=scope, version=version, threshold=1.5, layers=layers)
    return policy.with_probes(rng.random((20, NUM_FEATURES)).astype(np.float32) * 8)


def naive_accepted_length(draft: Sequence[int], continuation: Sequence[int]) -> int:
    """Longest common prefix, the definition itself, which labels are tested against."""
    length = 0
    for proposed, committed in zip(draft, continuation, strict=False):
        if proposed != committed:
            break
        length += 1
    return length
