"""The rows that a worker writes are the events of its cycles, and no name in them is a client's."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from decoder.contracts.events import decode_batch, encode_batch
from decoder.contracts.identity import is_pseudonym
from decoder.core.events import Resolved, RingSink, event_of
from decoder.core.requests import RequestOptions
from decoder.core.router import DraftRouter
from decoder.drafting.suffix import SuffixCache
from decoder.settings import WorkerSettings
from decoder.telemetry.ring import UNREADABLE, Ring
from tests.contracts.test_events import NAMES, ORIGIN
from tests.decoder.simulated import trusting_policy
from tests.decoder.test_router import Target


class Both:
    """Writes rows, and keeps what they are of."""

    def __init__(self, ring: Ring) -> None:
        self.told: list[Resolved] = []
        self._rows = RingSink(ring)

    def put(self, resolved: Resolved) -> None:
        self.told.append(resolved)
        self._rows.put(resolved)


def told_by(ring: Ring, classes: np.ndarray, name: str, options: RequestOptions) -> list[Resolved]:
    sink = Both(ring)
    policy = trusting_policy(chance=0.9)
    router = DraftRouter(SuffixCache(WorkerSettings()), policy, classes, sink, True)
    Target(router, [1, 2, 3] * 15 + list(range(4, 19))).run(name, [1, 2, 3], options)
    router.close()
    return sink.told


def test_a_record_of_a_workers_rows_is_that_of_its_events_byte_for_byte(
    token_classes: np.ndarray,
) -> None:
    ring = Ring(1_000)
    opaque, tenant = NAMES.of("request", "r"), NAMES.of("tenant", "t")
    options = RequestOptions(60, 4096, opaque=opaque, tenant=tenant, workload="loops", choice=2)
    told = told_by(ring, token_classes, "r", options)
    events = [event_of(resolved) for resolved in told]
    assert {bool(event.draft_len) for event in events} == {True, False}
    value = ring.record(ring.slice(0, len(told)), ORIGIN, 0)
    assert value == encode_batch(events, ORIGIN, 0) and len(told) == len(ring) > 10


def test_a_clients_own_names_are_no_part_of_a_row(token_classes: np.ndarray) -> None:
    ring, secret = Ring(1_000), "Patient 4711"
    options = RequestOptions(60, 4096, tenant=secret, session=secret, workload=secret)
    told_by(ring, token_classes, f"{secret}, born 1970", options)
    assert b"Patient" not in ring.rows.tobytes()
    for event in decode_batch(ring.record(ring.slice(0, len(ring)), ORIGIN, 0)).events:
        names = event.request, event.tenant, event.session, event.workload
        assert all(map(is_pseudonym, names))


def test_a_cycle_of_which_no_row_can_be_made_is_counted_and_takes_no_other_with_it(
    token_classes: np.ndarray, caplog: pytest.LogCaptureFixture
) -> None:
    ring = Ring(1_000)
    told = told_by(Ring(1_000), token_classes, "r", RequestOptions(60, 4096))
    sink = RingSink(ring)
    for number, resolved in enumerate(told[:6]):
        cycle, accepted, censored = resolved[3]
        broken = replace(cycle, position=2**40) if number % 3 == 1 else cycle
        sink.put((*resolved[:3], type(resolved[3])(broken, accepted, censored), resolved[4]))
    assert ring.control[UNREADABLE] == 2 and len(ring) == 4
    assert "no event can be made of a cycle" in caplog.text
