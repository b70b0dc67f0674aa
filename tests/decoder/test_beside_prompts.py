"""What drafts cost in a step that reads prompts, too: as long as that brings the most requests."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from decoder.contracts.features import FEATURES, NUM_FEATURES
from decoder.core.choice import choose
from decoder.core.rate import LiveRate
from decoder.policy.pricing import MAX_TOKENS, CostTable, plain_steps
from tests.decoder.simulated import trusting_policy

GPU = CostTable("gpu", (1, 256, MAX_TOKENS), (5_000.0, 5_500.0, 5_500.0 + 25.0 * 3_840))
"""Memory bounds a step of up to 256 tokens, arithmetic a larger one."""


def lengths_of(rows: int, hazard: float, rate: float, beside: int = 0) -> int:
    """Tokens of each draft that are verified, where all have drafts of 16 that are alike."""
    features = np.zeros((rows, NUM_FEATURES), np.float32)
    features[:, FEATURES.index("draft_len")] = 16
    chosen = choose(trusting_policy(hazard), features, np.arange(rows), rows, rows, GPU, rate, 0,
                    beside=beside)  # fmt: skip
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
        taken = plain_steps(GPU, rows, rows * length, beside=reads)
        rate.observe(round(committed(length)), rows, taken)
    mine = lengths_of(rows, hazard, rate.value, prompt), lengths_of(rows, hazard, rate.value)
    best = min(itertools.product(range(17), repeat=2), key=lambda lengths: time(*lengths))
    assert time(*mine) < 1.002 * time(*best), (mine, best)
