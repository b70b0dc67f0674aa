"""A change raises one alarm in its own stream, and noise none."""

from __future__ import annotations

import json

import numpy as np

from decoder.policy.rule import MODEL
from learner.drift import MARGINS, Alarm, Detector, Drafter, beyond
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


def model_drafts(chances: list[float], seed: int) -> np.ndarray:
    """What tells of a change of the drafter: clusters [n] of sixteen drafts of three tokens."""
    draw, drafter, rows = np.random.default_rng(seed), Drafter(), Traffic(seed=1).events(1)
    block = from_events(rows).take(np.zeros(16, np.int64))
    block.arm[:], block.verified_len[:] = MODEL, 3
    sums = []
    for chance in chances:
        block.model_accepted[:] = np.minimum(draw.geometric(1.0 - chance, 16) - 1, 3)
        found = faced(block)
        sums.append(beyond(np.zeros(16), drafter.weigh(found), found.tried)[:, 1].sum())
    return np.stack([np.zeros(len(sums)), sums], axis=1)


def test_a_drafter_that_was_swapped_is_found_within_sixty_clusters() -> None:
    for after in (0.35, 0.75):
        found = fed(Detector(), model_drafts([0.55] * 500 + [after] * 60, 4))
        assert {a.stream for a in found} == {"model"} and found[0].row >= 500


def test_a_drafter_that_stays_the_same_is_left_alone() -> None:
    assert fed(Detector(), model_drafts([0.55] * 6_000, 5)) == []


def test_a_drafter_that_never_or_always_fits_has_a_finite_word() -> None:
    assert np.isfinite(model_drafts([1e-9] * 3_000 + [1.0 - 1e-9] * 50, 6)).all()


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
