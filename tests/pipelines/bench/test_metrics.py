"""The figures of a benchmark, against cases worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.bench.metrics import (
    LOOP,
    differing,
    loops,
    measure,
    payoff,
    rate,
    ratio_interval,
    records,
    summary,
)
from pipelines.bench.results import Cycle, Labelled, Outcome, PromptFacts, Results


def outcome(
    method: str = "greedy",
    tokens: int = 11,
    micros: float = 1e6,
    cycles: tuple[Cycle, ...] = (),
    drafts: tuple[Labelled, ...] = (),
    prompt: str = "p0",
    first: int = 0,
) -> Outcome:
    """An output of ``tokens`` distinct tokens in ``micros``."""
    return Outcome(
        "mbpp", "chat", prompt, method, tuple(range(first, first + tokens)), cycles, "length",
        5e4, micros, drafts,
    )  # fmt: skip


def cycle(arm: str, verified: int, accepted: int) -> Cycle:
    return Cycle(arm, verified, verified, accepted, 1000.0, 9000.0)


def results_of(methods: list[str], *prompts: dict[str, Outcome]) -> Results:
    found = Results({"methods": methods, "templates": ["chat"]})
    for by_method in prompts:
        for made in by_method.values():
            found.add(made)
            found.prompts[made.key] = PromptFacts(*made.key, "code", "", 7, 0, {})
    return found


def test_throughput_is_decoded_tokens_over_decoding_time() -> None:
    """The first token comes with the prefill: ten tokens in one second, then ten in three."""
    assert rate([outcome(), outcome(micros=3e6)]) == pytest.approx(20 / 4)
    assert rate([outcome(tokens=1, micros=0.0)]) is None


def test_a_record_by_hand() -> None:
    """Ten tokens in four cycles: a cache draft of 3 with 3 accepted, one of 5 with 1, a chain of 4
    with 2, and one cycle of nothing. Greedy needs ten cycles and twice the time."""
    cycles = (
        cycle("cache", 3, 3), cycle("cache", 5, 1), cycle("model", 4, 2), cycle("none", 0, 0),
    )  # fmt: skip
    by_method = {
        "greedy": outcome(cycles=(cycle("none", 0, 0),) * 10, micros=2e6),
        "hybrid": outcome("hybrid", cycles=cycles),
        "oracle": outcome("oracle", cycles=cycles, micros=0.8e6),
    }
    found = measure([by_method], "hybrid")
    assert found["tok_per_s"] == pytest.approx(10.0)
    assert found["speedup_vs_greedy"] == pytest.approx(2.0)
    assert found["fraction_of_oracle"] == pytest.approx(0.8)
    assert found["cycles_per_1k"] == pytest.approx(400.0)
    assert found["ms_per_cycle"] == pytest.approx(250.0)
    assert found["ms_per_cycle_drafting"] == pytest.approx(1.0)
    assert found["mean_accepted"] == pytest.approx(6 / 4)
    assert found["mean_accepted_cache"] == pytest.approx(2.0)
    assert found["mean_accepted_model"] == pytest.approx(2.0)
    assert found["cache_share"] == pytest.approx(0.5)
    assert found["model_share"] == pytest.approx(0.25)
    assert (found["prompts"], found["tokens"], found["exact"]) == (1, 11, True)
    assert found["loop_share"] == 0.0
    assert found["looping"] is None
    greedy = measure([by_method], "greedy")
    assert greedy["cycles_per_1k"] == pytest.approx(1000.0)
    assert greedy["mean_accepted"] == 0.0


def test_a_stalled_cycle_does_not_move_the_typical_rate() -> None:
    """Ten tokens: three model cycles of 10 ms, one of them stalled for a second, and a cache cycle
    of 10 ms make 40 ms."""
    stalled = Cycle("model", 0, 4, 2, 1000.0, 1e6)
    cycles = (cycle("model", 4, 2), stalled, cycle("model", 4, 2), cycle("cache", 9, 4))
    by_method = {
        "greedy": outcome(cycles=(cycle("none", 0, 0),) * 10),
        "hybrid": outcome("hybrid", cycles=cycles),
    }
    found = measure([by_method], "hybrid")
    assert found["tok_per_s_typical"] == pytest.approx(10 / 0.04)
    assert found["speedup_vs_greedy_typical"] == pytest.approx(2.5)


def test_a_busy_minute_of_one_method_does_not_move_its_typical_rate() -> None:
    """Both methods make three plain cycles; those of one took twice as long."""
    plain, slow = Cycle("none", 0, 0, 0, 0.0, 1e4), Cycle("none", 0, 0, 0, 0.0, 2e4)
    other = {
        "greedy": outcome(cycles=(plain,) * 3),
        "suffix": outcome("suffix", cycles=(plain,) * 3),
    }
    unlucky = {
        "greedy": outcome(cycles=(slow,) * 3),
        "suffix": outcome("suffix", cycles=(plain,) * 3),
    }
    assert measure([unlucky], "suffix")["speedup_vs_greedy_typical"] == pytest.approx(1.0)
    assert measure([other, unlucky], "greedy")["tok_per_s_typical"] == pytest.approx(
        measure([other, other], "greedy")["tok_per_s_typical"]
    )


def test_figures_that_cannot_be_had_are_none() -> None:
    found = measure([{"suffix": outcome("suffix", tokens=1, micros=0.0)}], "suffix")
    for name in ("tok_per_s", "speedup_vs_greedy", "fraction_of_oracle", "cycles_per_1k",
                 "tok_per_s_typical", "mean_accepted", "exact", "precision_at_6"):  # fmt: skip
        assert found[name] is None, name


def test_medians_and_quartiles_are_over_prompts() -> None:
    prompts = [
        {"greedy": outcome(prompt=f"p{i}", micros=2e6),
         "suffix": outcome("suffix", prompt=f"p{i}", micros=1e6 / (i + 1))}
        for i in range(5)
    ]  # fmt: skip
    found = measure(prompts, "suffix")
    assert found["tok_per_s_quartiles"] == pytest.approx((20.0, 30.0, 40.0))
    assert found["speedup_vs_greedy_quartiles"] == pytest.approx((4.0, 6.0, 8.0))
    low, high = found["speedup_vs_greedy_interval"]
    assert 2.0 < low < found["speedup_vs_greedy"] < high < 10.0


def test_pairs_that_agree_leave_no_interval_around_the_ratio() -> None:
    """Resampling keeps pairs: prompts differ tenfold in speed, their ratio does not."""
    mine = [outcome(micros=1e6 * f) for f in (1, 5, 10)]
    theirs = [outcome(micros=3e6 * f) for f in (1, 5, 10)]
    assert ratio_interval(mine, theirs) == pytest.approx((3.0, 3.0))
    assert ratio_interval(mine[:1], theirs[:1]) is None


def test_precision_and_recall_at_six_by_hand() -> None:
    """Predicted 6 or more: four, of which three are. Really 6 or more: five, of which three were
    predicted. A label cut short at 7 is high; one cut short at 5 says nothing."""
    drafts = [
        Labelled(6.0, 6, False),
        Labelled(9.5, 20, False),
        Labelled(7.0, 7, True),
        Labelled(8.0, 1, False),
        Labelled(1.0, 6, False),
        Labelled(5.9, 8, False),
        Labelled(0.1, 0, False),
        Labelled(0.2, 5, False),
        Labelled(9.0, 5, True),
    ]
    found = payoff(drafts)
    assert found["drafts"] == 8
    assert found["precision_at_6"] == pytest.approx(3 / 4)
    assert found["recall_at_6"] == pytest.approx(3 / 5)
    assert found["high_payoff_share"] == pytest.approx(5 / 8)
    assert found["selected_share"] == pytest.approx(4 / 8)
    assert payoff([])["precision_at_6"] is None


def test_both_arms_are_calibrated_over_what_is_known_of_them() -> None:
    told = (Labelled(1.0, 1, False), Labelled(3.0, 5, False), Labelled(2.0, 9, True))
    seen = replace(outcome("hybrid"), drafts=told, model_drafts=told[:1])
    found = measure([{"hybrid": seen}], "hybrid")["calibration"]
    assert found["cache"] == [
        {"n": 1, "foreseen": 1.0, "came": 1.0},
        {"n": 1, "foreseen": 3.0, "came": 5.0},
    ]
    assert found["model"] == [{"n": 1, "foreseen": 1.0, "came": 1.0}]


def test_an_output_loops_when_a_run_of_32_comes_twice() -> None:
    run = list(range(LOOP))
    assert not loops(run)
    assert not loops([*run, *run[:-1]])
    assert loops([*run, *run])
    assert loops([*run, 99, *run])
    assert loops([5] * (LOOP + 1))
    assert not loops([5] * LOOP)


@given(st.lists(st.integers(0, 2), max_size=80))
def test_looping_is_what_its_definition_says(tokens: list[int]) -> None:
    runs = [tuple(tokens[i : i + LOOP]) for i in range(len(tokens) - LOOP + 1)]
    assert loops(tokens) == (len(set(runs)) < len(runs))


def test_loops_are_measured_apart() -> None:
    looping = dict.fromkeys(("tokens",), tuple([7] * 41))
    greedy, suffix = outcome(tokens=41, micros=4e6), outcome("suffix", tokens=41, micros=1e6)
    prompts = [
        {"greedy": outcome(prompt="p0"), "suffix": outcome("suffix", prompt="p0")},
        {
            "greedy": Outcome(**{**_fields(greedy), **looping}),
            "suffix": Outcome(**{**_fields(suffix), **looping}),
        },
    ]
    found = measure(prompts, "suffix")
    assert found["loop_share"] == 0.5
    assert found["looping"]["speedup_vs_greedy"] == pytest.approx(4.0)
    assert found["not_looping"]["speedup_vs_greedy"] == pytest.approx(1.0)
    assert found["speedup_vs_greedy"] == pytest.approx(5.0 / 2.0)


def _fields(made: Outcome) -> dict[str, Any]:
    return {name: getattr(made, name) for name in made.__dataclass_fields__}


def test_an_output_that_is_not_greedys_is_named_with_its_place() -> None:
    right = {"greedy": outcome(prompt="good"), "suffix": outcome("suffix", prompt="good")}
    wrong = {
        "greedy": outcome(prompt="bad"),
        "suffix": outcome("suffix", prompt="bad", tokens=4),
    }
    found = results_of(["greedy", "suffix"], right, wrong)
    assert differing(found) == [
        "suffix differs from greedy on prompt bad of mbpp, from output token 4 on."
    ]
    by_method = {r["method"]: r for r in records(found)}
    assert by_method["greedy"]["exact"] is True
    assert by_method["suffix"]["exact"] is False


def test_only_prompts_that_every_method_decoded_count() -> None:
    whole = {"greedy": outcome(), "suffix": outcome("suffix")}
    found = results_of(["greedy", "suffix"], whole, {"greedy": outcome(prompt="late")})
    assert [r["prompts"] for r in records(found)] == [1, 1]
    assert summary(found)["prompts"] == 1


def test_a_run_has_one_record_for_each_dataset_and_method() -> None:
    found = results_of(["greedy", "suffix"], {"greedy": outcome(), "suffix": outcome("suffix")})
    made = summary(found)
    assert [(r["dataset"], r["method"]) for r in made["records"]] == [
        ("mbpp", "greedy"),
        ("mbpp", "suffix"),
    ]
    wanted = {"tok_per_s", "speedup_vs_greedy", "cycles_per_1k", "ms_per_cycle", "mean_accepted",
              "cache_share", "loop_share", "prompts", "tokens", "exact", "precision_at_6",
              "recall_at_6", "high_payoff_share", "fraction_of_oracle"}  # fmt: skip
    assert wanted <= set(made["records"][0])
    assert made["families"][0]["family"] == "code"
    assert np.isfinite(made["overall"][0]["tok_per_s"])
