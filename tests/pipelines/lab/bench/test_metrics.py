"""The figures of a benchmark, against cases worked out by hand."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import pytest
from rich.console import Console

from decoder.contracts.events import Arm
from decoder.engines.reference.session import CycleRecord, Generation
from pipelines.lab.bench import metrics
from pipelines.lab.bench.metrics import (
    Key,
    Measured,
    Results,
    measure,
    summary,
    typical,
)
from pipelines.stats import LOOP, loops


def cycle(arm: Arm, verified: int, accepted: int, us: float = 1e4) -> CycleRecord:
    return CycleRecord(arm, 0, verified, accepted, us)


PLAIN, STALLED = cycle("none", 0, 0), cycle("model", 4, 2, 1.001e6)


def outcome(
    micros: float = 1e6, tokens: Any = 11, cycles: Sequence[CycleRecord] = ()
) -> Generation:
    """An output of ``tokens``, or so many distinct ones, in ``micros``."""
    made = list(range(tokens) if isinstance(tokens, int) else tokens)
    return Generation(made, [*cycles], "length", micros)


def results_of(**prompts: dict[str, Generation]) -> Results:
    methods = list(next(iter(prompts.values())))
    found = Results({"methods": methods})
    for name, outcomes in prompts.items():
        found.prompts[Key("mbpp", name)] = Measured("code", outcomes)
    return found


def test_a_record_by_hand() -> None:
    """Ten tokens in four cycles: a cache draft of 3 with 3 accepted, one of 5 with 1, a chain of 4
    with 2, and one cycle of nothing. Greedy needs ten cycles and twice the time."""
    cycles = (cycle("cache", 3, 3), cycle("cache", 5, 1), cycle("model", 4, 2), cycle("none", 0, 0))
    greedy, hybrid = outcome(2e6, cycles=[PLAIN] * 10), outcome(cycles=cycles)
    found = measure([{"greedy": greedy, "hybrid": hybrid}], "hybrid")
    expected = {
        "prompts": 1, "tokens": 11, "exact": True, "tok_per_s": 10.0, "speedup_vs_greedy": 2.0,
        "cycles_per_1k": 400.0, "ms_per_cycle": 250.0,
        "mean_accepted": 6 / 4, "mean_accepted_cache": 2.0,
        "mean_accepted_model": 2.0, "cache_share": 0.5, "model_share": 0.25, "loop_share": 0.0,
    }  # fmt: skip
    assert {name: found[name] for name in expected} == pytest.approx(expected)


def test_neither_a_stalled_cycle_nor_a_busy_minute_of_one_method_moves_the_typical_rate() -> None:
    """Ten tokens in four cycles of 10 ms, one of them stalled for a second; then greedy's plain
    cycles take twice as long as those of another."""
    cycles = (cycle("model", 4, 2), STALLED, cycle("model", 4, 2), cycle("cache", 9, 4))
    assert typical([{"hybrid": outcome(cycles=cycles)}]) == {"hybrid": [(10, 4e4)]}
    slow = [cycle("none", 0, 0, 2e4)] * 3
    busy = {"greedy": outcome(cycles=slow), "suffix": outcome(cycles=[PLAIN] * 3)}
    assert typical([busy]) == {"greedy": [(10, 4.5e4)], "suffix": [(10, 4.5e4)]}
    nothing = measure([{"suffix": outcome(0.0, 1)}], "suffix")
    assert nothing["tok_per_s"] is nothing["exact"] is None


def test_an_output_loops_when_a_run_of_32_comes_twice_and_is_measured_apart() -> None:
    run = list(range(LOOP))
    assert not any(loops(straight) for straight in (run, [*run, *run[:-1]], [5] * LOOP, []))
    assert all(loops(looping) for looping in ([*run, *run], [*run, 99, *run], [5] * (LOOP + 1)))
    straight = {"greedy": outcome(), "suffix": outcome()}
    looping = {"greedy": outcome(4e6, [7] * 41), "suffix": outcome(1e6, [7] * 41)}
    found = measure([straight, looping], "suffix")
    assert found["loop_share"] == 0.5
    speeds = [part["speedup_vs_greedy"] for part in (found["not_looping"], found)]
    assert speeds == pytest.approx([1.0, 2.5])


def test_an_output_that_is_not_greedys_is_named_with_its_place() -> None:
    right, wrong = ({"greedy": outcome(), "suffix": outcome(tokens=n)} for n in (11, 4))
    made = summary(results_of(good=right, bad=wrong))
    console = Console(width=80, file=io.StringIO())
    console.print(metrics.table("", metrics.COLUMNS, made["overall"]))
    assert "suffix" in console.file.getvalue() and "…" not in console.file.getvalue()
    (said,) = made["differing"]
    assert said.startswith("suffix differs from greedy on prompt bad of mbpp")
    assert said.endswith("from output token 4 on.")
    assert [(r["dataset"], r["method"], r["prompts"], r["exact"]) for r in made["records"]] == [
        ("mbpp", "greedy", 2, True), ("mbpp", "suffix", 2, False),
    ]  # fmt: skip
