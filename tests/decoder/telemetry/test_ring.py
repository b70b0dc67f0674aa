"""The ring never waits, counts what it cannot hold, and says what the contract wants."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from decoder.contracts.events import COLUMNS, encode_batch
from decoder.telemetry import ring as rings
from decoder.telemetry.books import Books
from decoder.telemetry.ring import HEAD, TURN, Ring
from tests.contracts.test_events import EVENT, ORIGIN, PLAIN
from tests.decoder.telemetry.telling import events_of, put, write


def test_a_record_of_rows_is_the_record_of_their_events_byte_for_byte() -> None:
    """Of any number that a float64 holds, of 0 features as of many, and round the ring's end."""
    events = [
        EVENT, PLAIN, EVENT._replace(number=2**53, censored="length", predicted=13.3, share=0.125),
        PLAIN._replace(session=EVENT.tenant, model_accepted=0, role="", side="plain", choice=3),
    ]  # fmt: skip
    ring, last = Ring(5), 18
    for settled in range(last):
        write(ring, PLAIN)
        ring.say(Books(sent=settled + 1))
    write(ring, *events)
    assert 0 in ring.places(last, last + 4)
    value = ring.record(ring.slice(last, last + 4), ORIGIN, 9)
    assert value == encode_batch(events, ORIGIN, 9)
    assert ring.rows.itemsize % 8 == 0
    assert list(json.loads(value)["columns"]) == list(COLUMNS)
    assert [e[:-1] for e in events_of(ring)] == [e[:-1] for e in events]


def test_words_have_an_end() -> None:
    ring = Ring(1)
    for number in range(rings.WORDS - 1):
        assert ring.word(str(number)) == number + 1
    with pytest.raises(ValueError, match="no room"):
        ring.word("one more")
    assert ring.word("7") == 8 and ring.word("") == 0


def test_what_is_said_is_of_one_moment_while_another_process_says_it() -> None:
    """The sum is said twice, in two counts: who sees one of before and one of later sees it."""
    talks = (
        "import sys\n"
        "from decoder.telemetry.books import Books\n"
        "from decoder.telemetry.ring import Ring\n"
        "ring = Ring(8, int(sys.argv[1]))\n"
        "for n in range(10**9):\n"
        "    ring.say(Books(sent=n, dropped={str(r): n for r in range(n % 40)}))\n"
    )
    ring = Ring(8)
    with subprocess.Popen(
        [sys.executable, "-c", talks, str(ring.fd)], pass_fds=(ring.fd,)
    ) as talker:
        while ring.control[TURN] < 10:
            assert talker.poll() is None
        seen = set[int]()
        while len(seen) < 40:
            books = ring.books()
            assert set(books.dropped.values()) <= {books.sent}
            seen.add(books.sent)
        talker.kill()
    books = ring.books()
    assert set(books.dropped.values()) <= {books.sent}, "killed in the middle, too"


def test_another_process_sees_whole_rows_while_a_full_ring_is_written_and_freed() -> None:
    ring, stop = Ring(64), threading.Event()

    def produce() -> None:
        while not stop.is_set():
            if len(ring) < ring.size:
                put(ring, EVENT, PLAIN)

    thread = threading.Thread(target=produce)
    thread.start()
    other, seen = Ring(64, os.dup(ring.fd)), 0
    while seen < 2_000:
        upto = int(other.control[HEAD])
        rows = other.slice(seen, upto)
        assert rows["number"].tolist() == list(range(seen, upto))
        assert set(rows["step_us"].tolist()) <= {EVENT.step_us}
        seen = upto
        other.say(Books(sent=seen))
    stop.set()
    thread.join()


def test_a_ring_has_no_name_and_ends_with_those_who_hold_it() -> None:
    named = {*Path("/dev/shm").iterdir()} if Path("/dev/shm").is_dir() else set()
    before = len(list(Path("/proc/self/fd").iterdir()))
    rings_made = [Ring(1 << 20) for _ in range(8)]
    assert not Path("/dev/shm").is_dir() or named >= {*Path("/dev/shm").iterdir()}
    rings_made.clear()
    assert len(list(Path("/proc/self/fd").iterdir())) == before
