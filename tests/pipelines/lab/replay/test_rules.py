"""Every rule on the same recordings, decoded as the engine would have, and compared."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from decoder.contracts.bundle import frequency_policy
from decoder.contracts.errors import TraceError
from decoder.contracts.events import DECIMALS, Origin, decode_batch, encode_batch
from decoder.contracts.features import FEATURES
from decoder.policy.first import first_policy
from decoder.policy.pricing import NOMINAL, CostTable
from decoder.policy.rule import ARMS, CACHE
from decoder.settings import WorkerSettings
from learner.training.rows import COLUMNS as ROW_COLUMNS
from learner.training.rows import Rows, from_batch, joined
from pipelines.lab.drafter.chains import record
from pipelines.lab.replay import study
from pipelines.lab.replay.study import taught
from pipelines.lab.replay.traces import Parts, Trace
from pipelines.replay import rules
from pipelines.replay.engine import (
    CycleCosts,
    Cycles,
    Simulator,
    model_acceptance,
    oracle_cycles,
)
from pipelines.replay.method import Method
from pipelines.replay.rivals import method
from pipelines.stats import Spent, against_best, interval
from tests.decoder.simulated import trusting_policy
from tests.engines.tiny import session_of, tiny_engine, tiny_prompt
from tests.events import DraftEvent, KeepingLog, events_of, from_events
from tests.pipelines.lab.replay.samples import copying_traces, dialogue, token_classes

SETTINGS = WorkerSettings()
SIMULATOR = Simulator(token_classes(), SETTINGS)
K = SETTINGS.model_draft_tokens


def run(traces: list[Trace], by: Method, accepts: float = 2.2) -> Cycles:
    return replace(SIMULATOR, model_mean=accepts).decode(traces, by)[0]


def test_a_recording_without_a_model_arm_is_refused() -> None:
    with pytest.raises(TraceError, match="--model-accepts"):
        model_acceptance(copying_traces(1, 1)[0], None)


def test_what_warms_up_is_in_the_cache_and_not_counted() -> None:
    *earlier, last = copying_traces(7)
    simulator, by = replace(SIMULATOR, model_mean=2.2), Method("frequency", frequency_policy("", 2))
    cycles, rows = simulator.decode([last], by, earlier)
    assert cycles.rate() != simulator.decode([last], by)[0].rate()
    assert set(cycles.trace) == {0} and len(set(rows.request.tolist())) == 1
    assert cycles.committed.sum() == len(last.output) - 1


def test_what_is_trained_has_seen_longer_drafts_than_those_that_are_served() -> None:
    parts = Parts(copying_traces(1, 24, 80), [], [])
    simulator, length = replace(SIMULATOR, model_mean=2.2), FEATURES.index("draft_len")
    policy = study.train_on({"one": parts}, "survival", simulator, lambda *_: None)
    assert policy.mean[length] > taught(simulator, parts.train).features[:, length].mean()


@settings(max_examples=6)
@given(seed=st.integers(0, 1000), accepts=st.sampled_from([0.0, 1.3, 2.2, 4.0]))
def test_no_rule_beats_the_oracle(seed: int, accepts: float) -> None:
    traces = [*copying_traces(seed, 3, 40, allowed=41), *dialogue(seed, 2)]
    prices = [CycleCosts(NOMINAL, SETTINGS)] * len(traces)
    best = Cycles.of(c for c, _ in oracle_cycles(traces, prices, SETTINGS, accepts))
    policies = [frequency_policy("", t) for t in (0.0, 2.0, 4.0, float("inf"))]
    for by in [method("suffix"), *(Method("frequency", each) for each in policies)]:
        made = run(traces, by, accepts)
        assert made.committed.sum() == best.committed.sum()
        assert made.rate() <= best.rate() + 1e-9


COSTS = CostTable("test", (1, 5, 65), (10.0, 11.0, 40.0), draft_us=0.5, draft_token_us=0.7)


@pytest.fixture(scope="module")
def traces() -> list[Trace]:
    """Three recordings of a tiny engine; the last ends where the engine stops."""
    engine, made = tiny_engine(0), []
    greedy = method("greedy").session(engine)
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
        "hybrid": Method("hybrid", first_policy("test")),
        "trusting": Method("trusting", trusting_policy(hazard=0.4, chance=0.9)),
    }


@pytest.mark.parametrize("name", list(every()))
def test_a_replay_has_the_engines_own_cycles(name: str, traces: list[Trace]) -> None:
    engine, by = tiny_engine(0), every()[name]
    session, _ = session_of(engine, by)
    cycles, rows = Simulator(engine.token_classes, SETTINGS).decode(traces, by)
    for index, trace in enumerate(traces):
        stop = frozenset(trace.output[-1:] if len(trace.output) < trace.allowed else ())
        made = session.generate(list(trace.prompt), trace.allowed, stop_ids=stop)
        assert made.tokens == list(trace.output)
        mine = cycles.trace == index
        replay_sets = zip(*(getattr(cycles, n)[mine].tolist() for n in COLUMNS), strict=True)
        assert list(replay_sets) == [
            (c.position, ARMS.index(c.arm), c.verified, c.accepted) for c in made.cycles
        ]
    if name == "match4":
        matched = rows.features[:, FEATURES.index("match_len")]
        np.testing.assert_array_equal(rows.arm == CACHE, matched >= 4)


COLUMNS = ("position", "arm", "verified", "accepted")


def test_the_summary_compares_with_the_best_rule_of_each_set() -> None:
    traces = copying_traces(1, 4, 60, model_accepted=[1] * 60)
    policy = first_policy("test")
    simulator = Simulator(token_classes(), SETTINGS, costs=COSTS)
    sets = {
        name: study.with_oracle(part, policy, simulator)
        for name, part in {"a": traces[:2], "b": traces[2:]}.items()
    }
    found = study.summary(sets)
    for name, by in sets.items():
        tokens, time = by["greedy"]
        assert tokens.tolist() == [59, 59] and time.sum() == pytest.approx(1_180)
        rates = study.over_greedy(by)
        mine, _ = rates.pop("hybrid"), rates.pop("oracle")
        assert rates[found["best_rule"][name]] == max(rates.values())
        assert found["hybrid_over_best"][name] == pytest.approx(mine / max(rates.values()))
    console = Console(record=True, width=200, file=io.StringIO())
    console.print(study.table(found))
    shown = console.export_text()
    assert "picked" in shown and f"{found['hybrid_over_picked_mean']:.3f}" in shown
    both = math.prod(found["hybrid_over_best"].values()) ** 0.5
    assert found["hybrid_over_best_mean"] == pytest.approx(both)


def spent(tokens: list[float], time: list[float]) -> Spent:
    return np.array(tokens), np.array(time)


def test_a_rule_that_is_best_on_one_half_stands_against_the_other() -> None:
    rules = {
        "even": spent([40, 10, 40, 10], [10, 10, 10, 10]),
        "odd": spent([20, 30, 20, 30], [10, 10, 10, 10]),
    }
    found = against_best(spent([30, 30, 30, 30], [10, 10, 10, 10]), rules)
    assert found is not None and found.rivals == ("odd", "even")
    assert found.ratio == pytest.approx(120 / (20 + 10 + 20 + 10))
    assert found.low <= found.ratio <= found.high


def test_one_prompt_no_rule_or_nothing_decoded_compares_nothing_and_an_end_at_once_little() -> None:
    mine, empty = spent([10.0], [1.0]), spent([0, 0], [0, 0])
    assert against_best(mine, {"greedy": mine}) is None and interval(mine, mine) is None
    assert against_best(spent([1, 1], [1, 1]), {}) is None
    assert against_best(empty, {"greedy": empty}) is None
    mine = spent([0, 10, 0, 10], [0, 5, 0, 5])
    found = against_best(mine, {"greedy": spent([0, 10, 0, 10], [0, 10, 0, 10])})
    assert found is not None and found.ratio == pytest.approx(2.0), "it takes no time"


OF_THE_RUN = ("request", "session", "time", "step_us")
"""Columns that hold names and the clock."""
BY = Method("hybrid", first_policy("scope"))


def in_order(events: Sequence[DraftEvent]) -> list[DraftEvent]:
    """Requests one after the other, by number of cycle."""
    began = list(dict.fromkeys(event.request for event in events))
    return sorted(events, key=lambda event: (began.index(event.request), event.cycle))


def differing(mine: Rows, other: Rows) -> list[str]:
    """Columns of which a bit differs."""
    told = [name for name in ROW_COLUMNS if name not in OF_THE_RUN]
    return [n for n in told if getattr(mine, n).tobytes() != getattr(other, n).tobytes()]


def test_a_served_run_its_replay_and_the_learners_rows_are_one() -> None:
    records: list[bytes] = []

    def send(rows: np.ndarray) -> None:
        """As an exporter does."""
        assert log.ring is not None
        batch = log.ring.batch(rows, Origin("scope", "worker", "1f"), len(records))
        records.append(encode_batch(batch))

    log = KeepingLog(send)
    engine = tiny_engine(0)
    engine.token_classes = token_classes()
    session = BY.session(engine, guarded=True, sink=log)
    session.router.controller.pauses = False  # it weighs this machine's clock
    traces = []
    # the first stops inside a model draft; the last three have outputs of others to copy from
    for seed, end in ((3, 4), (0, -1), (1, -1), (2, -1), (0, 5), (1, 5), (2, 5)):
        prompt = tiny_prompt(seed)
        output = session.generate(prompt, 60, stop_ids=frozenset({end})).tokens
        found = record(engine, prompt, output)
        traces.append(Trace(f"s{seed}", prompt, output, allowed=60, model_accepted=found))
    batches = [decode_batch(value) for value in records]
    told = in_order([event for batch in batches for event in events_of(batch)])
    assert (told[0].arm, told[0].model_accepted) == ("model", None)
    served, learned = from_batch(log.batch()), joined([from_batch(batch) for batch in batches])
    rounded = served.features.astype(np.float64).round(DECIMALS).astype(np.float32)
    assert differing(replace(served, features=rounded), learned) == []

    simulator = Simulator(engine.token_classes, engine.settings)
    cycles, replay_sets = simulator.decode(traces, BY, guarded=True)
    assert differing(from_events(in_order(log.every)), replay_sets) == []
    verified = cycles.verified > 0  # with no room for a draft there is no event
    columns = (cycles.position, cycles.arm, cycles.verified)
    rows = zip(*(column[verified].tolist() for column in columns), strict=True)
    chosen = [(e.position, ARMS.index(e.arm), e.verified_len) for e in told if e.verified_len]
    assert chosen == list(rows)
