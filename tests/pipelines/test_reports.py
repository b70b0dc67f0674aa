"""Reports in files: whole or not at all, where a person said, and refused in a sentence."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from decoder.contracts.errors import SettingsError
from pipelines.reports import write_json


def test_a_report_goes_where_a_link_points_and_folders_are_made(tmp_path: Path) -> None:
    real, link = tmp_path / "real.json", tmp_path / "link.json"
    real.write_text("old", encoding="utf-8")
    link.symlink_to(real)
    write_json({"a": 1}, link)
    write_json([2], tmp_path / "new" / "folder" / "b.json")
    assert link.is_symlink() and json.loads(real.read_text(encoding="utf-8")) == {"a": 1}
    assert json.loads((tmp_path / "new" / "folder" / "b.json").read_text(encoding="utf-8")) == [2]


def test_a_report_goes_into_a_pipe_and_leaves_it_one(tmp_path: Path) -> None:
    pipe, read = tmp_path / "pipe", list[str]()
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_text(encoding="utf-8")))
    reader.start()
    write_json({"a": 1}, pipe)
    reader.join(10)
    assert json.loads(read[0]) == {"a": 1} and pipe.is_fifo()


def test_what_cannot_be_written_is_told_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"cannot be written .*: choose another place"):
        write_json({}, tmp_path)
