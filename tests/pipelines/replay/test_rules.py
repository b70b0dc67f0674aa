"""Every rule on the same recordings, exactly as the engine would have decoded them."""

from __future__ import annotations

import io
import math
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from decoder.contracts.errors import TraceError
from decoder.contracts.features import FEATURES, NUM_FEATURES
from decoder.engines.reference.buckets import HALVES, Buckets
from decoder.engines.reference.method import Method, method
from decoder.engines.reference.recording import accepted, record_chains
from decoder.engines.reference.session import Session
from decoder.policy.first import first_policy
from decoder.policy.pricing import NOMINAL, CostTable
from decoder.policy.rule import ARMS, CACHE
from decoder.settings import WorkerSettings
from pipelines.replay import rules
from pipelines.replay.command import rule_tables
from pipelines.replay.engine import hybrid, simulate
from pipelines.replay.model_arm import drawn_drafter
from pipelines.replay.traces import Trace
from pipelines.watch.calibration import calibration
from tests.decoder.simulated import trusting_policy
from tests.engines.tiny import tiny_engine, tiny_prompt
from tests.pipelines.replay.samples import copying_traces, token_classes

SETTINGS = WorkerSettings()
COSTS = CostTable("test", (1, 5, 65), (10.0, 11.0, 40.0), draft_us=0.5, draft_token_us=0.7)


def recorded(count: int = 4, length: int = 60) -> list[Trace]:
    engine = tiny_engine(0)
    greedy, traces = Session(engine, method("greedy")), []
    for seed in range(count):
        prompt = tiny_prompt(seed)
        output = greedy.generate(prompt, length).tokens
        drafts = record_chains(engine, prompt, output)
        found = accepted(drafts, output)
        traces.append(
            Trace(
                f"s{seed}",
                prompt,
                output,
                allowed=length,
                model_accepted=found,
                model_drafts=drafts,
            )
        )
    return traces


def every() -> dict[str, Method]:
    one = hybrid("hybrid", first_policy("test"))
    trusting = hybrid("trusting", trusting_policy(hazard=0.4, chance=0.9))
    grafting = {by.name: replace(by, graft=True) for by in (one, trusting)}
    return {**rules.rivals(4), "hybrid": one} | {f"{n}+graft": by for n, by in grafting.items()}


def test_a_recording_without_model_drafts_is_not_grafted_on() -> None:
    traces = copying_traces(1, model_accepted=[1] * 60)
    with pytest.raises(TraceError, match="without the tokens"):
        simulate(traces, [], every()["hybrid+graft"], token_classes(), SETTINGS)


def test_tails_of_a_drawn_drafter_are_behind_the_true_text() -> None:
    lots = np.random.default_rng(0)
    traces = [drawn_drafter(trace, 2.0, 4, lots) for trace in copying_traces(3)]
    by = every()["trusting+graft"]
    found = rules.ruled(traces, by, token_classes(), SETTINGS, NOMINAL)
    made, verified, accepted = found.tails
    assert 0 < made < verified and accepted > 5
    without = rules.ruled(traces, replace(by, graft=False), token_classes(), SETTINGS, NOMINAL)
    assert without.tails == (0, 0, 0) and without.tokens.tolist() == found.tokens.tolist()
    assert (found.account.trace >= 0).all() and len(found.account.arm) <= len(without.account.arm)


@pytest.mark.parametrize("name", list(every()))
def test_a_replay_has_the_engines_own_cycles(name: str) -> None:
    traces, engine, by = recorded(), tiny_engine(0), every()[name]
    session = Session(engine, by)
    cycles, _ = simulate(traces, [], by, engine.token_classes, SETTINGS)
    for index, trace in enumerate(traces):
        made = session.generate(list(trace.prompt), trace.allowed)
        assert made.tokens == list(trace.output)
        mine = cycles.trace == index
        replayed = zip(*(getattr(cycles, n)[mine].tolist() for n in COLUMNS), strict=True)
        assert list(replayed) == [
            (c.position, ARMS.index(c.arm), c.verified, c.accepted) for c in made.cycles
        ]


COLUMNS = ("position", "arm", "verified", "accepted")


def test_a_chain_that_is_longer_than_asked_for_begins_as_the_shorter_one() -> None:
    engine, prompt = tiny_engine(1), tiny_prompt(1)
    output = Session(engine, method("greedy")).generate(prompt, 40).tokens
    shorter = record_chains(tiny_engine(1, model_draft_tokens=2), prompt, output)
    assert [c[:2] for c in record_chains(engine, prompt, output)] == shorter


