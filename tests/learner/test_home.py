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


def test_a_name_that_a_full_disk_cut_off_is_made_again(tmp_path: Path) -> None:
    (tmp_path / "holder").write_text("")
    name = holder_of(tmp_path)
    assert name.startswith("learner-") and name == holder_of(tmp_path)


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    nowhere = tmp_path / "file" / "learner"
    for use in (holder_of, lambda folder: occupied(folder).__enter__()):
        with pytest.raises(SettingsError, match=r"cannot be used .* HVD_LEARNER_STATE_DIR"):
            use(nowhere)
