"""The recorded service: what it decodes is what was recorded, by the objects that serve."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from decoder.contracts.bundle import Policy, frequency_policy
from decoder.contracts.events import DraftEvent
from decoder.engines.reference.method import method
from decoder.settings import WorkerSettings
from pipelines.drift.scenario import PLAIN_US, Machine
from pipelines.drift.stream import Conditions, Decoded, Worker, decode, foresee
from pipelines.drift.traffic import Request
from pipelines.replay.engine import Simulator, hybrid
from pipelines.replay.model_arm import model_acceptance
from pipelines.replay.traces import Trace
from tests.pipelines.replay.samples import copying_traces, dialogue, token_classes

SETTINGS = WorkerSettings()
COSTS = Machine().costs
ALONE = [Conditions(COSTS)]
COUNTING = frequency_policy("drift")


def with_model(traces: list[Trace], mean: float = 2.2) -> list[Trace]:
    return [replace(t, model_accepted=model_acceptance(t, mean)) for t in traces]


def requests(traces: list[Trace], segment: int = 0) -> list[Request]:
    return [Request(t, segment) for t in with_model(traces)]


def served(
    asked: list[Request],
    policy: Policy = COUNTING,
    conditions: list[Conditions] = ALONE,
    adapts: bool = False,
) -> Decoded:
    return decode(asked, conditions, policy, Worker(SETTINGS, adapts), token_classes())


def mixed() -> list[Trace]:
    return [*copying_traces(1, 8), *dialogue(2), *copying_traces(3, 2, 1)]


def test_one_request_at_a_time_decodes_as_the_simulator_does() -> None:
    traces = [replace(t, session=f"{i}/{t.session}") for i, t in enumerate(mixed()[:8])]
    traces = with_model([*traces, *dialogue(2)])
    by = hybrid("frequency", method("frequency").policy)
    cycles, _ = Simulator(token_classes(), SETTINGS, costs=COSTS).decode(traces, by)
    found = served([Request(t, 0) for t in traces])
    tally = cycles.tally(COSTS)
    np.testing.assert_array_equal(found.arms.sum(axis=0), tally.by_arm)
    assert found.us.sum() == pytest.approx(tally.time)
    assert found.tokens.sum() == tally.committed


@pytest.mark.parametrize("concurrency", [1, 3, 32])
@pytest.mark.parametrize("adapts", [False, True])
def test_every_request_is_decoded_once_and_whole(concurrency: int, adapts: bool) -> None:
    asked = requests(mixed())
    found, again = (
        served(asked, conditions=[Conditions(COSTS, concurrency)], adapts=adapts) for _ in range(2)
    )
    np.testing.assert_array_equal(found.us, again.us)
    assert found.tokens.tolist() == [len(r.trace.output) - 1 for r in asked]
    assert ((found.us > 0) == (found.tokens > 0)).all()


def test_requests_of_a_step_share_its_time() -> None:
    asked = requests(copying_traces(1, 8))
    alone, together = (served(asked, conditions=[Conditions(COSTS, n)]).us.sum() for n in (1, 8))
    assert together < alone / 3


def test_as_many_run_at_a_time_as_the_segment_says() -> None:
    traces = [replace(t, session=f"{i}/{t.session}") for i, t in enumerate(mixed() * 6)]
    asked = [Request(t, i // 20) for i, t in enumerate(with_model(traces[:60]))]
    conditions = [Conditions(COSTS), Conditions(COSTS, 5), Conditions(COSTS)]
    begun = events_of(asked, conditions)
    sizes: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for index, events in begun:
        if index != 19:  # others join the last one of a segment
            sizes[asked[index].segment] += [event.batch_size for event in events]
    assert set(sizes[0]) == set(sizes[2]) == {1}
    assert max(sizes[1]) == 5
    assert np.mean(sizes[1]) > 4


def test_the_time_of_a_step_is_the_segments_own() -> None:
    slow = Machine(plain=3.0, token=0.0, draft=0.0, draft_token=0.0).costs
    never = frequency_policy("drift", float("inf"))
    asked = [Request(r.trace, i % 2) for i, r in enumerate(requests(copying_traces(1, 4)))]
    nothing = [
        replace(r, trace=replace(r.trace, model_accepted=[0] * len(r.trace.output))) for r in asked
    ]
    flat = Machine(token=0.0, draft=0.0, draft_token=0.0).costs
    found = served(nothing, never, [Conditions(flat), Conditions(slow)])
    per_token = found.us / found.tokens
    np.testing.assert_allclose(per_token, [PLAIN_US, 3 * PLAIN_US] * 2)


def events_of(
    asked: list[Request], conditions: list[Conditions]
) -> list[tuple[int, list[DraftEvent]]]:
    found: list[tuple[int, list[DraftEvent]]] = []

    def told(index: int, events: list[DraftEvent]) -> None:
        found.append((index, events))

    decode(asked, conditions, COUNTING, Worker(SETTINGS), token_classes(), told)
    return found


def test_events_carry_the_recorded_clock_and_no_other() -> None:
    told = events_of(requests(copying_traces(1, 6)), ALONE)
    events = [e for _, each in told for e in each]
    assert len(events) > 30
    for event in events:
        plain = event.arm == "none"
        least = COSTS.time(event.step_tokens)
        assert event.step_us == pytest.approx(least) if plain else event.step_us >= least
    assert max(e.time for e in events) < 1e-6 * PLAIN_US * 4 * len(events)


def test_a_live_table_follows_a_machine_that_slows_down() -> None:
    traces = copying_traces(1, 30)
    asked = [Request(r.trace, int(i >= 10)) for i, r in enumerate(requests(traces))]
    slow = Machine(token=0.4).costs
    found = decode(
        asked, [Conditions(COSTS), Conditions(slow)], _even_policy(), Worker(SETTINGS),
        token_classes(),
    )  # fmt: skip
    blind = decode(
        asked, [Conditions(COSTS), Conditions(slow)], _even_policy(), Worker(SETTINGS, False),
        token_classes(),
    )  # fmt: skip
    assert found.us[15:].sum() < 0.95 * blind.us[15:].sum()


def _even_policy() -> Policy:
    """A survival policy that gives each token of any draft the same chance."""
    from decoder.contracts.bundle import OUTPUTS
    from decoder.contracts.features import NUM_FEATURES

    width = OUTPUTS["survival"]
    layer = np.zeros((NUM_FEATURES, width), np.float32), np.full(width, -2.0, np.float32)
    policy = Policy("drift", 1, 0.0, "survival", layers=(layer,), model_payoff=2.2)
    return policy.with_probes(np.zeros((1, NUM_FEATURES), np.float32))


def test_a_policy_told_is_in_force_from_the_next_request_on() -> None:
    asked = requests(copying_traces(1, 6))
    never = frequency_policy("drift", float("inf"))

    def told(index: int, events: list[DraftEvent]) -> Policy | None:
        return never if index == 2 else None

    found = decode(asked, ALONE, COUNTING, Worker(SETTINGS, False), token_classes(), told)
    by_cache = found.arms[:, 2]
    assert (by_cache[1:3] > 0).all()
    assert (by_cache[3:] == 0).all()


@pytest.mark.parametrize("concurrency", [1, 4])
def test_nothing_is_faster_than_the_oracle(concurrency: int) -> None:
    asked = requests(copying_traces(7, 12, 80))
    conditions = [Conditions(COSTS, concurrency)]
    best = foresee(asked, conditions, SETTINGS)
    for threshold in (0.0, 2.0, float("inf")):
        found = served(asked, frequency_policy("drift", threshold), conditions)
        assert found.us.sum() >= 0.99 * best.us.sum()
