"""A prompt is read by the drafter where model drafts bring more than reading takes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from decoder.policy.pricing import NOMINAL
from decoder.reading import LOOK_EVERY, Reading

COSTS = replace(NOMINAL, read_us=2.0)


def known(worth_us: float, steps: int = 50) -> Reading:
    reading = Reading()
    for _ in range(500):
        reading.observe(worth_us * 4, 4)
    for _ in range(40):
        reading.ended(steps)
    return reading


def test_all_is_read_until_a_request_has_shown_how_long_they_go_on() -> None:
    reading = Reading()
    reading.observe(0.0, 4)
    assert all(reading.reads(10_000, COSTS) for _ in range(99))
    reading.ended(50)
    assert not reading.reads(10_000, COSTS)


def test_all_is_read_where_nobody_measured_what_it_takes() -> None:
    assert known(0.0).reads(10_000, NOMINAL)


def test_a_prompt_is_read_up_to_where_it_takes_what_model_drafts_bring() -> None:
    reading = known(worth_us=8.0)
    assert reading.worth_us == pytest.approx(8.0) and reading.steps == pytest.approx(50)
    assert reading.reads(199, COSTS) and not reading.reads(201, COSTS)


def test_of_those_passed_over_one_in_some_is_read() -> None:
    reading = known(worth_us=0.0)
    taken = [reading.reads(500, COSTS) for _ in range(3 * LOOK_EVERY)]
    assert taken == ([False] * (LOOK_EVERY - 1) + [True]) * 3


def test_it_follows_what_model_drafts_bring_now() -> None:
    reading = known(worth_us=0.0)
    for _ in range(150):
        reading.observe(20.0, 1)
    assert reading.reads(450, COSTS)
