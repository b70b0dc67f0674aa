"""Figures of a drift study, on runs whose answer is known."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pipelines.lab.drift.measure import figures
from pipelines.lab.drift.scenario import PLAIN_US, Scenario, Segment
from pipelines.lab.drift.stream import Run
from pipelines.lab.drift.traffic import Request, Traffic
from pipelines.lab.replay.traces import Trace

BEFORE, AFTER = 60, 240


def scenario(**more: Any) -> Scenario:
    before = Segment(kinds=("one",), generations=BEFORE)
    after = Segment(kinds=("two",), generations=AFTER)
    return Scenario(name="test", segments=(before, after), **more)


def sent(each: Scenario) -> Traffic:
    requests, begins = [], []
    for index, segment in enumerate(each.segments):
        begins.append(len(requests))
        place = range(len(requests), len(requests) + segment.generations)
        requests += [Request(Trace(f"s{i // 2}", [1], [2]), index) for i in place]
    return Traffic(requests, begins)


def run(before: float, after: float, settles: int = 0, **more: Any) -> Run:
    """Ten tokens a request at a rate; half of ``after`` for the first requests after the change."""
    rates = [before] * BEFORE + [after / 2] * settles + [after] * (AFTER - settles)
    us = [10 * PLAIN_US / rate for rate in rates]
    return Run(np.full(len(rates), 10), np.array(us), np.array([0, 1, 3]), **more)


def test_rates_and_shares_are_of_the_requests_of_their_window() -> None:
    each = scenario()
    runs = {"first": run(2.0, 3.0), "oracle": run(4.0, 4.0)}
    found = figures(each, 1, sent(each), runs)
    first = found["policies"]["first"]
    assert first["rate_after"] == pytest.approx(3.0)
    assert first["oracle_fraction_after"] == pytest.approx(0.75)
    assert first["rate_start"] == pytest.approx(2.0)
    assert first["rate"] == pytest.approx(300 / (60 / 2 + 240 / 3))
    assert first["cycles_by_arm"] == {"none": 0.0, "model": 0.25, "cache": 0.75}
    assert found["changes"] == [{"at": 60, "what": ["kinds"], "segment": 1}]
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_ratios_are_paired_and_their_intervals_hold_them() -> None:
    each = scenario()
    rng = np.random.default_rng(0)
    luck, noise = (rng.lognormal(0, sigma, BEFORE + AFTER) for sigma in (0.5, 0.02))
    even = run(1.0, 1.0)
    slow, fast = (replace(even, us=even.us * luck * more) for more in (1.0, noise / 1.05))
    found = figures(each, 1, sent(each), {"adaptive": fast, "first": slow})
    ratio, low, high = found["ratios"]["adaptive/first"]["all"]
    assert low < ratio < high
    assert ratio == pytest.approx(1.05, abs=0.01)
    assert high - low < 0.02


def test_recovery_counts_the_requests_until_it_is_as_good_as_retrained() -> None:
    each, retrained, first = scenario(), run(2.0, 4.0), run(2.0, 3.0)
    for settles in (0, 40, 100):
        runs = {"adaptive": run(2.0, 4.0, settles), "refit": retrained, "first": first}
        found = figures(each, 1, sent(each), runs)
        assert settles - 2 <= found["recovery_requests"][0] <= settles
        assert found["gap_recovered"] == pytest.approx(1.0)
    never = {"adaptive": run(2.0, 3.9), "refit": retrained}
    assert figures(each, 1, sent(each), never)["recovery_requests"] == [None]


def test_an_alarm_is_false_where_nothing_changed() -> None:
    each = scenario()
    adaptive = run(2.0, 4.0, alarms=[10, 59, 60, 159, 160, 299], promotions=[70])
    found = figures(each, 1, sent(each), {"adaptive": adaptive})
    assert found["false_alarms"] == 4
    still = Scenario(name="still", segments=(Segment(kinds=("one",), generations=300),))
    assert figures(still, 1, sent(still), {"adaptive": adaptive})["false_alarms"] == 6
