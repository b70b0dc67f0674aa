"""A profile spans what its budget allows, from coarse to fine, and keeps the fastest of each."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from decoder.core.profiling import SHARE, Profile, Run, levels
from decoder.policy.pricing import MAX_TOKENS, NOMINAL, CostTable


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


def profile(step: Run, draft: Run | None = None, **rest: Any) -> CostTable:
    """What a profile says that is believed."""
    taken = Profile("here", **rest)
    taken.measure(step, draft)
    assert not taken.doubt
    return taken.table


def test_a_profile_keeps_the_fastest_of_each_size(clock: Clock) -> None:
    """Other work on the machine adds to a time and never takes from it."""
    calls = itertools.count()
    table = profile(clock.step(lambda n: 0.01 * n * (1 + (next(calls) < 20))), most=16)
    assert table.tokens == (*range(1, 9), 12, 16)
    assert table.verify_us == pytest.approx([10_000.0 * n for n in table.tokens])


def test_a_profile_tells_what_a_drafted_token_costs_and_what_each_request_adds(
    clock: Clock,
) -> None:
    step = clock.step(lambda n: 0.01)
    draft = clock.step(lambda rows: 2 * (0.003 + 0.0005 * rows))  # two tokens for each
    table = profile(step, draft, drafted=2, rows=(1, 16), most=64)
    assert table.drafting(1, 8) == pytest.approx(3_000.0 + 500.0 * 8)
    assert table.drafting(3, 1) == pytest.approx(3 * 3_500.0)
    alone = profile(step, draft, drafted=2, most=64)
    assert alone.drafting(1, 1) == alone.drafting(1, 8) == pytest.approx(3_500.0)


def test_where_the_time_of_a_large_step_bends_there_are_sizes_on_both_sides(clock: Clock) -> None:
    def true(tokens: int) -> float:
        return 0.005 + 25e-6 * max(tokens - 200, 0)

    table = profile(clock.step(true), most=2048)
    assert clock.now < 20.0 and table.tokens[-1] == 2048
    for tokens in (1, 64, 192, 210, 256, 300, 700, 2048):
        assert table.time(tokens) == pytest.approx(1e6 * true(tokens), rel=0.05)


@pytest.mark.parametrize("slow", [0.1, 1.0, 30.0])
def test_a_slow_machine_is_asked_for_fewer_sizes(slow: float, clock: Clock) -> None:
    taken = Profile("here", most=4096, seconds=6.0)
    taken.measure(clock.step(lambda n: slow * (0.5 + 0.05 * n)))
    longest = max(SHARE * 6.0, slow * 0.55)
    assert clock.now <= 6.0 + longest
    assert 1 <= max(taken.target) < 256


def test_sizes_are_those_of_the_graphs_and_what_lies_behind_them() -> None:
    graphs = (1, 2, 4, *range(8, 513, 8))
    coarse, *_ = levels(2048, graphs)
    assert 512 in coarse and 513 in coarse and coarse[-1] == 2048
    assert all(n in graphs for level in levels(2048, graphs) for n in level if n <= 512)
    assert levels(1)[0] == (1,)
    assert levels(10 * MAX_TOKENS)[0][-1] == MAX_TOKENS
    assert levels(100, (8, 16, 32, 64, 128))[0] == (1, 8, 16, 32, 64)


def busy(true: Callable[[int], float], until: float, slower: float, clock: Clock) -> Run:
    """Steps on a machine that is so many times slower until then, perhaps in the middle of one."""

    def took(tokens: int) -> float:
        left = max(until - clock.now, 0.0)
        alone = true(tokens)
        return alone * slower if left > alone * slower else left + alone * (1 - left / slower)

    return clock.step(took)


@pytest.mark.parametrize("slower", [3.0, 12.0, 100.0])
@pytest.mark.parametrize("until", [0.5, 2.0, 5.0, 60.0])
def test_a_start_beside_others_is_believed_only_if_its_shape_is_right(
    until: float, slower: float, clock: Clock
) -> None:
    """A worker took 897 ms for one token, where 77 are true, and had time for no other size."""

    def true(tokens: int) -> float:
        return 0.0745 + 0.0025 * tokens

    taken = Profile("here", most=65, seconds=6.0)
    taken.measure(busy(true, until, slower, clock))
    plain = taken.table.time(1)
    for tokens in (5, 17, 65):
        ratio = taken.table.time(tokens) / plain
        if not taken.doubt:
            assert ratio == pytest.approx(true(tokens) / true(1), rel=0.4), tokens
        else:
            assert ratio == pytest.approx(NOMINAL.time(tokens))
            assert 0.9 < plain / 1e6 / true(1) <= 1.001 * slower


@pytest.mark.parametrize(
    ("seconds", "doubt"),
    [
        (lambda n: 1.0, "1 step sizes"),
        (lambda n: 0.01 if n < 16 else 0.08, "16 tokens took 8.0 times what 12 did"),
        (lambda n: 0.01 * (5 if n == 4 else 1), "4 tokens took 5.0 times what 3 did"),
        (lambda n: 0.05 if n <= 8 else 0.01, "12 tokens took 0.20 of what fewer did"),
    ],
)
def test_a_profile_that_no_machine_has_is_not_believed(
    seconds: Callable[[int], float], doubt: str, clock: Clock
) -> None:
    taken = Profile("here", most=65, seconds=6.0)
    taken.measure(clock.step(seconds))
    assert doubt in taken.doubt


def test_what_does_not_repeat_is_not_believed(clock: Clock) -> None:
    turns = itertools.count(1)
    taken = Profile("here", most=8)
    taken.measure(clock.step(lambda n: 0.01), clock.step(lambda n: 0.01 * 2 ** next(turns)))
    assert "drafted for" in taken.doubt and taken.table.tokens == NOMINAL.tokens


def test_without_any_time_one_size_is_timed(clock: Clock) -> None:
    taken = Profile("here", most=65, seconds=0.0)
    taken.measure(clock.step(lambda n: 0.9), clock.step(lambda n: 0.1))
    assert [*taken.target] == [1] and taken.doubt == "only 1 step sizes were timed"
    assert taken.costs.table.time(1) == pytest.approx(0.9e6, rel=0.01)
