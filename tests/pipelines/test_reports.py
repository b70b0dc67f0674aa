"""Reports in files, and how far long work is."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from decoder.contracts.errors import SettingsError
from pipelines.reports import LINE_SECONDS, Shown, atomic_write, write_json, write_text


def test_a_report_goes_where_a_link_points_and_folders_are_made(tmp_path: Path) -> None:
    real, link = tmp_path / "real.json", tmp_path / "link.json"
    real.write_text("old", encoding="utf-8")
    link.symlink_to(real)
    write_json({"a": 1}, link)
    write_json([2], tmp_path / "new" / "folder" / "b.json")
    assert link.is_symlink() and json.loads(real.read_text(encoding="utf-8")) == {"a": 1}
    assert json.loads((tmp_path / "new" / "folder" / "b.json").read_text(encoding="utf-8")) == [2]


def test_what_cannot_be_written_is_told_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"cannot be written .*: choose another place"):
        write_json({}, tmp_path)


class Clock:
    """Seconds that pass when they are told to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_where_no_bar_can_be_drawn_a_line_comes_now_and_then_with_the_pace_of_its_stage() -> None:
    log, clock = io.StringIO(), Clock()
    with Shown(Console(file=log, width=20, get_time=clock)) as shown:
        for done in range(7):  # the first comes after a while: short work says nothing
            clock.now = done * LINE_SECONDS / 2
            shown.step("recording [chat], tokens", 1000 * done, 6000)
        for done in range(3):
            shown.step("second", done, 9)
            clock.now += 2 * LINE_SECONDS
    assert log.getvalue().splitlines() == [
        "recording [chat], tokens: 2,000 of 6,000, about 1 min left",
        "recording [chat], tokens: 4,000 of 6,000, about 1 min left",
        "recording [chat], tokens: 6,000 of 6,000",
        "second: 1 of 9",
        "second: 2 of 9, about 7 min left",
    ]


def test_what_could_not_be_written_leaves_neither_half_a_file_nor_its_part(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text("the one before")

    def fails(part: Path) -> None:
        part.write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        atomic_write(path, fails)
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [
        ("report.html", "the one before")
    ]
    with pytest.raises(SettingsError, match="/dev/full cannot be written"):
        write_text("a report", Path("/dev/full"))
