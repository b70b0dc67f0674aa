"""A thousand names on the topic, a handful of scopes in memory."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from learner import checkpoint, scopes, state
from learner.rows import Rows, from_events
from learner.scopes import Scopes
from learner.settings import LearnerSettings
from tests.learner.traffic import Traffic

ROWS = from_events(Traffic(seed=2).events(10))


def settings_in(folder: Path) -> LearnerSettings:
    return LearnerSettings(state_dir=folder, awake_scopes=3, buffer_events=500, min_events=50)


def same(one: checkpoint.Arrays, other: checkpoint.Arrays) -> bool:
    return one.keys() == other.keys() and all(
        np.array_equal(one[n], other[n], equal_nan=one[n].dtype.kind == "f") for n in one
    )


def test_a_scope_that_rested_goes_on_as_if_it_had_not(tmp_path: Path) -> None:
    kept, never = Scopes(settings_in(tmp_path / "a")), Scopes(settings_in(tmp_path / "b"))
    for cut in range(0, 200, 25):
        part = ROWS.take(np.arange(cut, cut + 25))
        kept.of("mine", 25).feed(part)
        for other in "abc":
            kept.of(other, 25).feed(part)
        assert "mine" not in kept.awake and len(kept.awake) == 3
        never.of("mine", 25).feed(part)
    assert kept.entries["mine"].events == 200
    (arrays, numbers), (others, twins) = kept.of("mine").snapshot(), never.of("mine").snapshot()
    assert numbers == twins and same(arrays, others)


def test_a_thousand_names_stay_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scopes, "KNOWN", 40)
    settings = settings_in(tmp_path)
    held = Scopes(settings)
    few = ROWS.take(np.arange(2))
    for number in range(100):
        held.of(f"made-up-{number}", 2).feed(few)
    assert len(held.awake) == 3 and len(held.entries) == 40
    for _ in range(2):  # files go once no checkpoint names them
        state.save(settings, state.State(held))
    assert len(list((tmp_path / "scopes").iterdir())) == 40
    again = state.resumed(settings).scopes
    assert list(again.entries) == [f"made-up-{n}" for n in range(60, 100)] and not again.awake
    assert again.of("made-up-60").total == 2


def test_a_damaged_file_costs_its_scope_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = settings_in(tmp_path)
    held = Scopes(settings)
    for name in ("one", "two"):
        held.of(name, 50).feed(ROWS.take(np.arange(50)))
    state.save(settings, state.State(held, {0: 9}))
    (tmp_path / "scopes" / held.entries["one"].file).write_bytes(b"gone")
    again = state.resumed(settings)
    assert again.offsets == {0: 9}
    assert (again.scopes.of("one").total, again.scopes.of("two").total) == (0, 50)
    assert "one" in caplog.text and "unusable" in caplog.text


def test_while_checkpoints_fail_files_do_not_pile_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what the last one names, what rests since then, and what is newest all stay."""
    settings, held = settings_in(tmp_path), Scopes(settings_in(tmp_path))
    held.of("one", 10).feed(ROWS.take(np.arange(10)))
    for _ in range(2):
        state.save(settings, state.State(held))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "save", full)
        for turn in range(10):
            for name in ("one", "two"):
                held.of(name, 10).feed(ROWS.take(np.arange(10 * turn, 10 * turn + 10)))
            with pytest.raises(OSError, match="no space"):
                state.save(settings, state.State(held))
        for name in "abc":
            held.of(name, 1).feed(ROWS.take(np.arange(1)))
        assert "two" not in held.awake and len(list((tmp_path / "scopes").iterdir())) == 3
    assert state.resumed(settings).scopes.of("one").total == 10
    state.save(settings, state.State(held))
    again = state.resumed(settings).scopes
    assert (again.of("one").total, again.of("two").total) == (110, 100)


def test_a_scope_goes_back_to_what_was_saved(tmp_path: Path) -> None:
    settings = settings_in(tmp_path)
    held = Scopes(settings)
    held.of("one", 50).feed(ROWS.take(np.arange(50)))
    state.save(settings, state.State(held))
    held.of("one", 50).feed(ROWS.take(np.arange(50, 100)))
    held.abandon("one", "fault")
    assert held.of("one").total == 50


def test_what_was_consumed_and_is_not_learned_is_counted_by_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The events of a scope are what it has learned from, and what is lost; also behind a save."""
    settings = settings_in(tmp_path)
    held = Scopes(settings)

    def feed(scopes: Scopes, name: str, first: int, count: int) -> None:
        scopes.of(name, count).feed(ROWS.take(np.arange(first, first + count)))

    def adds_up(scopes: Scopes, name: str) -> bool:
        learned = scopes.of(name).total
        return scopes.entries[name].events == learned + sum(scopes.lost.get(name, {}).values())

    feed(held, "one", 0, 50)
    state.save(settings, state.State(held))
    feed(held, "one", 50, 30)
    held.abandon("one", "fault")
    assert held.lost == {"one": {"fault": 30}} and adds_up(held, "one")
    feed(held, "one", 80, 20)
    with monkeypatch.context() as full:

        def refused(*_: object) -> None:
            raise OSError(28, "no space left on device")

        full.setattr(checkpoint, "write", refused)
        for other in "abc":
            feed(held, other, 0, 5)
    assert held.lost == {"one": {"fault": 30, "disk": 20}} and adds_up(held, "one")
    feed(held, "one", 100, 10)
    held.of("one", 7)
    held.pass_over("one", "side", 7)
    held.abandon("one", "fault")
    assert held.lost["one"] == {"fault": 40, "disk": 20, "side": 7} and adds_up(held, "one")
    feed(held, "one", 110, 10)
    state.save(settings, state.State(held))
    again = state.resumed(settings).scopes
    assert adds_up(again, "one") and again.of("one").total == 60
    (tmp_path / "scopes" / again.entries["one"].file).write_bytes(b"gone")
    once_more = state.resumed(settings).scopes
    assert adds_up(once_more, "one") and once_more.of("one").total == 0
    assert once_more.lost["one"] == {"fault": 40, "disk": 20, "side": 7, "damaged": 60}


def arriving(n: int, seconds: float, seed: int) -> Rows:
    """``n`` drafts within so many seconds, twenty a request."""
    names = np.random.default_rng(seed).integers(0, 2**64, -(-n // 20), np.uint64).repeat(20)[:n]
    rows = ROWS.take(np.arange(n) % len(ROWS))
    return replace(rows, request=names, session=names, time=np.linspace(0.0, seconds, n))


def test_a_scope_that_sends_a_hundred_times_as_much_costs_its_share_and_nobody_else(
    tmp_path: Path,
) -> None:
    settings = settings_in(tmp_path)
    loud, quiet = arriving(20_000, 10.0, 1), arriving(200, 10.0, 2)
    beside, alone = Scopes(settings), Scopes(settings)
    for turn in range(10):
        beside.of("loud").feed(loud.take(np.arange(turn * 2_000, (turn + 1) * 2_000)))
        part = quiet.take(np.arange(turn * 20, (turn + 1) * 20))
        beside.of("quiet").feed(part)
        alone.of("quiet").feed(part)
    # what settles the sample comes on top: a window each time that its share is halved
    assert beside.of("loud").buffer.total < 3 * 10.0 * settings.rows_per_second
    assert beside.of("loud").total == 20_000 and beside.of("quiet").buffer.total == 192
    (arrays, numbers), (others, twins) = (s.of("quiet").snapshot() for s in (beside, alone))
    assert numbers == twins and same(arrays, others)