def test_match4_takes_the_cache_where_four_tokens_matched() -> None:
    traces = copying_traces(1, model_accepted=[1] * 60)
    _, states = simulate(traces, [], method("match4"), token_classes(), SETTINGS)
    matched = states.rows.features[:, FEATURES.index("match_len")]
    assert 0.0 < (matched >= 4).mean() < 1.0
    np.testing.assert_array_equal(states.rows.arm == CACHE, matched >= 4)


def a_draft(length: int, match: int, local: bool) -> np.ndarray:
    features = np.zeros((1, NUM_FEATURES), np.float32)
    for name, value in (("draft_len", length), ("match_len", match), ("local", local)):
        features[0, FEATURES.index(name)] = value
    return features


def test_buckets_count_by_source_match_and_position() -> None:
    traces = copying_traces(2, model_accepted=[1] * 60)
    rule = Buckets()
    untaught = rule.curves(a_draft(3, 5, True))[0]
    np.testing.assert_allclose(untaught[:4], [0.5, 0.25, 0.125, 0.0])
    by = Method("buckets", method("buckets").policy, "chain", rule=lambda: rule)
    _, states = simulate(traces, [], by, token_classes(), SETTINGS)
    rows = states.rows
    source = rows.features[:, FEATURES.index("local")] > 0.5
    match = rows.features[:, FEATURES.index("match_len")]
    mine = source & (match > 4) & (match <= 6)
    assert mine.sum() > 3
    held, tried = (rows.accepted[mine] > 0).sum(), mine.sum()
    assert not (rows.censored[mine] & (rows.accepted[mine] == 0)).any()
    assert rule.curves(a_draft(3, 5, True))[0, 0] == pytest.approx((held + 1) / (tried + 2))


def test_buckets_forget_by_halves() -> None:
    rule = Buckets()
    rule._observed[1, 4, 0] = 8.0
    for _ in range(HALVES):
        rule(
            first_policy("test"), a_draft(3, 5, True)[:0], np.zeros(0, np.int64), 1, 1,
            NOMINAL, 2.0, 0, odds=np.zeros(4),
        )  # fmt: skip
    assert rule.curves(a_draft(3, 5, True))[0, 0] == pytest.approx(1 / 6)


def test_the_summary_compares_with_the_best_rule_of_each_set() -> None:
    engine = tiny_engine(0)
    traces = recorded()
    policy = first_policy("test")
    sets = {
        name: rules.all_ruled(part, policy, engine.token_classes, SETTINGS, COSTS)
        for name, part in {"a": traces[:2], "b": traces[2:]}.items()
    }
    found = rules.summary(sets)
    for name, by in sets.items():
        assert by["greedy"].rate == pytest.approx(0.1)
        assert by["greedy"].tokens.tolist() == [59, 59]
        rates = {rule: r.rate for rule, r in by.items() if "hybrid" not in rule}
        assert rates[found["best_rule"][name]] == max(rates.values())
        ratio = by["hybrid"].rate / max(rates.values())
        assert found["hybrid_over_best"][name] == pytest.approx(ratio)
        picked = found["hybrid_over_picked"][name]
        of_first, of_second = picked["rivals"]
        tokens = by[of_first].tokens[0] + by[of_second].tokens[1]
        time = by[of_first].time[0] + by[of_second].time[1]
        assert picked["ratio"] == pytest.approx(by["hybrid"].rate * time / tokens)
        added = by["hybrid+graft"].rate / by["hybrid"].rate
        assert found["graft_over_hybrid"][name] == pytest.approx(added)
        assert found["tails"][name]["made"] == by["hybrid+graft"].tails[0]
    console = Console(record=True, width=200, file=io.StringIO())
    console.print(*rule_tables(found))
    shown = console.export_text()
    assert "graft" in shown and f"{found['graft_over_hybrid_mean']:.3f}" in shown
    both = math.prod(found["hybrid_over_best"].values()) ** 0.5
    assert found["hybrid_over_best_mean"] == pytest.approx(both)
    for arm in ("cache", "model"):
        assert sum(part["n"] for part in found["calibration"][arm]) > 10


def test_calibration_is_of_what_came_in_each_part() -> None:
    foreseen = np.array([3.0, 1.0, 2.0, 4.0])
    assert calibration(foreseen, foreseen * 2, 2) == [
        {"n": 2, "foreseen": 1.5, "came": 3.0},
        {"n": 2, "foreseen": 3.5, "came": 7.0},
    ]
