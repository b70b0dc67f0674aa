"""A change raises one alarm in its own stream, and noise none."""

from __future__ import annotations

import json

import numpy as np
import pytest

from decoder.policy.rule import MODEL
from learner.drift import MARGINS, Alarm, Detector, beyond
from learner.losses import faced
from learner.rows import from_events
from tests.learner.traffic import Traffic


def fed(detector: Detector, numbers: np.ndarray) -> list[Alarm]:
    return [alarm for row, cluster in enumerate(numbers) for alarm in detector.take([cluster], row)]


def stream(draw: np.random.Generator, cache: float, model: float, n: int) -> np.ndarray:
    return draw.normal((cache, model), 1.0, (n, 2))


def test_a_careful_learner_that_is_the_better_raises_nothing() -> None:
    assert fed(Detector(), stream(np.random.default_rng(1), -0.1, -0.1, 5_000)) == []


def test_a_change_is_found_in_its_own_stream() -> None:
    for changed, means in (("cache", (1.5, -0.2)), ("model", (-0.2, 1.5))):
        draw = np.random.default_rng(2)
        numbers = np.concatenate([stream(draw, -0.2, -0.2, 1_000), stream(draw, *means, 50)])
        found = fed(Detector(), numbers)
        assert {a.stream for a in found} == {changed}
        assert 1_000 < found[0].row <= 1_045


def test_an_advantage_within_the_margin_tells_of_no_change() -> None:
    tried = np.float32([0, 1, 4])
    cache, model = np.full(3, MARGINS[0]), MARGINS[1] * tried
    assert np.abs(beyond(cache, model, tried)).max() < 1e-9
    assert beyond(cache * 2, model * 2, tried)[0].tolist() == [MARGINS[0], 0.0]


def drafted(chances: list[float], seed: int) -> list[Alarm]:
    """Alarms where each cluster's sixteen model drafts of three tokens have such a chance."""
    draw, detector, rows = np.random.default_rng(seed), Detector(), Traffic(seed=1).events(1)
    block = from_events(rows).take(np.zeros(16, np.int64))
    block.arm[:], block.verified_len[:] = MODEL, 3
    alarms = []
    for row, chance in enumerate(chances):
        block.model_accepted[:] = np.minimum(draw.geometric(1.0 - chance, 16) - 1, 3)
        found = faced(block)
        sums = beyond(np.zeros(16), detector.drafter.weigh(found), found.tried).sum(axis=0)
        assert np.isfinite(sums).all()
        alarms += detector.take([np.array([0.0, sums[1]])], row)
    return alarms


@pytest.mark.parametrize("after", [0.35, 0.75])
def test_a_drafter_that_was_swapped_is_found_once_within_sixty_clusters(after: float) -> None:
    (found,) = drafted([0.55] * 500 + [after] * 1_000, 4)
    assert found.stream == "model" and 500 <= found.row < 560


def test_a_drafter_that_stays_the_same_is_left_alone() -> None:
    assert drafted([0.55] * 6_000, 5) == []


def test_a_drafter_that_never_or_always_fits_has_a_finite_word() -> None:
    assert 1 <= len(drafted([1e-9] * 3_000 + [1.0 - 1e-9] * 50, 6)) <= 2


def test_clusters_without_a_model_draft_say_nothing_of_it() -> None:
    detector = Detector()
    fed(detector, np.stack([np.ones(100), np.zeros(100)], axis=1))
    assert detector.bets["model"].taken == 0


def test_a_detector_goes_on_from_a_snapshot() -> None:
    draw = np.random.default_rng(3)
    one = Detector()
    fed(one, stream(draw, 0.5, 0.0, 25))
    other = Detector.restored(json.loads(json.dumps(one.snapshot())))
    later = stream(draw, 0.5, 0.0, 25)
    assert fed(one, later) == fed(other, later) and one.snapshot() == other.snapshot()
