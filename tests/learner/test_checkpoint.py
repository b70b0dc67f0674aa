"""One transaction, one learner a folder: a kill undoes a part of a save; damage is set aside."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

import numpy as np
import pytest

from decoder.contracts.errors import SettingsError
from learner import checkpoint, state
from learner.checkpoint import Store
from learner.ingest.sequences import Sequences
from learner.scopes import Scopes
from learner.settings import LearnerSettings
from learner.state_dir import learner_id, locked

ARRAYS = {"ids": np.arange(5, dtype=np.uint64), "flags": np.array([True, False])}


def tree(offset: int) -> dict[str, object]:
    return {"arrays": ARRAYS, "offset": offset}


def saved(path: Path, *offsets: int) -> None:
    store = Store(path)
    for offset in offsets:
        store.put("state", tree(offset))
        store.commit()
    store.close()


def offset_at(path: Path) -> int | None:
    store = Store(path)
    found = [int(each["offset"]) for each in store.get("state")]
    store.close()
    return found[0] if found else None


DIES: Final = """
import os, sys
from pathlib import Path
from learner.checkpoint import Store
store = Store(Path(sys.argv[1]))
store.put("state", {"offset": 3})
store.put("rows", {"offset": 3}, number=7)
if sys.argv[2] == "committed":
    store.commit()
