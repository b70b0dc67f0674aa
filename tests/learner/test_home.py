"""A folder has one learner at a time, which keeps its name."""

from __future__ import annotations

from pathlib import Path

import pytest

from decoder.contracts.errors import SettingsError
from learner.home import holder_of, occupied


def test_a_second_learner_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    with (
        occupied(tmp_path / "a"),
        occupied(tmp_path / "b"),
        pytest.raises(SettingsError, match="HVD_LEARNER_STATE_DIR"),
        occupied(tmp_path / "a"),
    ):
        pass
    with occupied(tmp_path / "a"):
        pass


def test_the_name_stays(tmp_path: Path) -> None:
    name = holder_of(tmp_path / "a")
    assert name == holder_of(tmp_path / "a") != holder_of(tmp_path / "b")
