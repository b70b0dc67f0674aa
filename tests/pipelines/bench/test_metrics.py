"""The figures of a benchmark, against cases worked out by hand."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from pipelines.bench import render
from pipelines.bench.metrics import differing, measure, payoff, summary
from pipelines.bench.results import Cycle, Key, Labelled, Outcome, PromptFacts, Results
from pipelines.bench.stats import LOOP, loops, rate, ratio_interval

PLAIN = Cycle("none", 0, 0, 0, 0.0, 1e4)


def outcome(
    method: str = "greedy",
    tokens: int = 11,
    micros: float = 1e6,
    cycles: tuple[Cycle, ...] = (),
    prompt: str = "p0",
) -> Outcome:
    """An output of ``tokens`` distinct tokens in ``micros``."""
    key = Key("mbpp", "chat", prompt)
    return Outcome(key, method, tuple(range(tokens)), cycles, "length", 5e4, micros)


def cycle(arm: str, verified: int, accepted: int) -> Cycle:
    return Cycle(arm, verified, verified, accepted, 1000.0, 9000.0)


def results_of(methods: list[str], *prompts: dict[str, Outcome]) -> Results:
    found = Results({"methods": methods, "templates": ["chat"]})
    for by_method in prompts:
        for made in by_method.values():
            found.add(made)
            found.prompts[made.key] = PromptFacts(made.key, "code", "", 7, 0)
    return found


def test_throughput_is_decoded_tokens_over_decoding_time() -> None:
    """The first token comes with the prefill: ten tokens in one second, then ten in three."""
    assert rate([outcome().spent, outcome(micros=3e6).spent]) == pytest.approx(20 / 4)
    assert rate([outcome(tokens=1, micros=0.0).spent]) is None


def test_a_record_by_hand() -> None:
    """Ten tokens in four cycles: a cache draft of 3 with 3 accepted, one of 5 with 1, a chain of 4
    with 2, and one cycle of nothing. Greedy needs ten cycles and twice the time."""
    cycles = (cycle("cache", 3, 3), cycle("cache", 5, 1), cycle("model", 4, 2), cycle("none", 0, 0))
    by_method = {
        "greedy": outcome(cycles=(cycle("none", 0, 0),) * 10, micros=2e6),
        "hybrid": outcome("hybrid", cycles=cycles),
        "oracle": outcome("oracle", cycles=cycles, micros=0.8e6),
    }
    found, greedy = measure([by_method], "hybrid"), measure([by_method], "greedy")
    expected = {
        "prompts": 1, "tokens": 11, "exact": True, "tok_per_s": 10.0, "speedup_vs_greedy": 2.0,
        "fraction_of_oracle": 0.8, "cycles_per_1k": 400.0, "ms_per_cycle": 250.0,
        "ms_per_cycle_drafting": 1.0, "mean_accepted": 6 / 4, "mean_accepted_cache": 2.0,
        "mean_accepted_model": 2.0, "cache_share": 0.5, "model_share": 0.25, "loop_share": 0.0,
        "prefill_ms_median": 50.0,
    }  # fmt: skip
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    assert found["looping"] is None and found["not_looping"] is not None
    assert (greedy["cycles_per_1k"], greedy["mean_accepted"]) == (1000.0, 0.0)


def test_neither_a_stalled_cycle_nor_a_busy_minute_of_one_method_moves_the_typical_rate() -> None:
    """Ten tokens: three model cycles of 10 ms, one of them stalled for a second, and a cache cycle
    of 10 ms make 40 ms. Then greedy's plain cycles take twice as long as those of another."""
    stalled = Cycle("model", 0, 4, 2, 1000.0, 1e6)
    cycles = (cycle("model", 4, 2), stalled, cycle("model", 4, 2), cycle("cache", 9, 4))
    by_method = {
        "greedy": outcome(cycles=(cycle("none", 0, 0),) * 10),
        "hybrid": outcome("hybrid", cycles=cycles),
    }
    found = measure([by_method], "hybrid")
    assert found["tok_per_s_typical"] == pytest.approx(10 / 0.04)
    assert found["speedup_vs_greedy_typical"] == pytest.approx(2.5)
    plain, slow = (cycle("none", 0, 0),) * 3, (Cycle("none", 0, 0, 0, 0.0, 2e4),) * 3
    busy = {"greedy": outcome(cycles=slow), "suffix": outcome("suffix", cycles=plain)}
    assert measure([busy], "suffix")["speedup_vs_greedy_typical"] == pytest.approx(1.0)


def test_figures_that_cannot_be_had_are_none() -> None:
    found = measure([{"suffix": outcome("suffix", tokens=1, micros=0.0)}], "suffix")
    for name in ("tok_per_s", "speedup_vs_greedy", "fraction_of_oracle", "cycles_per_1k",
                 "tok_per_s_typical", "mean_accepted", "exact", "precision_at_6"):  # fmt: skip
        assert found[name] is None, name


def test_medians_and_quartiles_are_over_prompts() -> None:
    prompts = [
        {"greedy": outcome(micros=2e6), "suffix": outcome("suffix", micros=1e6 / (i + 1))}
        for i in range(5)
    ]
    found = measure(prompts, "suffix")
    assert found["tok_per_s_quartiles"] == pytest.approx((20.0, 30.0, 40.0))
    assert found["speedup_vs_greedy_quartiles"] == pytest.approx((4.0, 6.0, 8.0))
    low, high = found["speedup_vs_greedy_interval"]
    assert 2.0 < low < found["speedup_vs_greedy"] < high < 10.0


