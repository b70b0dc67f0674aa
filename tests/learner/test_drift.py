"""Exact detections on seeded streams."""

from __future__ import annotations

import numpy as np

from learner.drift import FLOOR, Detector, residuals


def stream(*means: float) -> np.ndarray:
    rng = np.random.default_rng(7)
    return np.concatenate([m + rng.normal(0, 0.5, 1000) for m in means]).astype(np.float32)


def alarms(errors: np.ndarray) -> list[tuple[int, int]]:
    detector, found = Detector(), []
    for index, error in enumerate(errors):
        since = detector.update(np.array([error], np.float32))
        if since is not None:
            found.append((index, since))
    return found


def test_no_alarm_without_change() -> None:
    assert alarms(stream(1.0, 1.0, 1.0)) == []


def test_a_rise_is_noticed_at_once_and_dated() -> None:
    found = alarms(stream(1.0, 3.0))
    assert found[0] == (1023, FLOOR)


def test_a_fall_is_no_alarm() -> None:
    assert alarms(stream(3.0, 1.0)) == []


def test_batches_date_the_change_from_their_end() -> None:
    assert Detector().update(stream(1.0, 3.0)) == 1016  # the change was 1000 events ago


def test_residuals_of_bounds_are_one_sided() -> None:
    predicted, accepted = np.float32([5, 5, 2]), np.float32([3, 3, 6])
    censored = np.array([False, True, True])
    assert residuals(predicted, accepted, censored).tolist() == [2, 0, 4]
