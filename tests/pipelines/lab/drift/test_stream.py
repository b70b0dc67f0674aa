"""The recorded service: what it decodes is what was recorded, by the objects that serve."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from decoder.contracts.bundle import Policy, frequency_policy
from decoder.engines.reference.method import method
from decoder.settings import WorkerSettings
from learner.rows import Rows, joined
from pipelines.lab.drift.scenario import PLAIN_US, Machine
from pipelines.lab.drift.stream import Run, Worker, decode, foresee
from pipelines.lab.drift.traffic import Request
from pipelines.lab.replay.engine import Simulator, hybrid
from pipelines.lab.replay.model_arm import model_acceptance
from pipelines.lab.replay.traces import Trace
from tests.decoder.simulated import trusting_policy
from tests.pipelines.lab.replay.samples import copying_traces, dialogue, token_classes

SETTINGS = WorkerSettings()
COSTS = Machine().costs
COUNTING = frequency_policy("drift")


def with_model(traces: list[Trace], mean: float = 2.2) -> list[Trace]:
    return [replace(t, model_accepted=model_acceptance(t, mean)) for t in traces]


def requests(traces: list[Trace], segment: int = 0) -> list[Request]:
    return [Request(t, segment) for t in with_model(traces)]


def served(asked: list[Request], policy: Policy = COUNTING, adapts: bool = False) -> Run:
    return decode(asked, [COSTS], policy, Worker(SETTINGS, adapts), token_classes())


def mixed() -> list[Trace]:
    return [*copying_traces(1, 8), *dialogue(2), *copying_traces(3, 2, 1)]


def test_one_request_at_a_time_decodes_as_the_simulator_does() -> None:
    traces = [replace(t, session=f"{i}/{t.session}") for i, t in enumerate(mixed()[:8])]
    traces = with_model([*traces, *dialogue(2)])
    by = hybrid("frequency", method("frequency").policy)
    cycles, _ = Simulator(token_classes(), SETTINGS, costs=COSTS).decode(traces, by)
    found = served([Request(t, 0) for t in traces])
    tally = cycles.tally(COSTS)
    np.testing.assert_array_equal(found.cycles, tally.by_arm)
    assert found.us.sum() == pytest.approx(tally.time)
    assert found.tokens.sum() == tally.committed


def test_every_request_is_decoded_once_and_whole() -> None:
    asked = requests(mixed())
    found, again = (served(asked, adapts=True) for _ in range(2))
    np.testing.assert_array_equal(found.us, again.us)
    assert found.tokens.tolist() == [len(r.trace.output) - 1 for r in asked]
    assert ((found.us > 0) == (found.tokens > 0)).all()


def test_the_time_of_a_step_is_the_segments_own() -> None:
    slow = Machine(plain=3.0, token=0.0, draft=0.0, draft_token=0.0).costs
    never = frequency_policy("drift", float("inf"))
    asked = [Request(r.trace, i % 2) for i, r in enumerate(requests(copying_traces(1, 4)))]
    nothing = [
        replace(r, trace=replace(r.trace, model_accepted=[0] * len(r.trace.output))) for r in asked
    ]
    flat = Machine(token=0.0, draft=0.0, draft_token=0.0).costs
    found = decode(nothing, [flat, slow], never, Worker(SETTINGS, False), token_classes())
    per_token = found.us / found.tokens
    np.testing.assert_allclose(per_token, [PLAIN_US, 3 * PLAIN_US] * 2)


def test_drafts_carry_the_recorded_clock_and_no_other() -> None:
    found: list[Rows] = []
    decode(requests(copying_traces(1, 6)), [COSTS], COUNTING, Worker(SETTINGS), token_classes(),
           lambda _, rows: found.append(rows))  # fmt: skip
    rows = joined(found)
    assert len(rows) > 30 and 0 < rows.time.max() < 1e-6 * PLAIN_US * 4 * len(rows)


def test_a_live_table_follows_a_machine_that_slows_down() -> None:
    traces = copying_traces(1, 30)
    asked = [Request(r.trace, int(i >= 10)) for i, r in enumerate(requests(traces))]
    slow = Machine(token=0.4).costs
    even = trusting_policy(hazard=0.12, chance=0.78)
    found, blind = (
        decode(asked, [COSTS, slow], even, Worker(SETTINGS, adapts), token_classes())
        for adapts in (True, False)
    )
    assert found.us[15:].sum() < 0.95 * blind.us[15:].sum()


def test_a_policy_told_is_in_force_from_the_next_request_on() -> None:
    asked = requests(copying_traces(1, 6))
    never = frequency_policy("drift", float("inf"))

    def told(index: int, rows: Rows) -> Policy | None:
        return never if index == 2 else None

    found = decode(asked, [COSTS], COUNTING, Worker(SETTINGS, False), token_classes(), told)
    whole, half = (served(asked[:n]).cycles[2] for n in (6, 3))
    assert 0 < half == found.cycles[2] < whole


def test_nothing_is_faster_than_the_oracle() -> None:
    asked = requests(copying_traces(7, 12, 80))
    best = foresee(asked, [COSTS], SETTINGS)
    for threshold in (0.0, 2.0, float("inf")):
        found = served(asked, frequency_policy("drift", threshold))
        assert found.us.sum() >= 0.99 * best.us.sum()
