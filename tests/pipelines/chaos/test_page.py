"""Tables go to the place that the page has for them, and nowhere else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from decoder.contracts.errors import SettingsError
from pipelines.chaos.page import PAGE, chaos_table, soak_table, write

TEXT = "before\n<!-- hvd chaos: begin -->\nold | \\1\n<!-- hvd chaos: end -->\nafter\n"
FOUND: dict[str, Any] = {
    "date": "2026-01-01",
    "machine": "m",
    "load": 1.0,
    "seed": 3,
    "worker": "stand-in",
    "events": {"made": 9, "on the topic": 8, "counted": 7},
    "publications": 2,
    "incidents": [
        {"name": "learner killed", "back_s": {"learner": 4.6}, "requests": 12, "errors": 0,
         "waited": 0, "slowest_s": 1.2, "account": {"lost": 3, "in_doubt": 2, "missing": 4},
         "figures": {"counted as lost": 3, "back in s": 1.5},
         "faults": ["a wrong answer", "a wrong answer"]},
        {"name": "a slow reader", "back_s": {}, "requests": 0, "errors": 0, "waited": 0,
         "slowest_s": 0.0, "account": {"lost": 0, "in_doubt": 0, "missing": 0}, "figures": {},
         "faults": []},
    ],
}  # fmt: skip


def test_a_table_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(TEXT)
    for _ in range(2):
        write("hvd chaos", "| \\1 new |\n", page)
        assert page.read_text() == TEXT.replace("old | \\1", "| \\1 new |")
    with pytest.raises(SettingsError, match="no place between"):
        write("hvd soak", "x", page)
    with pytest.raises(SettingsError, match="in a checkout"):
        write("hvd soak", "x", tmp_path / "none.md")


def test_the_project_s_page_has_both_places(tmp_path: Path) -> None:
    copy = tmp_path / "page.md"
    copy.write_text(PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    for name in ("hvd chaos", "hvd soak"):
        write(name, "table\n", copy)
    assert copy.read_text(encoding="utf-8").count("begin -->\ntable\n<!--") == 2


def test_a_row_a_trouble_and_each_fault_once() -> None:
    lines = chaos_table(FOUND).splitlines()
    assert lines[2] == (
        "| learner killed | learner 5 s | 12 | 0 | 0 | 1 s | 3, 2 in doubt; 4 are missing | "
        "a wrong answer |"
    )
    assert lines[3] == "| a slow reader | - | 0 | 0 | 0 | 0 s | 0 | none |"
    assert "Learner killed: counted as lost 3, back in s 1.5." in lines
    assert "made 9, seen on the topic 8, counted by the learner 7; 2 publications" in lines[-1]


def test_a_row_a_figure() -> None:
    seconds = [10.0 * i for i in range(60)]
    found = {
        "date": "d", "machine": "m", "minutes": 10.0, "requests": 5, "errors": 0, "wrong": 0,
        "restarts": [], "seconds": seconds, "series": {"worker: threads": [4.0] * 60},
    }  # fmt: skip
    assert "| worker: threads | 4.0 | +0.00 (+0.00 to +0.00) | flat |" in soak_table(found)