def test_pairs_that_agree_leave_no_interval_around_the_ratio() -> None:
    """Resampling keeps pairs: prompts differ tenfold in speed, their ratio does not."""
    mine, theirs = ([(10, each * f) for f in (1e6, 5e6, 1e7)] for each in (1, 3))
    assert ratio_interval(mine, theirs) == pytest.approx((3.0, 3.0))
    assert ratio_interval(mine[:1], theirs[:1]) is None


def test_the_best_rule_is_picked_on_the_other_half_of_the_prompts() -> None:
    """``suffix`` is ahead on the first prompt, ``eagle3`` on the second: each is met on the other,
    where it is slow."""
    fast = {"suffix": (0,), "eagle3": (1,), "hybrid": (0, 1), "greedy": ()}
    prompts = [
        {m: outcome(m, cycles=(PLAIN if i in at else cycle("model", 4, 0),) * (1 if i in at else 4),
                    prompt=f"p{i}") for m, at in fast.items()}
        for i in range(2)
    ]  # fmt: skip
    (found,) = [r for r in summary(results_of([*fast], *prompts))["records"]
                if r["method"] == "hybrid"]  # fmt: skip
    assert found["best_rules"] == ("eagle3", "suffix")
    assert found["over_best_rule"] == pytest.approx(4.0)


def test_precision_and_recall_at_six_by_hand() -> None:
    """Predicted 6 or more: four, of which three are. Really 6 or more: five, of which three were
    predicted. A label cut short at 7 is high; one cut short at 5 says nothing."""
    known = [(6.0, 6), (9.5, 20), (8.0, 1), (1.0, 6), (5.9, 8), (0.1, 0), (0.2, 5)]
    drafts = [Labelled(foreseen, came, False) for foreseen, came in known]
    found = payoff([*drafts, Labelled(7.0, 7, True), Labelled(9.0, 5, True)])
    assert found == {
        "drafts": 8, "high_payoff_share": 5 / 8, "selected_share": 4 / 8, "precision_at_6": 3 / 4,
        "recall_at_6": 3 / 5,
    }  # fmt: skip
    assert payoff([])["precision_at_6"] is None


def test_both_arms_are_calibrated_over_what_is_known_of_them() -> None:
    told = (Labelled(1.0, 1, False), Labelled(3.0, 5, False), Labelled(2.0, 9, True))
    seen = replace(outcome("hybrid"), drafts=told, model_drafts=told[:1])
    first, second = ({"n": 1, "foreseen": x, "came": y} for x, y in ((1.0, 1.0), (3.0, 5.0)))
    found = measure([{"hybrid": seen}], "hybrid")["calibration"]
    assert found == {"cache": [first, second], "model": [first]}


def test_an_output_loops_when_a_run_of_32_comes_twice() -> None:
    run = list(range(LOOP))
    for straight in (run, [*run, *run[:-1]], [5] * LOOP, []):
        assert not loops(straight)
    for looping in ([*run, *run], [*run, 99, *run], [5] * (LOOP + 1)):
        assert loops(looping)


def test_loops_are_measured_apart() -> None:
    by_method = {"greedy": outcome(micros=4e6), "suffix": outcome("suffix", micros=1e6)}
    looping = {m: replace(o, tokens=(7,) * 41) for m, o in by_method.items()}
    straight = {"greedy": outcome(), "suffix": outcome("suffix")}
    found = measure([straight, looping], "suffix")
    assert found["loop_share"] == 0.5
    assert found["looping"]["speedup_vs_greedy"] == pytest.approx(4.0)
    assert found["not_looping"]["speedup_vs_greedy"] == pytest.approx(1.0)
    assert found["speedup_vs_greedy"] == pytest.approx(5.0 / 2.0)


def test_an_output_that_is_not_greedys_is_named_with_its_place() -> None:
    right, wrong = (
        {"greedy": outcome(prompt=name), "suffix": outcome("suffix", prompt=name, tokens=tokens)}
        for name, tokens in (("good", 11), ("bad", 4))
    )
    late = {"greedy": outcome(prompt="late")}  # not every method decoded it: it counts nowhere
    found = results_of(["greedy", "suffix"], right, wrong, late)
    assert differing(found) == [
        "suffix differs from greedy on prompt bad of mbpp, from output token 4 on."
    ]
    made = summary(found)
    assert made["prompts"] == 2
    assert [(r["dataset"], r["method"], r["prompts"], r["exact"]) for r in made["records"]] == [
        ("mbpp", "greedy", 2, True), ("mbpp", "suffix", 2, False),
    ]  # fmt: skip
    assert [r["family"] for r in made["families"]] == ["code", "code"]


def test_the_terminal_shows_all_methods_within_eighty_columns() -> None:
    methods = ["greedy", "eagle3-tree", "frequency", "hybrid"]
    found = results_of(methods, {m: outcome(m, cycles=(PLAIN,) * 10) for m in methods})
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(render.table("", render.COLUMNS, summary(found)["overall"]))
    text = console.export_text()
    assert all(method in text for method in methods) and "…" not in text
