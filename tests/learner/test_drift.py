"""A change raises one alarm in its own stream, and noise none."""

from __future__ import annotations

import json

import numpy as np

from learner.drift import MARGINS, Alarm, Detector, beyond


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
    advantages = MARGINS * np.array([[1, 0], [1, 1], [1, 4]])
    assert np.abs(beyond(advantages, tried)).max() < 1e-9
    assert beyond(advantages * 2, tried)[0].tolist() == [MARGINS[0], 0.0]


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
