"""Records in a file: in order, through kills and damage, each bound and each loss counted."""

from __future__ import annotations

import gc
import random
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from decoder.telemetry.books import Books
from decoder.telemetry.outbox import MEMORY, Outbox
from decoder.telemetry.spill import (
    Cut,
    Record,
    Spill,
    SpillError,
)


def record(number: int, size: int = 200, rows: int = 3, partition: int = 0) -> Record:
    noise = random.Random(number).randbytes(size // 2).hex().encode()
    return Record(number * 256, partition, number, rows, noise)


def balanced(books: Books) -> bool:
    return books.taken == books.settled + books.waiting + books.spilled


def add(outbox: Outbox, books: Books, *records: Record) -> None:
    for one in records:
        books.taken += one.rows
        books.waiting += one.rows
        outbox.add(one)
        assert balanced(books)


def test_what_was_put_is_there_when_the_file_is_opened_again(tmp_path: Path) -> None:
    made, spill = [record(n) for n in range(5)], Spill(tmp_path / "a", "w")
    for one in reversed(made):
        spill.put(one)
    assert spill.remove(made[0].id) == 3 and spill.remove(made[0].id) == 0
    spill.close()
    again = Spill(tmp_path / "a")
    assert (again.rows, again.size, again.key, again.last) == (12, spill.size, "w", made[-1].id)
    assert [again.get(number) for number, _ in again.heads(9)] == made[1:]
    for one in made:
        again.remove(one.id)
    again.close()
    assert (again.rows, again.size) == (0, 0) and not list(tmp_path.iterdir())


def test_a_number_that_lies_in_the_file_is_not_given_again(tmp_path: Path) -> None:
    """One that is killed may have said less than it had made."""
    spill = Spill(tmp_path / "a")
    for one in (record(3), record(4), record(9, partition=1)):
        spill.put(one)
    spill.cut(Cut(0, 4 * 256, 5 * 256), 0)
    spill.close()
    books = Books(sequences={0: 1, 1: 20, 2: 7})
    Outbox(books, Spill(tmp_path / "a"), 1 << 20).close()
    assert books.sequences == {0: 6, 1: 20, 2: 7}


WRITER = """
import sys
from pathlib import Path
from tests.decoder.telemetry.test_spill import record
from decoder.telemetry.spill import Spill
spill = Spill(Path(sys.argv[1]), "w")
for number in range(10**6):
    spill.put(record(number, 60_000))
    print(number, flush=True)
"""


@pytest.mark.parametrize("after", [1, 7, 20])
def test_a_kill_in_the_middle_of_writing_leaves_every_record_whole(
    tmp_path: Path, after: int
) -> None:
    path = tmp_path / "a"
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout is not None
        written = [int(writer.stdout.readline()) for _ in range(after)]
        writer.send_signal(signal.SIGKILL)
        written += [int(line) for line in writer.stdout.read().split()]
    spill = Spill(path)
    found = [spill.get(number).sequence for number, _ in spill.heads(10**6)]
    assert found == list(range(len(found))), "no record is torn, and none is passed over"
    assert len(written) <= len(found) <= len(written) + 1 and spill.rows == 3 * len(found)


def test_past_the_bound_the_oldest_go_and_are_counted(tmp_path: Path) -> None:
    books = Books()
    outbox = Outbox(books, Spill(tmp_path / "a"), 10_000)
    add(outbox, books, record(0, 1_000))
    outbox.put_down()
    add(outbox, books, *[record(n, 1_000) for n in range(1, 40)])
    assert books.waiting == 0 and books.spilled + books.dropped["spill"] == 40 * 3
    (first,) = outbox.ready()
    assert first.sequence * 3 == books.dropped["spill"] > 0
    assert sum(p.stat().st_size for p in tmp_path.iterdir()) < 200_000


def test_memory_goes_into_the_file_when_it_is_full_and_comes_out_in_order(tmp_path: Path) -> None:
    books = Books()
    outbox = Outbox(books, Spill(tmp_path / "a"), 1 << 30)
    made = [record(n, MEMORY // 4, partition=n % 2) for n in range(9)]
    add(outbox, books, *made)
    assert books.spilled and not outbox.ready()[0].sequence
    came: list[Record] = []
    while outbox:
        ready = outbox.ready()
        assert len({one.partition for one in ready}) == len(ready)
        for one in ready:
            outbox.sent(one)
        assert not {r.partition for r in outbox.ready()} & {r.partition for r in ready}
        for one in ready:
            outbox.landed(one)
            outbox.delivered(one)
        came += ready
        assert balanced(books)
    assert sorted(came) == made and books.sent == 27
    outbox.close()
    assert not list(tmp_path.iterdir())


def test_a_full_disk_drops_with_its_reason_and_raises_nothing(tmp_path: Path) -> None:
    books = Books()
    outbox = Outbox(books, Spill(tmp_path / "a"), 1 << 30)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, hard))
    try:
        add(outbox, books, record(0, 1_000))
        outbox.put_down()
        add(outbox, books, *[record(n, 50_000) for n in range(1, 20)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert books.dropped["disk"] > 0 < books.spilled
    assert books.dropped["disk"] + books.spilled == 60
    outbox.close()
    assert Spill(tmp_path / "a").rows == books.spilled


def test_a_folder_that_cannot_be_written_drops_with_its_reason(tmp_path: Path) -> None:
    books = Books()
    outbox = Outbox(books, Spill(tmp_path / "gone" / "a"), 1 << 30)
    add(outbox, books, record(0))
    outbox.put_down()
    assert books.dropped == {"disk": 3} and not outbox
    outbox.close()


def test_a_file_that_somebody_removes_is_told_and_still_delivered(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    books, folder = Books(), tmp_path / "gone"
    folder.mkdir()
    outbox = Outbox(books, Spill(folder / "a"), 1 << 30)
    add(outbox, books, *map(record, range(3)))
    outbox.put_down()
    assert not caplog.text
    shutil.rmtree(folder)
    add(outbox, books, *map(record, range(3, 6)))
    assert caplog.text.count("was removed") == 1
    while ready := outbox.ready():
        for one in ready:
            outbox.delivered(one)
    assert books.sent == 18 and balanced(books)
    outbox.close()


def test_damage_loses_what_it_hits_counted_and_nothing_else(tmp_path: Path) -> None:
    path, books = tmp_path / "a", Books()
    spill = Spill(path)
    made = [record(n, 60_000) for n in range(6)]
    for one in made:
        spill.put(one)
    spill.close()
    damage(path)
    outbox = Outbox(books, Spill(path), 1 << 30)
    came: list[int] = []
    for _ in range(20):
        for one in outbox.ready():
            assert one == made[one.sequence]
            outbox.delivered(one)
            came.append(one.sequence)
    assert balanced(books) and not outbox
    assert len(came) == 5 and books.dropped == {"damaged": 3}


def displace(path: Path, first: int, to: int) -> None:
    """Give the first row of a file an id that is out of order: listed, and found by no look-up."""
    whole = path.read_bytes()
    assert whole.count(_varint(first)) == 1
    path.write_bytes(whole.replace(_varint(first), _varint(to)))


def _varint(number: int) -> bytes:
    """Three bytes of seven bits, as SQLite writes an id of such a size."""
    return bytes([0x80 | number >> 14, 0x80 | number >> 7 & 0x7F, number & 0x7F])


def test_a_row_that_is_listed_and_not_found_ends_its_file_and_nothing_else(tmp_path: Path) -> None:
    spill = Spill(tmp_path / "a")
    for number in (70_000, 70_001, 70_002):
        spill.put(record(1)._replace(id=number))
    spill.close()
    displace(tmp_path / "a", 70_000, 70_009)
    books = Books()
    outbox = Outbox(books, Spill(tmp_path / "a"), 1 << 30)
    assert outbox.ready() == [] and not outbox
    assert books.dropped == {"damaged": 9} and balanced(books)
    add(outbox, books, record(4))
    assert [one.id for one in outbox.ready()] == [record(4).id]


def test_a_file_that_is_none_is_lost_counted_and_ends_nothing(tmp_path: Path) -> None:
    path, books = tmp_path / "a", Books()
    outbox = Outbox(books, Spill(path), 1 << 30)
    add(outbox, books, *[record(n) for n in range(3)])
    outbox.put_down()
    assert outbox._spill is not None and outbox._spill._file is not None
    outbox._spill._file.execute("DROP TABLE records")
    assert outbox.ready() == [] and books.dropped == {"damaged": 9} and balanced(books)
    add(outbox, books, record(4))
    assert books.waiting == 3


def test_two_do_not_hold_one_file(tmp_path: Path) -> None:
    spill = Spill(tmp_path / "a")
    spill.put(record(1))
    with pytest.raises(SpillError):
        Spill(tmp_path / "a")


def test_a_full_disk_loses_nothing_that_lies_in_the_file(tmp_path: Path) -> None:
    books, spill = Books(), Spill(tmp_path / "a")
    outbox = Outbox(books, spill, 1 << 30)
    add(outbox, books, *[record(n, 1_000) for n in range(4)])
    outbox.put_down()
    (first,) = outbox.ready()
    with no_room():
        outbox.sent(first)
        outbox.landed(first)
        outbox.delivered(first)
        assert (books.sent, books.spilled) == (3, 9) and balanced(books) and not books.dropped
        assert [one.sequence for one in outbox.ready()] == [1], "what was sent is not sent again"
    assert [one.sequence for one in outbox.ready()] == [1]
    outbox.close()
    assert Spill(tmp_path / "a").rows == 9, "it was taken out when there was room"


def test_a_file_that_could_not_be_made_is_made_when_there_is_room_again(tmp_path: Path) -> None:
    books = Books()
    outbox = Outbox(books, Spill(tmp_path / "a"), 1 << 30)
    gc.disable()  # which closed what a failure left open, sooner or later
    try:
        with no_room():
            add(outbox, books, record(0))
            outbox.put_down()
        assert books.dropped == {"disk": 3}
        add(outbox, books, record(1))
        outbox.put_down()
    finally:
        gc.enable()
    assert books.dropped == {"disk": 3} and books.spilled == 3 and balanced(books)
    outbox.close()
    assert Spill(tmp_path / "a").rows == 3


@contextmanager
def no_room() -> Iterator[None]:
    """No file may be written."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def damage(path: Path) -> None:
    whole = bytearray(path.read_bytes())
    middle = len(whole) // 2
    whole[middle : middle + 20] = b"?" * 20
    path.write_bytes(whole)
