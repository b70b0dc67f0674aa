"""Every rule on the same recordings, exactly as the engine would have decoded them."""

from __future__ import annotations

import io
import math

import numpy as np
import pytest
from rich.console import Console

from decoder.contracts.features import FEATURES, NUM_FEATURES
from decoder.engines.reference.buckets import Buckets
from decoder.engines.reference.method import Method, method
from decoder.engines.reference.recording import record
from decoder.engines.reference.session import Session
from decoder.policy.first import first_policy
from decoder.policy.pricing import CostTable
from decoder.policy.rule import ARMS, CACHE
from decoder.settings import WorkerSettings
from pipelines.lab.replay import rules
from pipelines.lab.replay.calibration import calibration
from pipelines.lab.replay.engine import Simulator, hybrid
from pipelines.lab.replay.traces import Trace
from tests.decoder.simulated import trusting_policy
from tests.engines.tiny import tiny_engine, tiny_prompt
from tests.pipelines.lab.replay.samples import copying_traces, token_classes

SETTINGS = WorkerSettings()
COSTS = CostTable("test", (1, 5, 65), (10.0, 11.0, 40.0), draft_us=0.5, draft_token_us=0.7)


@pytest.fixture(scope="module")
def traces() -> list[Trace]:
    """Three recordings of a tiny engine; the last ends where the engine stops."""
    engine, made = tiny_engine(0), []
    greedy = Session(engine, method("greedy"))
    for seed in range(3):
        prompt = tiny_prompt(seed)
        output = greedy.generate(prompt, 50).tokens
        if seed == 2:
            output = greedy.generate(prompt, 50, stop_ids=frozenset({output[40]})).tokens
        found = record(engine, prompt, output)
        made.append(Trace(f"s{seed}", prompt, output, allowed=50, model_accepted=found))
    return made


LIKE_ANOTHER = {"suffix@2", "match4@2", "eagle3:1", "eagle3:3"}


def every() -> dict[str, Method]:
    return {
        **{n: by for n, by in rules.rivals(4).items() if n not in LIKE_ANOTHER},
        "arctic": method("arctic"),
        "hybrid": hybrid("hybrid", first_policy("test")),
        "trusting": hybrid("trusting", trusting_policy(hazard=0.4, chance=0.9)),
    }


@pytest.mark.parametrize("name", list(every()))
def test_a_replay_has_the_engines_own_cycles(name: str, traces: list[Trace]) -> None:
    engine, by = tiny_engine(0), every()[name]
    session = Session(engine, by)
    cycles, rows = Simulator(engine.token_classes, SETTINGS).decode(traces, by)
    for index, trace in enumerate(traces):
        stop = frozenset(trace.output[-1:] if len(trace.output) < trace.allowed else ())
        made = session.generate(list(trace.prompt), trace.allowed, stop_ids=stop)
        assert made.tokens == list(trace.output)
        mine = cycles.trace == index
        replayed = zip(*(getattr(cycles, n)[mine].tolist() for n in COLUMNS), strict=True)
        assert list(replayed) == [
            (c.position, ARMS.index(c.arm), c.verified, c.accepted) for c in made.cycles
        ]
    if name == "match4":
        matched = rows.features[:, FEATURES.index("match_len")]
        np.testing.assert_array_equal(rows.arm == CACHE, matched >= 4)


COLUMNS = ("position", "arm", "verified", "accepted")


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
    _, rows = Simulator(token_classes(), SETTINGS).decode(traces, by)
    source = rows.features[:, FEATURES.index("local")] > 0.5
    match = rows.features[:, FEATURES.index("match_len")]
    mine = source & (match > 4) & (match <= 6)
    assert mine.sum() > 3
    held, tried = (rows.accepted[mine] > 0).sum(), mine.sum()
    assert not (rows.censored[mine] & (rows.accepted[mine] == 0)).any()
    assert rule.curves(a_draft(3, 5, True))[0, 0] == pytest.approx((held + 1) / (tried + 2))


def test_the_summary_compares_with_the_best_rule_of_each_set() -> None:
    traces = copying_traces(1, 4, 60, model_accepted=[1] * 60)
    policy = first_policy("test")
    simulator = Simulator(token_classes(), SETTINGS, costs=COSTS)
    sets = {
        name: rules.ruled(part, policy, simulator)
        for name, part in {"a": traces[:2], "b": traces[2:]}.items()
    }
    found = rules.summary(sets)
    for name, by in sets.items():
        tokens, time = by.spent["greedy"]
        assert tokens.tolist() == [59, 59] and time.sum() == pytest.approx(1_180)
        rates = {
            rule: rate for rule, rate in by.over_greedy.items() if rule not in ("hybrid", "oracle")
        }
        assert rates[found["best_rule"][name]] == max(rates.values())
        ratio = by.over_greedy["hybrid"] / max(rates.values())
        assert found["hybrid_over_best"][name] == pytest.approx(ratio)
        picked = found["hybrid_over_picked"][name]
        (first, second), mine = picked["rivals"], by.spent["hybrid"]
        tokens, time = (by.spent[first][i][0] + by.spent[second][i][1] for i in (0, 1))
        rate = mine[0].sum() / mine[1].sum()
        assert picked["ratio"] == pytest.approx(rate * time / tokens)
    console = Console(record=True, width=200, file=io.StringIO())
    console.print(rules.table(found))
    shown = console.export_text()
    assert "picked" in shown and f"{found['hybrid_over_picked_mean']:.3f}" in shown
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
