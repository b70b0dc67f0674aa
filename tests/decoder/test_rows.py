"""The rows that a worker writes are its events, and no name in them is a client's."""

from __future__ import annotations

import pytest

from decoder.contracts.events import decode_batch, encode_batch
from decoder.contracts.identity import is_pseudonym
from decoder.core.events import Log, Sink
from decoder.core.requests import RequestOptions
from decoder.telemetry.books import Books
from decoder.telemetry.ring import FULL, HEAD, UNREADABLE, Ring
from tests.contracts.test_events import NAMES, ORIGIN
from tests.decoder.simulated import Router, decode_all, trusting_policy


def tell(sink: Sink, name: str, options: RequestOptions) -> None:
    router = Router(trusting_policy(chance=0.9), True, sink=sink)
    decode_all(router, name, [1, 2, 3], [1, 2, 3] * 15 + list(range(4, 19)), options)
    router.close()


def test_a_record_of_a_workers_rows_is_that_of_its_events_byte_for_byte(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ring, log = Ring(1_000), Log()
    opaque, tenant = NAMES.of("request", "r"), NAMES.of("tenant", "t")
    options = RequestOptions(60, 4096, opaque=opaque, tenant=tenant, workload="loops", choice=2)
    monkeypatch.setattr("time.time", lambda: 5.0)
    monkeypatch.setattr("time.perf_counter", lambda: 7.0)
    for sink in (Sink(ring), log):
        tell(sink, "r", options)
    assert {bool(event.draft_len) for event in log.every} == {True, False}
    value = ring.record(ring.slice(0, len(ring)), ORIGIN, 0)
    assert value == encode_batch(log.every, ORIGIN, 0) and len(log.every) == len(ring) > 10


def test_a_clients_own_names_are_no_part_of_a_row() -> None:
    ring, secret = Ring(1_000), "Patient 4711"
    options = RequestOptions(60, 4096, tenant=secret, session=secret, workload=secret)
    tell(Sink(ring), f"{secret}, born 1970", options)
    assert b"Patient" not in ring.rows.tobytes()
    for event in decode_batch(ring.record(ring.slice(0, len(ring)), ORIGIN, 0)).events:
        names = event.request, event.tenant, event.session, event.workload
        assert all(map(is_pseudonym, names))


def test_cycles_of_which_no_row_can_be_made_are_counted_and_take_no_other_with_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ring = Ring(1_000)
    sink = Sink(ring)
    tell(sink, "r", RequestOptions(60, 4096, choice=2**40))
    lost = int(ring.control[UNREADABLE])
    assert lost > 5 and not len(ring)
    tell(sink, "s", RequestOptions(60, 4096))
    assert ring.control[UNREADABLE] == lost and len(ring) == lost
    assert "no event can be made of a request's cycles" in caplog.text


def test_a_full_ring_loses_the_newest_and_counts_them() -> None:
    small, large = Ring(7), Ring(1_000)
    for ring in (small, large):
        tell(Sink(ring), "r", RequestOptions(60, 4096))
    assert len(small) == 7 and small.control[FULL] == len(large) - 7
    assert small.slice(0, 7)["number"].tolist() == list(range(7))
    small.say(Books(sent=2))
    tell(Sink(small), "s", RequestOptions(60, 4096))
    assert len(small) == 7 and small.control[HEAD] == 9, "what was sent leaves room"
    assert small.control[FULL] == 2 * len(large) - 9
