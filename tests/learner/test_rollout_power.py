"""How often trials of a known effect are promoted, and after how many pairs; chance is drawn from a
seed. ``python -m tests.learner.test_rollout_power`` prints the table of docs/rollout.md."""

from __future__ import annotations

import numpy as np
import pytest

from learner.comparison import Comparison
from learner.settings import LearnerSettings

LOOK = 8
NOISE = 0.15
"""Of a block's rate at the costs in force, relative."""


def trial(
    ratio: float, seed: int, pairs: int, noise: float, kind: str = "trial"
) -> tuple[str, int]:
    """How a comparison ends that has time for ``pairs``, and after how many."""
    settings = LearnerSettings(trial_minutes=pairs / 60.0)
    one = Comparison(kind, 2, 1, number=1, since=1)  # type: ignore[arg-type]
    rng = np.random.default_rng([seed, int(1e4 * ratio)])
    while True:
        mine, other = 1e6 * np.exp(noise * rng.normal(size=(2, LOOK)))
        slow = 1.0 + 0.1 * rng.exponential(size=(2, LOOK))  # what a pause of the machine adds
        for a, b, p, q in zip(mine, other, *slow, strict=True):
            one.pairs.extend((100.0, a / ratio * p, a / ratio, 100.0, b * q, b))
        one.seconds = float(one.played)
        outcome = one.outcome(settings)
        if outcome is not None:
            return outcome.word, one.played


def ended(ratio: float, word: str, runs: int, pairs: int = 600, kind: str = "trial") -> float:
    return float(np.mean([trial(ratio, s, pairs, NOISE, kind)[0] == word for s in range(runs)]))


@pytest.mark.parametrize(
    ("ratio", "word", "low", "high"),
    [(0.94, "promote", 0.0, 0.05), (1.0, "promote", 0.9, 1.0), (1.05, "drop", 0.0, 0.02)],
)
def test_trials_end_as_they_should(ratio: float, word: str, low: float, high: float) -> None:
    assert low <= ended(ratio, word, 60) <= high


def test_a_champion_that_is_no_slower_is_hardly_ever_rolled_back() -> None:
    assert ended(1.0, "roll back", 60, kind="watch") <= 0.05
    assert ended(1.1, "roll back", 30, kind="watch") >= 0.95


def _table() -> None:
    for noise in (0.1, 0.2):
        for ratio in (0.85, 0.9, 0.95, 0.97, 1.0, 1.02, 1.05, 1.1):
            found = [trial(ratio, seed, 600, noise) for seed in range(200)]
            share = float(np.mean([word == "promote" for word, _ in found]))
            middle = float(np.median([pairs for _, pairs in found]))
            print(f"| {noise:.0%} | {ratio:.2f} | {share:.1%} | {middle:.0f} |")


if __name__ == "__main__":
    _table()