os._exit(9)
"""


@pytest.mark.parametrize("when, offset", [("before", 2), ("committed", 3)])
def test_a_save_is_atomic_under_kills(tmp_path: Path, when: str, offset: int) -> None:
    path = tmp_path / "state.db"
    saved(path, 1, 2)
    subprocess.run([sys.executable, "-c", DIES, path, when], check=False)
    assert offset_at(path) == offset
    store = Store(path)
    assert bool(store.get("rows", below=8)) == (when == "committed")
    store.close()
    saved(path, 4)
    assert offset_at(path) == 4


def test_a_full_disk_keeps_the_last_save(tmp_path: Path) -> None:
    settings = LearnerSettings(state_dir=tmp_path)
    held = state.State(Scopes(settings), offsets={0: 1})
    state.save(settings, held)
    store = held.scopes.store
    store._db.execute("PRAGMA max_page_count = 1")  # no less than there is: as a disk without room
    large = state.State(held.scopes, offsets={0: 2}, refused={"x" * 100_000: 1})
    for _ in range(2):
        with pytest.raises(OSError, match="full"):
            state.save(settings, large)
        assert state.load(settings).offsets == {0: 1}
    store._db.execute("PRAGMA max_page_count = 1000000")
    state.save(settings, large)
    assert state.load(settings).offsets == {0: 2}


def damaged(data: bytearray, how: str) -> bytes:
    if how == "flipped":
        for place in range(100, 2_000):
            data[place] ^= 0xFF
    return {"truncated": bytes(data[: len(data) // 2]), "empty": b""}.get(how, bytes(data))


@pytest.mark.parametrize("how", ["truncated", "flipped", "none of ours"])
def test_a_damaged_store_is_set_aside_and_saving_continues(
    tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    settings = LearnerSettings(state_dir=tmp_path)
    held = state.State(Scopes(settings), offsets={0: 1}, refused={"x" * 100_000: 1})
    state.save(settings, held)
    held.scopes.store.close()
    data = bytearray(settings.store_path.read_bytes())
    spoilt = b"no database at all" * 99 if how == "none of ours" else damaged(data, how)
    settings.store_path.write_bytes(spoilt)
    anew = state.load(settings)
    assert not anew.offsets and "is unreadable" in caplog.text and "is rebuilt" in caplog.text
    assert (tmp_path / "older-damaged" / "state.db").read_bytes() == spoilt
    state.save(settings, state.State(anew.scopes, offsets={0: 5}))
    assert state.load(settings).offsets == {0: 5}


def test_a_damaged_tree_fails_its_digest(tmp_path: Path) -> None:
    store = Store(tmp_path / "state.db")
    data = bytearray(checkpoint.pack(tree(1)))
    data[-1] ^= 1
    store._write("INSERT INTO trees VALUES ('state', 0, 0, ?)", bytes(data))
    with pytest.raises(ValueError, match="digest"):
        store.get("state")
    store.close()


def test_an_unusable_store_is_reported_in_one_sentence(tmp_path: Path) -> None:
    settings = LearnerSettings(state_dir=tmp_path)
    settings.store_path.mkdir()
    with pytest.raises(SettingsError, match=r"state\.db is unusable"):
        state.load(settings)


def test_the_files_of_the_release_before_are_set_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("checkpoint.safetensors", "checkpoint.safetensors.previous", "scopes/a.1"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    held = state.load(LearnerSettings(state_dir=tmp_path))
    assert not held.offsets and "files are kept in" in caplog.text
    assert (tmp_path / "older-files" / "scopes" / "a.1").read_text() == "scopes/a.1"
    assert not (tmp_path / "checkpoint.safetensors").exists()


def test_offsets_of_another_topic_are_not_resumed(tmp_path: Path) -> None:
    own = LearnerSettings(state_dir=tmp_path)
    lessons = LearnerSettings(state_dir=tmp_path, intake="lessons")
    state.save(own, state.State(Scopes(own), offsets={0: 7}))
    assert state.load(own).offsets == {0: 7} and not state.load(lessons).offsets
    known = Sequences()
    assert known.admit_sparse("a", 0, 3) and known.admit("b", 0, 0)
    held = state.State(Scopes(lessons), offsets={1: 9}, sequences=known)
    state.save(lessons, held)
    resumed = state.load(lessons)
    assert resumed.offsets == {1: 9} and not state.load(own).offsets
    known = resumed.sequences
    assert not known.admit_sparse("a", 0, 3) and known.admit_sparse("a", 0, 9)


OLDER = "hvd.learner.v7"


def kept_of(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("state.db*")}


def saved_by_an_older_release(settings: LearnerSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as older:
        older.setattr(checkpoint, "FORMAT", OLDER)
        held = state.State(Scopes(settings), offsets={0: 7})
        for _ in range(2):
            held.scopes.get("scope", 1)
            state.save(settings, held)
        held.scopes.store.close()


def test_files_of_another_release_are_set_aside_and_can_be_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settings = LearnerSettings(state_dir=tmp_path)
    saved_by_an_older_release(settings, monkeypatch)
    before, aside = kept_of(tmp_path), tmp_path / f"older-{OLDER}"
    held = state.load(settings)
    assert not held.offsets and not held.scopes.events
    assert OLDER in caplog.text and "is rebuilt" in caplog.text and "damaged" not in caplog.text
    for _ in range(3):
        held.scopes.get("scope", 1)
        state.save(settings, held)
    held.scopes.store.close()
    assert kept_of(aside) == before
    with monkeypatch.context() as back:  # a person has not moved them yet
        back.setattr(checkpoint, "FORMAT", OLDER)
        assert not state.load(settings).offsets and kept_of(aside) == before
        for path in tmp_path.glob("state.db*"):
            path.unlink()
        for path in aside.iterdir():
            path.replace(tmp_path / path.name)
        resumed = state.load(settings)
        assert resumed.offsets == {0: 7} and resumed.scopes.get("scope").total == 0
    saved_by_an_older_release(LearnerSettings(state_dir=tmp_path), monkeypatch)


def test_set_aside_files_are_never_overwritten_and_the_newest_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, aside = LearnerSettings(state_dir=tmp_path), tmp_path / f"older-{OLDER}"
    (tmp_path / "older-notes").write_text("not a folder")
    for turn in range(4):
        saved_by_an_older_release(settings, monkeypatch)
        resumed = state.load(settings)
        assert not resumed.offsets
        resumed.scopes.store.close()
        settings.store_path.unlink()
        assert (tmp_path / f"older-{OLDER}{f'.{turn}' * bool(turn)}" / "state.db").exists()
    assert len([each for each in tmp_path.glob("older-*") if each.is_dir()]) == state.MAX_FOLDERS
    assert not aside.exists(), "the oldest went"


def test_a_kill_while_setting_files_aside_loses_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = LearnerSettings(state_dir=tmp_path)
    for name in ("checkpoint.safetensors", "checkpoint.safetensors.previous", "scopes"):
        (tmp_path / name).write_text(name)
    before, replace, calls = (
        {each.name for each in tmp_path.iterdir()},
        Path.replace,
        iter(range(9)),
    )

    def dying(self: Path, target: Path) -> Path:
        if next(calls) == 1:
            raise KeyboardInterrupt
        return replace(self, target)

    for _ in range(2):
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(Path, "replace", dying)
            calls = iter(range(9))
            state.load(settings)
    assert not state.load(settings).offsets
    assert {each.name for each in (tmp_path / "older-files").iterdir()} == before


def test_a_second_learner_in_a_state_directory_is_refused(tmp_path: Path) -> None:
    with (
        locked(tmp_path / "a"),
        locked(tmp_path / "b"),
        pytest.raises(SettingsError, match="HVD_LEARNER_STATE_DIR"),
        locked(tmp_path / "a"),
    ):
        pass
    with locked(tmp_path / "a"):
        pass


def test_the_learner_id_is_stable(tmp_path: Path) -> None:
    name = learner_id(tmp_path / "a")
    assert name == learner_id(tmp_path / "a") != learner_id(tmp_path / "b")


def test_a_truncated_learner_id_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "holder").write_text("")
    name = learner_id(tmp_path)
    assert name.startswith("learner-") and name == learner_id(tmp_path)


def test_an_unusable_state_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    nowhere = tmp_path / "file" / "learner"
    for use in (learner_id, lambda folder: locked(folder).__enter__()):
        with pytest.raises(SettingsError, match=r"is unusable .* HVD_LEARNER_STATE_DIR"):
            use(nowhere)
