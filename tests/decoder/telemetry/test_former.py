"""What workers that ended left: taken over whole, through damage, each loss counted."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import sqlite3
import time
from pathlib import Path

import pytest

from decoder.telemetry import spill as files
from decoder.telemetry.books import Books
from decoder.telemetry.former import FormerLives
from decoder.telemetry.spill import (
    FILE,
    LOCK,
    Record,
    Spill,
    SpillError,
    claim,
    former,
    release,
)
from tests.decoder.telemetry.test_spill import damage, displace, no_room, record


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
