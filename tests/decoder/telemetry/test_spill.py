"""Records in a file: in order, through kills and damage, each bound and each loss counted."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import resource
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from decoder.telemetry import spill as files
from decoder.telemetry.books import Books
from decoder.telemetry.former import FormerLives
from decoder.telemetry.outbox import MEMORY, Outbox
from decoder.telemetry.spill import (
    FILE,
    LOCK,
    Cut,
    Record,
    Spill,
    SpillError,
    claim,
    former,
    release,
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


def test_files_are_taken_over_from_lives_that_ended_and_from_no_other(tmp_path: Path) -> None:
    held, ended = claim(tmp_path, "held"), claim(tmp_path, "ended")
    for life in ("held", "ended"):
        spill = Spill(tmp_path / f"{life}{FILE}", life)
        spill.put(record(1))
        spill.close()
    empty = claim(tmp_path, "empty")
    torn = claim(tmp_path, "torn")
    (tmp_path / f"torn{FILE}").write_bytes(b"no database" * 1000)
    for lock in (ended, empty, torn):
        os.close(lock)
    books = Books()
    ((spill, life, lock),) = former(tmp_path, books)
    assert books.unread == 1
    assert (life, spill.key, spill.rows) == ("ended", "ended", 3)
    assert list(former(tmp_path, Books())) == [], "what one has taken over, no other takes"
    spill.remove(256)
    spill.close()
    release(tmp_path, life)
    os.close(lock)
    os.close(held)
    assert {p.name for p in tmp_path.iterdir()} == {f"held{FILE}", f"held{LOCK}"}
    assert files.folder_of(tmp_path, "one:1") != files.folder_of(tmp_path, "other:1")


def test_what_nobody_delivers_is_removed_after_a_week(tmp_path: Path) -> None:
    for days, life in ((8, "old"), (6, "young"), (8, "held")):
        lock = claim(tmp_path / "broker", life)
        spill = Spill(tmp_path / "broker" / f"{life}{FILE}")
        spill.put(record(1))
        spill.close()
        at = time.time() - days * 86_400
        os.utime(spill.path, (at, at))
        if life != "held":
            os.close(lock)
    books = Books()
    files.expire(tmp_path, books)
    assert books.former_lost == {"expired": 3}
    assert {p.stem for p in (tmp_path / "broker").iterdir()} == {"young", "held"}
    files.expire(tmp_path / "nowhere", books)
    os.close(lock)


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


def test_a_file_that_could_not_be_read_once_is_not_locked_for_the_next_look(tmp_path: Path) -> None:
    leave(tmp_path, "a", record(1))
    file = sqlite3.connect(tmp_path / f"a{FILE}", isolation_level=None)
    file.execute("ALTER TABLE records RENAME rows TO other")
    gc.disable()
    try:
        with pytest.raises(SpillError):
            Spill(tmp_path / f"a{FILE}")
        file.execute("ALTER TABLE records RENAME other TO rows")
    finally:
        gc.enable()
    file.close()
    assert Spill(tmp_path / f"a{FILE}").rows == 3


@contextmanager
def no_room() -> Iterator[None]:
    """No file may be written."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def leave(folder: Path, life: str, *records: Record) -> None:
    lock = claim(folder, life)
    spill = Spill(folder / f"{life}{FILE}", life)
    for one in records:
        spill.put(one)
    spill.close()
    os.close(lock)


def rows_left(folder: Path) -> list[int]:
    found = []
    for spill, _, lock in former(folder, Books()):
        found.append(spill.rows)
        spill.close()
        os.close(lock)
    return found


def test_a_former_life_is_kept_where_a_record_cannot_be_taken_out_now(tmp_path: Path) -> None:
    for life in ("a", "b"):
        leave(tmp_path, life, record(1), record(2))
    lives = FormerLives(tmp_path, Books())
    before = len(list(Path("/proc/self/fd").iterdir()))
    left = lives.oldest({0})
    assert left is not None and left.key == "a"
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 3, "one life is open at a time"
    with no_room():
        assert lives.remove(left.spill, left.record.id) == 0
    left = lives.oldest({0})
    assert left is not None and left.key == "b", "the other goes on, this one waits for a look"
    assert lives.remove(left.spill, left.record.id) == 3
    lives.close()
    assert rows_left(tmp_path) == [6, 3]


