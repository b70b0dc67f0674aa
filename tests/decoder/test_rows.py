"""The rows that a worker writes are its events, and no name in them is a client's."""

from __future__ import annotations

import numpy as np
import pytest

from decoder.contracts.events import decode_batch, encode_batch
from decoder.contracts.identity import is_pseudonym
from decoder.core.events import Log, Sink
from decoder.core.requests import RequestOptions
from decoder.core.router import DraftRouter
from decoder.drafting.suffix import SuffixCache
from decoder.settings import WorkerSettings
from decoder.telemetry.ring import UNREADABLE, Ring
from tests.contracts.test_events import NAMES, ORIGIN
from tests.decoder.simulated import trusting_policy
from tests.decoder.test_router import Target


def tell(sink: Sink, classes: np.ndarray, name: str, options: RequestOptions) -> None:
    policy = trusting_policy(chance=0.9)
    router = DraftRouter(SuffixCache(WorkerSettings()), policy, classes, sink, True)
    Target(router, [1, 2, 3] * 15 + list(range(4, 19))).run(name, [1, 2, 3], options)
    router.close()


def test_a_record_of_a_workers_rows_is_that_of_its_events_byte_for_byte(
    token_classes: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring, log = Ring(1_000), Log()
    opaque, tenant = NAMES.of("request", "r"), NAMES.of("tenant", "t")
    options = RequestOptions(60, 4096, opaque=opaque, tenant=tenant, workload="loops", choice=2)
    monkeypatch.setattr("time.time", lambda: 5.0)
    monkeypatch.setattr("time.perf_counter", lambda: 7.0)
    for sink in (Sink(ring), log):
        tell(sink, token_classes, "r", options)
    assert {bool(event.draft_len) for event in log.every} == {True, False}
    value = ring.record(ring.slice(0, len(ring)), ORIGIN, 0)
    assert value == encode_batch(log.every, ORIGIN, 0) and len(log.every) == len(ring) > 10


def test_a_clients_own_names_are_no_part_of_a_row(token_classes: np.ndarray) -> None:
    ring, secret = Ring(1_000), "Patient 4711"
    options = RequestOptions(60, 4096, tenant=secret, session=secret, workload=secret)
    tell(Sink(ring), token_classes, f"{secret}, born 1970", options)
    assert b"Patient" not in ring.rows.tobytes()
    for event in decode_batch(ring.record(ring.slice(0, len(ring)), ORIGIN, 0)).events:
        names = event.request, event.tenant, event.session, event.workload
        assert all(map(is_pseudonym, names))


def test_cycles_of_which_no_row_can_be_made_are_counted_and_take_no_other_with_them(
    token_classes: np.ndarray, caplog: pytest.LogCaptureFixture
) -> None:
    ring = Ring(1_000)
    sink = Sink(ring)
    tell(sink, token_classes, "r", RequestOptions(60, 4096, choice=2**40))
    lost = int(ring.control[UNREADABLE])
    assert lost > 5 and not len(ring)
    tell(sink, token_classes, "s", RequestOptions(60, 4096))
    assert ring.control[UNREADABLE] == lost and len(ring) == lost
    assert "no event can be made of a request's cycles" in caplog.text


def test_a_full_ring_loses_the_newest_and_counts_them(token_classes: np.ndarray) -> None:
    from decoder.telemetry.ring import FULL

    small, large = Ring(7), Ring(1_000)
    for ring in (small, large):
        tell(Sink(ring), token_classes, "r", RequestOptions(60, 4096))
    assert len(small) == 7 and small.control[FULL] == len(large) - 7
    numbers = small.slice(0, 7)["number"]
    assert numbers.tolist() == list(range(7))
