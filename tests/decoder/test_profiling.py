"""A profile spans what its budget allows, from coarse to fine, and keeps the fastest of each."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from decoder.core.profiling import SHARE, levels, profile
from decoder.policy.pricing import MAX_TOKENS


class Clock:
    """Time that passes only while a step runs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.ran = 0.0, list[int]()
        monkeypatch.setattr("decoder.core.profiling.time.perf_counter", lambda: self.now)

    def step(self, seconds: Callable[[int], float]) -> Callable[[int], None]:
        def run(tokens: int) -> None:
            self.ran.append(tokens)
            self.now += seconds(tokens)

        return run


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_a_profile_keeps_the_fastest_of_each_size(clock: Clock) -> None:
    """Other work on the machine adds to a time and never takes from it."""
    calls = itertools.count()
    table = profile("here", clock.step(lambda n: 0.01 * n * (1 + (next(calls) < 20))), most=16)
    assert table.tokens == (*range(1, 9), 12, 16)
    assert table.verify_us == pytest.approx([10_000.0 * n for n in table.tokens])


def test_a_profile_tells_what_a_drafted_token_costs_and_what_each_request_adds(
    clock: Clock,
) -> None:
    step = clock.step(lambda n: 0.01)
    draft = clock.step(lambda rows: 2 * (0.003 + 0.0005 * rows))  # two tokens for each
    table = profile("here", step, draft, drafted=2, rows=(1, 16), most=64)
    assert table.drafting(1, 8) == pytest.approx(3_000.0 + 500.0 * 8)
    assert table.drafting(3, 1) == pytest.approx(3 * 3_500.0)
    alone = profile("here", step, draft, drafted=2, most=64)
    assert alone.drafting(1, 1) == alone.drafting(1, 8) == pytest.approx(3_500.0)


def test_where_the_time_of_a_large_step_bends_there_are_sizes_on_both_sides(clock: Clock) -> None:
    def true(tokens: int) -> float:
        return 0.005 + 25e-6 * max(tokens - 200, 0)

    table = profile("here", clock.step(true), most=2048)
    assert clock.now < 20.0 and table.tokens[-1] == 2048
    for tokens in (1, 64, 192, 210, 256, 300, 700, 2048):
        assert table.time(tokens) == pytest.approx(1e6 * true(tokens), rel=0.05)


@pytest.mark.parametrize("slow", [0.1, 1.0, 30.0])
def test_a_slow_machine_is_asked_for_fewer_sizes(slow: float, clock: Clock) -> None:
    table = profile("here", clock.step(lambda n: slow * (0.5 + 0.05 * n)), most=4096, seconds=6.0)
    longest = max(SHARE * 6.0, slow * 0.55)
    assert clock.now <= 6.0 + longest
    assert 1 <= table.tokens[-1] < 256


def test_sizes_are_those_of_the_graphs_and_what_lies_behind_them() -> None:
    graphs = (1, 2, 4, *range(8, 513, 8))
    coarse, *_ = levels(2048, graphs)
    assert 512 in coarse and 513 in coarse and coarse[-1] == 2048
    assert all(n in graphs for level in levels(2048, graphs) for n in level if n <= 512)
    assert levels(1)[0] == (1,)
    assert levels(10 * MAX_TOKENS)[0][-1] == MAX_TOKENS
    assert levels(100, (8, 16, 32, 64, 128))[0] == (1, 8, 16, 32, 64)