def test_a_file_that_another_holds_is_no_damage(tmp_path: Path) -> None:
    leave(tmp_path, "a", record(1))
    holder = Spill(tmp_path / f"a{FILE}")
    holder.put(record(2))
    assert list(former(tmp_path, Books())) == []
    holder.close()
    assert rows_left(tmp_path) == [6]


def test_the_oldest_lives_go_where_they_hold_too_much_together(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for at, life in enumerate(("c", "b", "a")):
        leave(tmp_path, life, record(1, 10_000))
        os.utime(tmp_path / f"{life}{FILE}", (at, at))
    books = Books()
    files.bound(tmp_path, 1 << 20, books)
    assert len(list(tmp_path.glob(f"*{FILE}"))) == 3
    files.bound(tmp_path, 15_000, books)
    assert books.former_lost == {"bound": 3}
    assert {path.stem for path in tmp_path.iterdir()} == {"a", "b"}
    assert "3 draft events of a former life are lost" in caplog.text


def damage(path: Path) -> None:
    whole = bytearray(path.read_bytes())
    middle = len(whole) // 2
    whole[middle : middle + 20] = b"?" * 20
    path.write_bytes(whole)


def test_of_a_former_life_damage_loses_what_it_hits_counted_and_nothing_else(
    tmp_path: Path,
) -> None:
    made, books = [record(n, 60_000) for n in range(6)], Books()
    leave(tmp_path, "a", *made)
    damage(tmp_path / f"a{FILE}")
    lives = FormerLives(tmp_path, books)
    came = []
    while (left := lives.oldest({0})) is not None:
        assert left.record == made[left.record.sequence]
        came.append(left.record.sequence)
        lives.remove(left.spill, left.record.id)
    assert len(came) == 5 and books.former_lost == {"damaged": 3}
    assert not tmp_path.exists()


def test_of_a_former_life_a_row_that_is_listed_and_not_found_ends_its_file(tmp_path: Path) -> None:
    leave(tmp_path, "a", *[record(1)._replace(id=number) for number in (70_000, 70_001, 70_002)])
    leave(tmp_path, "b", record(2))
    displace(tmp_path / f"a{FILE}", 70_000, 70_009)
    books = Books()
    lives = FormerLives(tmp_path, books)
    left = lives.oldest({0})
    assert left is not None and left.record == record(2)
    assert books.former_lost == {"damaged": 9}
    lives.close()


def test_of_a_former_life_what_has_no_place_any_more_is_counted(tmp_path: Path) -> None:
    books = Books()
    leave(tmp_path, "a", record(1, partition=7), record(2))
    left = FormerLives(tmp_path, books).oldest({0})
    assert left is not None and left.record.sequence == 2
    assert books.former_lost == {"partition": 3}


@pytest.mark.parametrize("seed", [*range(40), 64, 242, 313, 661, 1065])
def test_whatever_is_damaged_of_a_former_life_ends_nothing_and_adds_up(
    tmp_path: Path, seed: int
) -> None:
    draw, books = random.Random(seed), Books()
    leave(tmp_path, "a", *[record(n, 3_000) for n in range(20)])
    path = tmp_path / f"a{FILE}"
    whole = bytearray(path.read_bytes())
    for _ in range(8):
        whole[draw.randrange(len(whole))] ^= 0xFF
    path.write_bytes(whole)
    readable = 0
    with contextlib.suppress(*SpillError):  # the numbers of a record may be gone with its page
        spill = Spill(path)
        readable = spill.rows
        spill.close()
    lives, saved = FormerLives(tmp_path, books), 0
    while (left := lives.oldest({0})) is not None:
        saved += lives.remove(left.spill, left.record.id)
    lost = sum(books.former_lost.values())
    assert saved + lost == readable <= 60 or books.unread == 1
