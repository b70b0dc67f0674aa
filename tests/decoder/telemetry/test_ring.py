"""The ring never waits, counts what it cannot hold, and says what the contract wants.

The rows that a worker writes are its events, and no name in them is a client's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from decoder.contracts.events import encode_batch
from decoder.contracts.fields import COLUMNS
from decoder.contracts.identity import is_pseudonym
from decoder.core.events import Sink
from decoder.core.requests import RequestOptions
from decoder.telemetry import ring as rings
from decoder.telemetry.ring import FULL, HEAD, TURN, UNREADABLE, DeliveryProgress, Ring
from tests.contracts.test_events import EVENT, NAMES, ORIGIN, PLAIN
from tests.decoder.simulated import Router, decode_all, trusting_policy
from tests.decoder.telemetry.telling import events_in, write
from tests.events import KeepingLog, encode_events, events_of


def test_a_record_of_rows_is_the_record_of_their_events_byte_for_byte() -> None:
    """Of any number that a float64 holds, of 0 features as of many, and round the ring's end."""
    events = [
        EVENT, PLAIN, EVENT._replace(number=2**53, censored="length", predicted=13.3, share=0.125),
        PLAIN._replace(session=EVENT.tenant, model_accepted=0, role="", side="plain", choice=3),
    ]  # fmt: skip
    ring, last = Ring(5), 18
    for settled in range(last):
        write(ring, PLAIN)
        ring.write_progress(DeliveryProgress(sent=settled + 1))
    write(ring, *events)
    assert 0 in ring.indices(last, last + 4)
    value = encode_batch(ring.batch(ring.slice(last, last + 4), ORIGIN, 9))
    assert value == encode_events(events, ORIGIN, 9)
    assert ring.rows.itemsize % 8 == 0
    assert list(json.loads(value)["columns"]) == list(COLUMNS)
    assert [e[:-1] for e in events_in(ring)] == [e[:-1] for e in events]


def test_words_have_an_end() -> None:
    ring = Ring(1)
    for number in range(rings.MAX_STRINGS - 1):
        assert ring.intern(str(number)) == number + 1
    with pytest.raises(ValueError, match="no room"):
        ring.intern("one more")
    assert ring.intern("7") == 8 and ring.intern("") == 0


def test_what_is_said_is_of_one_moment_while_another_process_says_it() -> None:
    """The sum is said twice, in two counts: who sees one of before and one of later sees it."""
    talks = (
        "import sys\n"
        "from decoder.telemetry.ring import DeliveryProgress\n"
        "from decoder.telemetry.ring import Ring\n"
        "ring = Ring(8, int(sys.argv[1]))\n"
        "for n in range(10**9):\n"
        "    dropped = {str(r): n for r in range(n % 40)}\n"
        "    ring.write_progress(DeliveryProgress(sent=n, dropped=dropped))\n"
    )
    ring = Ring(8)
    with subprocess.Popen(
        [sys.executable, "-c", talks, str(ring.fd)], pass_fds=(ring.fd,)
    ) as talker:
        while ring.control[TURN] < 10:
            assert talker.poll() is None
        seen = set[int]()
        while len(seen) < 40:
            progress = ring.progress()
            assert set(progress.dropped.values()) <= {progress.sent}
            seen.add(progress.sent)
        talker.kill()
    progress = ring.progress()
    assert set(progress.dropped.values()) <= {progress.sent}, "killed in the middle, too"


WRITER = """
import sys
from decoder.telemetry.ring import SETTLED, Ring
from tests.contracts.test_events import EVENT, PLAIN
from tests.decoder.telemetry.telling import put
ring = Ring(64, int(sys.argv[1]))
while ring.control[SETTLED] < 600:
    put(ring, EVENT, PLAIN)
"""


def test_another_process_sees_whole_rows_while_a_full_ring_is_written_and_freed() -> None:
    """A lost event has a number of its own: the rows are those that were not counted as lost."""
    ring, seen, looked = Ring(64), 0, 0
    numbers: list[int] = []
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(ring.fd)], pass_fds=(ring.fd,)
    ) as writer:
        while seen < 600 or writer.poll() is None or seen < ring.control[HEAD]:
            if not seen and not ring.control[FULL]:  # full at least once, whoever is faster
                assert writer.poll() is None
                continue
            whole, looked = looked, int(ring.control[HEAD])  # as the exporter reads it
            rows = ring.slice(seen, whole)
            numbers += rows["number"].tolist()
            assert set(rows["step_us"].tolist()) <= {EVENT.step_us}
            seen = whole
            ring.write_progress(DeliveryProgress(sent=seen))
    assert writer.returncode == 0
    lost = int(ring.control[FULL])
    assert len(numbers) == seen == ring.control[HEAD] and lost > 0
    assert numbers == sorted(set(numbers)) and set(numbers) <= set(range(seen + lost))


def test_a_ring_has_no_name_and_ends_with_those_who_hold_it() -> None:
    def held() -> int:
        """Pieces of memory without a name; others on this machine make some with one meanwhile."""
        links = map(os.path.realpath, Path("/proc/self/fd").iterdir())
        return sum(link.startswith("/memfd:hvd-events") for link in links)

    before = held()
    rings_made = [Ring(1 << 20) for _ in range(8)]
    assert held() > before
    rings_made.clear()
    assert held() == before


def tell(sink: Sink, name: str, options: RequestOptions) -> None:
    router = Router(trusting_policy(chance=0.9), True, sink=sink)
    decode_all(router, name, [1, 2, 3], [1, 2, 3] * 15 + list(range(4, 19)), options)
    router.close()


def test_a_record_of_a_workers_rows_is_that_of_its_events_byte_for_byte(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ring, log = Ring(1_000), KeepingLog()
    opaque, tenant = NAMES.of("request", "r"), NAMES.of("tenant", "t")
    options = RequestOptions(60, 4096, opaque=opaque, tenant=tenant, workload="loops", choice=2)
    monkeypatch.setattr("time.time", lambda: 5.0)
    monkeypatch.setattr("time.perf_counter", lambda: 7.0)
    for sink in (Sink(ring), log):
        tell(sink, "r", options)
    assert {bool(event.draft_len) for event in log.every} == {True, False}
    value = encode_batch(ring.batch(ring.slice(0, len(ring)), ORIGIN, 0))
    assert value == encode_events(log.every, ORIGIN, 0) and len(log.every) == len(ring) > 10


def test_a_clients_own_names_are_no_part_of_a_row() -> None:
    ring, secret = Ring(1_000), "Patient 4711"
    options = RequestOptions(60, 4096, tenant=secret, session=secret, workload=secret)
    tell(Sink(ring), f"{secret}, born 1970", options)
    assert b"Patient" not in ring.rows.tobytes()
    for event in events_of(ring.batch(ring.slice(0, len(ring)), ORIGIN, 0)):
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
    small.write_progress(DeliveryProgress(sent=2))
    tell(Sink(small), "s", RequestOptions(60, 4096))
    assert len(small) == 7 and small.control[HEAD] == 9, "what was sent leaves room"
    assert small.control[FULL] == 2 * len(large) - 9
