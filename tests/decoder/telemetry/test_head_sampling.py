"""Above its rate a worker tells of whole requests, and with which chance."""

from __future__ import annotations

from decoder.telemetry import head_sampling
from decoder.telemetry.head_sampling import ADJUST_S, HeadSampler
from tests.contracts.test_events import NAMES, PLAIN
from tests.events import DraftEvent

CYCLES = 20


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def request(name: object) -> list[DraftEvent]:
    opaque = NAMES.of("request", str(name))
    return [PLAIN._replace(request=opaque, cycle=cycle) for cycle in range(CYCLES)]


def keep(shed: HeadSampler, events: list[DraftEvent]) -> list[DraftEvent]:
    """What is told of ``events``, with the chance that each had."""
    shares = shed.shares([event.request.encode() for event in events])
    return [e._replace(share=share) for e, share in zip(events, shares, strict=True) if share]


def run(shed: HeadSampler, clock: Clock, requests: int, looks: int) -> list[list[DraftEvent]]:
    """Of each look the events kept, of so many new requests told of cycle by cycle."""
    kept = []
    for look in range(looks):
        came = [request(f"{look}.{number}") for number in range(requests)]
        clock.now += ADJUST_S
        kept.append(keep(shed, [event for cycle in zip(*came, strict=True) for event in cycle]))
    return kept


def test_whole_requests_are_kept_and_their_shares_make_up_for_the_others() -> None:
    clock = Clock()
    shed = HeadSampler(100.0, clock)
    kept = run(shed, clock, requests=400, looks=12)  # 1600 events a second
    assert shed.halvings >= 4
    for events in kept:
        cycles: dict[str, list[int]] = {}
        for event in events:
            cycles.setdefault(event.request, []).append(event.cycle)
        assert all(told == list(range(CYCLES)) for told in cycles.values())
    assert len(kept[-1]) / ADJUST_S < 200.0
    weighed = sum(1.0 / event.share for events in kept for event in events)
    assert 0.8 < weighed / (12 * 400 * CYCLES) < 1.25


def test_a_request_under_way_stays_as_it_was_drawn_and_the_share_comes_back_with_calm() -> None:
    clock = Clock()
    shed = HeadSampler(100.0, clock)
    first, *rest = request("first")
    assert keep(shed, [first]) == [first]
    run(shed, clock, requests=400, looks=6)
    assert shed.halvings and keep(shed, rest) == rest
    run(shed, clock, requests=1, looks=20)
    assert shed.halvings == 0
    assert {event.share for event in keep(shed, request("later"))} == {1.0}


def test_what_is_remembered_is_bounded() -> None:
    shed = HeadSampler(1e9)
    for number in range(head_sampling.MAX_REQUESTS + 10):
        shed.shares([b"%d" % number])
    assert len(shed._requests) == head_sampling.MAX_REQUESTS
