"""The ring never waits, counts what it cannot hold, and says what the contract wants."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decoder.compiled import compiled
from decoder.contracts.events import COLUMNS, DraftEvent, decode_batch, encode_batch
from decoder.telemetry import ring as rings
from decoder.telemetry.books import Books
from decoder.telemetry.ring import FULL, HEAD, ROW, SETTLED, TURN, Ring
from tests.contracts.test_events import EVENT, ORIGIN, PLAIN
from tests.decoder.telemetry.telling import events_of, put, ring_of, write


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
    assert list(json.loads(value)["columns"]) == list(COLUMNS)
    assert [e[:-1] for e in events_of(ring)] == [e[:-1] for e in events]


def test_order_bound_and_count() -> None:
    ring = Ring(3)
    put(ring, *[PLAIN] * 5)
    assert [e.number for e in events_of(ring)] == [0, 1, 2]
    assert (len(ring), ring.control[HEAD], ring.control[FULL]) == (3, 3, 2)
    ring.say(Books(sent=2))
    put(ring, PLAIN)
    assert [e.number for e in events_of(ring)] == [2, 5]


def spelling(size: int) -> Ring:
    """A ring that knows the words of all events here, by the same numbers."""
    ring = Ring(size)
    for event in (EVENT, PLAIN):
        for name in rings.SPELLED:
            ring.word(getattr(event, name))
    return ring


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 9), st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=8))
def test_rows_written_together_lie_there_as_if_written_one_by_one(
    size: int, turns: list[tuple[int, int]]
) -> None:
    one, many, made, settled = spelling(size), spelling(size), 0, 0
    for rows, taken in turns:
        events = [(EVENT, PLAIN)[n % 2]._replace(number=n) for n in range(made, made + rows)]
        made += rows
        write(one, *events)
        batch = spelling(rows + 1)
        write(batch, *events)
        many.extend(batch.slice(0, rows))
        settled = min(settled + taken, int(one.control[HEAD]))
        for ring in (one, many):
            ring.say(Books(sent=settled))
        assert np.array_equal(one.control, many.control)
        assert [str(e) for e in events_of(one)] == [str(e) for e in events_of(many)]


def test_room_is_claimed_by_compiled_code_too() -> None:
    control = np.zeros(8, np.int64)
    claim: Callable[..., int] = compiled()(rings.claim)
    control[HEAD], control[SETTLED] = 10, 4
    assert claim(control, 8, 5) == 2 and control[FULL] == 3


@pytest.mark.parametrize("wrong", [{"position": 2**40}, {"accepted": "x"}, {"arm": "a" * 65}])
def test_what_no_row_can_be_made_of_is_refused_and_changes_nothing(wrong: dict[str, Any]) -> None:
    ring = ring_of(PLAIN)
    with pytest.raises((OverflowError, ValueError)):
        write(ring, EVENT._replace(**wrong))
    assert len(ring) == 1 and ring.control[FULL] == 0


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
        while len(seen) < 100:
            books = ring.books()
            assert set(books.dropped.values()) <= {books.sent}
            seen.add(books.sent)
        talker.kill()
    books = ring.books()
    assert set(books.dropped.values()) <= {books.sent}, "killed in the middle, too"


def test_a_reader_in_another_process_sees_whole_rows_while_they_are_written() -> None:
    ring, stop = Ring(64), threading.Event()

    def produce() -> None:
        while not stop.is_set():
            put(ring, EVENT, PLAIN)

    thread = threading.Thread(target=produce)
    thread.start()
    other, seen = Ring(64, os.dup(ring.fd)), 0
    while seen < 2_000:
        upto = int(other.control[HEAD])
        rows = other.slice(seen, upto)
        assert rows["number"].tolist() == sorted(rows["number"].tolist())
        assert set(rows["step_us"].tolist()) <= {EVENT.step_us}
        seen = upto
        other.say(Books(sent=seen))
    stop.set()
    thread.join()


def test_a_full_ring_that_is_written_while_it_is_freed_keeps_every_row() -> None:
    ring, stop, size = Ring(6_000), threading.Event(), 6_000
    row = ring_of(EVENT).slice(0, 1)

    def produce() -> None:
        rows = np.repeat(row, 500)
        while not stop.is_set():
            rows["number"] = np.arange(500) + ring.control[HEAD]
            ring.extend(rows)

    thread = threading.Thread(target=produce)
    thread.start()
    other, seen = Ring(size, os.dup(ring.fd)), 0
    while seen < 400_000:
        upto = min(int(other.control[HEAD]), seen + 300)
        assert np.array_equal(other.slice(seen, upto)["number"], np.arange(seen, upto))
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


def test_rows_hold_the_columns_of_the_contract() -> None:
    assert {*ROW.names} == {*DraftEvent._fields}
    assert ROW.itemsize % 8 == 0
    assert decode_batch(ring_of(EVENT).record(ring_of(EVENT).slice(0, 1), ORIGIN, 0)).events
