"""One file, one instant, one learner a folder: neither a kill nor a damaged disk loses the past."""

from __future__ import annotations

import errno
from pathlib import Path

import numpy as np
import pytest

from decoder.contracts.errors import SettingsError
from learner import checkpoint, state
from learner.home import holder_of, occupied
from learner.ingest.sequences import Sequences
from learner.scopes import Scopes
from learner.settings import LearnerSettings

ARRAYS = {"ids": np.arange(5, dtype=np.uint64), "flags": np.array([True, False])}


def saved(path: Path, *offsets: int) -> None:
    for offset in offsets:
        checkpoint.save(path, {"arrays": ARRAYS, "offset": offset})


def offset_at(path: Path) -> int | None:
    loaded = checkpoint.load(path)
    return None if loaded is None else int(loaded["offset"])


@pytest.mark.parametrize("dies_at", [0, 1])
def test_a_kill_during_the_save_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies_at: int
) -> None:
    path = tmp_path / "c.safetensors"
    saved(path, 1, 2)
    calls = 0
    replace = Path.replace

    def dying(self: Path, target: Path) -> Path:
        nonlocal calls
        calls += 1
        if calls > dies_at:
            raise KeyboardInterrupt
        return replace(self, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", dying)
        with pytest.raises(KeyboardInterrupt):
            saved(path, 3)
    assert offset_at(path) == 2
    saved(path, 4)
    assert offset_at(path) == 4


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "no space left on device")


def test_a_full_disk_keeps_the_old_one_and_no_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "c.safetensors"
    saved(path, 1, 2)
    before = sorted(tmp_path.iterdir())
    for step in ("os.fsync", "pathlib.Path.replace"):
        with monkeypatch.context() as patched, pytest.raises(OSError, match="no space"):
            patched.setattr(step, full)
            saved(path, 3)
        assert offset_at(path) == 2 and sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty"])
def test_a_damaged_file_falls_back_to_the_previous(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "c.safetensors"
    saved(path, 1, 2)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes({"truncated": data[:-9], "flipped": data, "empty": b""}[damage])
    assert offset_at(path) == 1 and "damaged" in caplog.text
    saved(path, 3)
    assert offset_at(path) == 3 and offset_at(checkpoint.previous_of(path)) == 1


def test_both_damaged_means_starting_anew(tmp_path: Path) -> None:
    path = tmp_path / "c.safetensors"
    saved(path, 1, 2)
    for file in (path, checkpoint.previous_of(path)):
        file.write_bytes(b"not a checkpoint")
    assert checkpoint.load(path) is None


def test_what_was_read_of_another_topic_says_nothing_of_this_one(tmp_path: Path) -> None:
    own = LearnerSettings(state_dir=tmp_path)
    lessons = LearnerSettings(state_dir=tmp_path, intake="lessons")
    state.save(own, state.State(Scopes(own), offsets={0: 7}))
    assert state.resumed(own).offsets == {0: 7} and not state.resumed(lessons).offsets
    known = Sequences()
    assert known.admit_lesson("a", 0, 3) and known.admit("b", 0, 0)
    held = state.State(Scopes(lessons), offsets={1: 9}, sequences=known)
    state.save(lessons, held)
    resumed = state.resumed(lessons)
    assert resumed.offsets == {1: 9} and not state.resumed(own).offsets
    known = resumed.sequences
    assert not known.admit_lesson("a", 0, 3) and known.admit_lesson("a", 0, 9)


OLDER = "hvd.learner.v7"


def kept_of(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*.safetensors*")}


def saved_by_an_older_release(settings: LearnerSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as older:
        older.setattr(checkpoint, "FORMAT", OLDER)
        held = state.State(Scopes(settings), offsets={0: 7})
        for _ in range(2):
            held.scopes.of("scope", 1)
            state.save(settings, held)


def test_the_files_of_another_release_are_set_aside_and_lead_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settings = LearnerSettings(state_dir=tmp_path)
    saved_by_an_older_release(settings, monkeypatch)
    before, aside = kept_of(tmp_path), tmp_path / f"older-{OLDER}"
    held = state.resumed(settings)
    assert not held.offsets and not held.scopes.entries
    assert OLDER in caplog.text and "built anew" in caplog.text and "damaged" not in caplog.text
    for _ in range(3):
        held.scopes.of("scope", 1)
        state.save(settings, held)
    assert kept_of(aside) == before
    with monkeypatch.context() as back:  # a person has not moved them yet
        back.setattr(checkpoint, "FORMAT", OLDER)
        assert not state.resumed(settings).offsets and kept_of(aside) == before
        for path in aside.iterdir():
            path.replace(tmp_path / path.name)
        resumed = state.resumed(settings)
        assert resumed.offsets == {0: 7} and resumed.scopes.of("scope").total == 0
    saved_by_an_older_release(LearnerSettings(state_dir=tmp_path), monkeypatch)


def test_what_was_set_aside_is_never_written_over_and_the_newest_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, aside = LearnerSettings(state_dir=tmp_path), tmp_path / f"older-{OLDER}"
    saved_by_an_older_release(settings, monkeypatch)
    before = kept_of(tmp_path)
    held = state.resumed(settings)
    for _ in range(2):
        held.scopes.of("scope", 1)
        state.save(settings, held)
    # somebody moves the checkpoint back, and forgets the scopes
    (aside / settings.checkpoint_path.name).replace(settings.checkpoint_path)
    assert not state.resumed(settings).offsets
    assert kept_of(aside) | kept_of(tmp_path / f"older-{OLDER}.1") >= before
    (tmp_path / "older-notes").write_text("not a folder")
    for _ in range(3):
        saved_by_an_older_release(settings, monkeypatch)
        assert not state.resumed(settings).offsets and not settings.checkpoint_path.exists()
    assert len([each for each in tmp_path.glob("older-*") if each.is_dir()]) == state.KEPT


@pytest.mark.parametrize("dies_at", range(3))
def test_a_kill_while_they_are_set_aside_loses_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies_at: int
) -> None:
    settings = LearnerSettings(state_dir=tmp_path)
    saved_by_an_older_release(settings, monkeypatch)
    before, replace, calls = kept_of(tmp_path), Path.replace, iter(range(9))

    def dying(self: Path, target: Path) -> Path:
        if next(calls) == dies_at:
            raise KeyboardInterrupt
        return replace(self, target)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Path, "replace", dying)
        state.resumed(settings)
    assert not state.resumed(settings).offsets
    assert kept_of(tmp_path / f"older-{OLDER}") == before


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
