"""Simulated decoding: exact under greedy decoding, and the same as the engine it stands for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decoder.contracts.bundle import frequency_policy
from decoder.contracts.errors import TraceError
from decoder.engines.reference.method import Method, method
from decoder.policy.pricing import NOMINAL, CostTable
from decoder.policy.rule import CACHE, MODEL, NONE
from decoder.settings import WorkerSettings
from pipelines.lab.replay.cycles import NOTHING, Cycles
from pipelines.lab.replay.engine import Simulator, hybrid
from pipelines.lab.replay.hindsight import Prices, foreseen
from pipelines.lab.replay.model_arm import constant_acceptance, model_acceptance
from pipelines.lab.replay.traces import Trace
from tests.conftest import random_policy
from tests.pipelines.lab.replay.samples import copying_traces, dialogue, token_classes

SETTINGS = WorkerSettings()
SIMULATOR = Simulator(token_classes(), SETTINGS)
K = SETTINGS.model_draft_tokens


def run(traces: list[Trace], by: Method, accepts: float = 2.2) -> Cycles:
    return replace(SIMULATOR, model_mean=accepts).decode(traces, by)[0]


def methods() -> list[Method]:
    named = [method(n) for n in ("greedy", "eagle3", "suffix", "frequency", "arctic")]
    return [*named, hybrid("hybrid", random_policy())]


ARMS = {"greedy": {NONE}, "eagle3": {MODEL}, "suffix": {NONE, CACHE}, "frequency": {MODEL, CACHE}}


@pytest.mark.parametrize("by", methods(), ids=lambda m: m.name)
def test_cycles_write_the_recorded_output_whatever_is_chosen(by: Method) -> None:
    traces = [*copying_traces(1), *dialogue(2)]
    cycles = run(traces, by)
    for index, trace in enumerate(traces):
        mine = cycles.trace == index
        following = cycles.position[mine] + cycles.committed[mine]
        assert cycles.position[mine][0] == 1
        assert following[-1] == len(trace.output)
        np.testing.assert_array_equal(following[:-1], cycles.position[mine][1:])
    assert set(cycles.arm.tolist()) <= ARMS.get(by.name, {NONE, MODEL, CACHE})
    assert (cycles.accepted <= cycles.verified).all()
    assert (cycles.accepted <= cycles.committed).all()
    assert (cycles.committed <= cycles.accepted + 1).all()


def test_a_model_draft_accepts_what_was_recorded_and_none_reaches_behind_the_limit() -> None:
    (trace,) = copying_traces(3, 1, 40)
    recorded = [i % (K + 1) for i in range(40)]
    trace = Trace("s", trace.prompt, trace.output, model_accepted=recorded)
    cycles = run([trace], method("eagle3"))
    assert len(cycles.position) > 8
    for position, accepted in zip(cycles.position, cycles.accepted, strict=True):
        assert accepted == min(recorded[position], 40 - position)
    cycles = run([Trace("s", trace.prompt, trace.output, allowed=40)], method("frequency"))
    assert (cycles.position + cycles.verified + 1 <= 40).all()


@given(st.floats(0.0, 4.0))
def test_a_constant_acceptance_has_its_mean_on_every_stretch(mean: float) -> None:
    accepted = constant_acceptance(mean, 400)
    assert set(accepted) <= {int(mean), int(mean) + 1}
    for begin in range(0, 390, 7):
        stretch = accepted[begin : begin + 10]
        assert abs(stretch.sum() - 10 * mean) < 1.001


def test_a_recording_without_a_model_arm_an_oracle_and_a_tree_are_refused() -> None:
    with pytest.raises(TraceError, match="--model-accepts"):
        model_acceptance(copying_traces(1, 1)[0], None)
    for name in ("oracle", "eagle3-tree"):
        with pytest.raises(TraceError, match=name):
            run(copying_traces(1), method(name))


def test_time_is_what_the_cost_table_says() -> None:
    arm = np.array([NONE, MODEL, CACHE], np.int32)
    ints = [np.array(v, np.int32) for v in ([0, 0, 0], [1, 2, 7], [0, 4, 10], [0, 4, 6], [1, 5, 7])]
    trace, position, verified, accepted, committed = ints
    cycles = Cycles(trace, position, arm, verified, accepted, committed)
    nominal = cycles.tally()
    assert nominal.time == pytest.approx(1.0 + (1.0 + 4 * 0.006) + (1.0 + 10 * 0.006))
    assert nominal.rate == pytest.approx(13 / nominal.time)
    assert (nominal.by_arm, nominal.accepted) == ((1, 1, 1), (0, 4, 6))
    steep = CostTable("test", (1, 11), (2.0, 12.0), draft_us=3.0, draft_token_us=0.5)
    assert cycles.tally(steep).time == pytest.approx(2.0 + (6.0 + 3.0 + 4 * 0.5) + 12.0)
    np.testing.assert_allclose(cycles.times(steep), [2.0, 6.0 + 3.0 + 4 * 0.5, 12.0])
    assert (nominal + NOTHING) == nominal


def test_what_warms_up_is_in_the_cache_and_not_counted() -> None:
    *earlier, last = copying_traces(7)
    simulator, by = replace(SIMULATOR, model_mean=2.2), hybrid("frequency", frequency_policy("", 2))
    cycles, rows = simulator.decode([last], by, earlier)
    assert cycles.tally() != simulator.decode([last], by)[0].tally()
    assert set(cycles.trace) == {0} and len(set(rows.request.tolist())) == 1
    assert cycles.committed.sum() == len(last.output) - 1


@settings(max_examples=6)
@given(seed=st.integers(0, 1000), accepts=st.sampled_from([0.0, 1.3, 2.2, 4.0]))
def test_no_rule_beats_the_oracle(seed: int, accepts: float) -> None:
    traces = [*copying_traces(seed, 3, 40, allowed=41), *dialogue(seed, 2)]
    prices = [Prices(NOMINAL, SETTINGS)] * len(traces)
    best = Cycles.of(c for c, _ in foreseen(traces, prices, SETTINGS, accepts)).tally()
    policies = [frequency_policy("", t) for t in (0.0, 2.0, 4.0, float("inf"))]
    for by in [method("suffix"), *(hybrid("frequency", each) for each in policies)]:
        tally = run(traces, by, accepts).tally()
        assert tally.committed == best.committed and tally.time >= best.time - 1e-9


def test_the_oracle_takes_in_each_cycle_what_commits_most_for_its_time() -> None:
    (trace,) = copying_traces(7, 1)
    model = [i % 5 for i in range(60)]
    prices = Prices(NOMINAL, SETTINGS)
    for cycle, time in foreseen([replace(trace, model_accepted=model)], [prices], SETTINGS):
        assert time == pytest.approx(NOMINAL.dense[1 + cycle.verified])
        least = 1 + min(model[cycle.position], K)
        if cycle.position + cycle.committed < 60:  # behind the end it does not see
            assert cycle.verified == cycle.accepted
            assert cycle.committed / time >= least / NOMINAL.dense[least] - 1e-9
