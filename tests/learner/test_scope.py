"""A scope is a function of the rows it was fed; of a thousand names a handful are in memory."""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from decoder.contracts.bundle import Policy, frequency_policy
from decoder.policy.estimate import predict
from decoder.policy.probes import from_bytes, to_bytes
from learner import checkpoint, scopes, state
from learner.checkpoint import Store
from learner.evaluation.contest import AGES, FIRST, RETUNED, Challenger
from learner.evaluation.skill import skill_of
from learner.scope import BLOCK, Scope
from learner.scopes import Scopes
from learner.settings import LearnerSettings
from learner.training import train
from learner.training.learners import FAST, PER_SECOND, RECENT, SLOW, STEPS, steps_at
from learner.training.rows import Buffer, Rows, joined
from tests.events import from_events
from tests.learner.stream import kept
from tests.learner.traffic import Traffic

SETTINGS = LearnerSettings(buffer_events=2_000, min_events=200, candidate_every=128)


def rows_of(requests: int, **traffic: Any) -> Rows:
    return from_events(Traffic(**traffic).events(requests))


@pytest.fixture(scope="module")
def first() -> Policy:
    """Learned from two hundred requests."""
    rows = rows_of(200, seed=1)
    return replace(train.export(train.fit(rows), "s", 6.0, rows.features), version=1)


def served(scope: Scope, rows: Rows, each: int = 100) -> list[Challenger]:
    """Feed ``rows`` and crown whoever wins; who did."""
    won = []
    for at in range(0, len(rows), each):
        scope.feed(rows.take(np.arange(at, min(at + each, len(rows)))))
        candidate = scope.candidate()
        if candidate is not None:
            won.append(candidate)
            scope.crown(replace(candidate.policy, version=scope.version + 1))
    return won


def test_the_papers_kind_is_learned_and_its_threshold_is_retuned(first: Policy) -> None:
    settings = SETTINGS.model_copy(update={"kind": "payoff"})
    scope = Scope("s", settings, frequency_policy("s"))
    won = served(scope, rows_of(150, seed=2))
    policy = from_bytes(to_bytes(scope.champion), "s")
    widths = [len(bias) for _, bias in policy.layers]
    assert won and policy.kind == "payoff" and widths == [256, 256, 1]
    assert policy.threshold == scope.champion.threshold != 6.0
    others = rows_of(40, seed=98)
    assert skill_of(policy, others).figures()["f1"] > 0.9
    told = checkpoint.unpack(checkpoint.pack(scope.snapshot()))
    again = Scope.restored("s", SETTINGS, told, scope.buffer.recent(2_000))
    again.feed(rows_of(10, seed=4))
    assert again.learners.trainer is not None and again.learners.trainer.kind == "survival"


def test_costs_alone_retune_a_threshold() -> None:
    """The network stays: what contends is the champion with another threshold."""
    rows = rows_of(100, seed=1)
    served_one = replace(
        train.export(train.fit(rows, "payoff"), "s", 0.0, rows.features), version=1
    )
    settings = SETTINGS.model_copy(update={"kind": "payoff"})
    scope = Scope("s", settings, served_one)
    scope.feed(rows_of(60, seed=5))
    seat = scope.contest.seats[RETUNED]
    assert seat is not None and seat.origin == "retuned" and seat.policy.threshold > 0.5
    assert all(
        np.array_equal(mine, theirs)
        for one, other in zip(seat.policy.layers, served_one.layers, strict=True)
        for mine, theirs in zip(one, other, strict=True)
    )


def test_steps_are_fewer_where_drafts_come_faster() -> None:
    settings, steps = SETTINGS.model_copy(update={"buffer_events": 20_000}), []
    for rate in (10.0, PER_SECOND, 4 * PER_SECOND, 1e6):
        rows = rows_of(2 * RECENT // 20, seed=3)
        time = np.arange(len(rows)) / rate
        scope = Scope("s", settings, frequency_policy("s"))
        scope.feed(replace(rows, time=time))
        steps.append(steps_at(scope.buffer))
    assert steps == [STEPS, STEPS, STEPS // 4, 1]
    assert steps_at(replaced_times(scope.buffer, 7.0)) == STEPS, "a clock that stands still"


def replaced_times(buffer: Buffer, time: float) -> Buffer:
    rows = buffer.recent(len(buffer))
    return Buffer(buffer.capacity, replace(rows, time=np.full(len(rows), time)), buffer.total)


def error(policy: Policy, rows: Rows) -> float:
    return float(np.abs(predict(policy, rows.features) - rows.accepted).mean())


ROWS = joined([rows_of(60, seed=2), rows_of(60, seed=3, sign=-1)])


@pytest.mark.parametrize("sizes", [(1,), (7, 64, 300), (997,)])
def test_neither_the_reading_nor_a_restart_changes_anything(sizes: Sequence[int]) -> None:
    rows = ROWS.take(np.arange(900))
    whole, pieces = (Scope("s", SETTINGS, frequency_policy("s")) for _ in range(2))
    expected = whole.feed(rows)
    at, alarms, n = 0, [], 0
    while at < len(rows):
        size = sizes[n % len(sizes)]
        alarms += pieces.feed(rows.take(np.arange(at, min(at + size, len(rows)))))
        at, n = at + size, n + 1
        if n % 5 == 0 and len(sizes) > 1:
            told = checkpoint.unpack(checkpoint.pack(pieces.snapshot()))
            pieces = Scope.restored("s", SETTINGS, told, pieces.buffer.recent(2_000))
    assert kept(pieces) == kept(whole) and alarms == expected
    mine, theirs = pieces.candidate(), whole.candidate()
    assert (mine is None) == (theirs is None)


def test_a_new_scope_learns_to_beat_counting() -> None:
    scope = Scope("s", SETTINGS, frequency_policy("s"))
    won = served(scope, rows_of(300, seed=2))
    assert won and won[0].metrics["gain"] > 0.05
    policy = from_bytes(to_bytes(won[0].policy), "s")
    assert policy.kind == "survival" and scope.window()["step_fixed_us"] > 1.0
    assert scope.promotions == scope.candidates == len(won) and scope.version == len(won)
    others = rows_of(40, seed=98)
    assert error(scope.champion, others) < 0.5 * error(frequency_policy("s"), others)
    assert scope.skill.figures()["mae"] < 2.0
    last, promotions = scope.champion, scope.promotions
    scope.crown(replace(frequency_policy("s"), version=50))
    scope.crown(last)
    assert scope.promotions == promotions, "gone back to"


def test_traffic_as_usual_makes_nothing_worse(first: Policy) -> None:
    scope = Scope("s", SETTINGS, first)
    served(scope, rows_of(150, seed=6))
    others = rows_of(40, seed=98)
    assert not any(scope.alarms.values())
    assert error(scope.champion, others) <= 1.02 * error(first, others)


def test_traffic_that_turns_about_is_followed_and_nothing_is_forgotten(first: Policy) -> None:
    scope = Scope("s", SETTINGS, first)
    usual, turned = rows_of(60, seed=5), rows_of(250, seed=6, sign=-1)
    assert served(scope, usual) == []
    won = served(scope, turned)
    held = scope.total - scope.total % BLOCK
    assert won and len(scope.buffer) == min(held, SETTINGS.buffer_events)
    others = rows_of(40, seed=99, sign=-1)
    assert error(first, others) > 10.0
    assert error(scope.champion, others) < 0.5 * error(first, others)


def test_an_alarm_leaves_no_challenger_that_was_made_for_other_traffic(first: Policy) -> None:
    scope = Scope("s", SETTINGS.model_copy(update={"candidate_every": BLOCK}), first)
    scope.feed(rows_of(60, seed=5))
    assert all(scope.contest.seats[: len(AGES)])
    turned, alarms = rows_of(250, seed=6, sign=-1), 0
    for at in range(0, len(turned) - BLOCK, BLOCK):
        if any(each.stream == "cache" for each in scope.feed(turned.part(at, at + BLOCK))):
            seated = [one for one in scope.contest.seats[: len(AGES)] if one is not None]
            assert seated and all(one.since == scope.buffer.total for one in seated)
            alarms += 1
    assert alarms


def test_the_first_policy_comes_back_when_the_traffic_does(first: Policy) -> None:
    rows = rows_of(200, seed=9, sign=-1)
    turned = replace(train.export(train.fit(rows), "s", 6.0, rows.features), version=2)
    scope = Scope("s", SETTINGS.model_copy(update={"candidate_every": 10**9}), first)
    scope.crown(turned)
    assert served(scope, rows_of(60, seed=6, sign=-1)) == []
    won = served(scope, rows_of(60, seed=7), each=20)
    assert won[-1].origin == "first"
    assert scope.champion.digest == first.digest and scope.contest.seats[FIRST] is None


def test_what_a_person_serves_is_learned_on_from(first: Policy) -> None:
    scope = Scope("s", SETTINGS, frequency_policy("s"))
    scope.feed(rows_of(60, seed=2))
    scope.crown(replace(first, version=9))
    assert scope.version == 9 and scope.promotions == 0
    assert scope.learners.trainer is not None
    (weight, _), *_ = scope.learners.trainer.layers(SLOW)
    assert np.array_equal(weight, first.layers[0][0])
    seat = scope.contest.seats[FIRST]
    assert seat is not None and seat.policy.kind == "frequency"
    before = scope.learners.trainer.weights[FAST].copy()
    scope.crown(replace(first, version=10))
    assert scope.version == 10 and np.array_equal(scope.learners.trainer.weights[FAST], before)


FEW_ROWS = from_events(Traffic(seed=2).events(10))


def settings_in(folder: Path) -> LearnerSettings:
    return LearnerSettings(state_dir=folder, awake_scopes=3, buffer_events=500, min_events=50)


def test_a_scope_that_rested_goes_on_as_if_it_had_not(tmp_path: Path) -> None:
    rested, never = Scopes(settings_in(tmp_path / "a")), Scopes(settings_in(tmp_path / "b"))
    for cut in range(0, 200, 25):
        part = FEW_ROWS.take(np.arange(cut, cut + 25))
        rested.of("mine", 25).feed(part)
        for other in "abc":
            rested.of(other, 25).feed(part)
        assert "mine" not in rested.awake and len(rested.awake) == 3
        never.of("mine", 25).feed(part)
    assert rested.entries["mine"] == 200
    assert kept(rested.of("mine")) == kept(never.of("mine"))


def test_a_checkpoint_adds_what_came_and_never_writes_the_buffer_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scopes, "PART", 64)
    settings = settings_in(tmp_path)
    held, never = Scopes(settings), Scopes(settings_in(tmp_path / "never"))
    put, written = held.store.put, Counter[str]()

    def counted(name: str, tree: checkpoint.Tree, *rest: int, **options: int) -> int:
        written[name] += len(tree.get("time", ()))
        return put(name, tree, *rest, **options)

    monkeypatch.setattr(held.store, "put", counted)
    for turn in range(60):  # the buffer of 500 comes round three times
        part = FEW_ROWS.take(np.arange(25 * turn, 25 * turn + 25) % len(FEW_ROWS))
        for each in (held, never):
            each.of("mine", 25).feed(part)
        state.save(settings, state.State(held))
    assert written["rows mine"] < 3 * 60 * 25, "each row a few times"
    assert len(held.store.get("rows mine", below=99)) <= 500 // 64 + 2
    again = state.resumed(settings).scopes
    assert kept(again.of("mine")) == kept(never.of("mine"))
    spoil(held, "rows mine")
    anew = state.resumed(settings).scopes
    assert anew.of("mine").total == 0
    for _ in range(2):  # what begins again is saved again
        anew.of("mine", 25).feed(FEW_ROWS.take(np.arange(25)))
        state.save(settings, state.State(anew))
    assert state.resumed(settings).scopes.of("mine").total == 50


def spoil(held: Scopes, name: str) -> None:
    """As a disk does that returns other bytes than were written."""
    held.store._write("UPDATE trees SET data = ? WHERE name = ?", b"gone", name)
    held.store.commit()


def test_rows_that_outlive_their_scope_are_no_other_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scopes, "PART", 64)
    settings = settings_in(tmp_path)
    held = Scopes(settings)
    held.of("mine", 400).feed(FEW_ROWS.take(np.arange(400) % len(FEW_ROWS)))
    state.save(settings, state.State(held))
    spoil(held, "scope mine")
    monkeypatch.setattr(Store, "drop", lambda *_, **__: None)
    anew, never = state.resumed(settings).scopes, Scopes(settings_in(tmp_path / "never"))
    for each in (anew, never):
        each.of("mine", 70).feed(FEW_ROWS.take(np.arange(70)))
    state.save(settings, state.State(anew))
    assert kept(state.resumed(settings).scopes.of("mine")) == kept(never.of("mine"))


def test_a_thousand_names_stay_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scopes, "KNOWN", 40)
    settings = settings_in(tmp_path)
    held = Scopes(settings)
    few = FEW_ROWS.take(np.arange(2))
    for number in range(100):
        held.of(f"made-up-{number}", 2).feed(few)
    assert len(held.awake) == 3 and len(held.entries) == 40
    state.save(settings, state.State(held))
    names = held.store._read("SELECT DISTINCT name FROM trees WHERE name LIKE 'scope %'")
    assert len(names) == 40
    again = state.resumed(settings).scopes
    assert list(again.entries) == [f"made-up-{n}" for n in range(60, 100)] and not again.awake
    assert again.of("made-up-60").total == 2


def test_while_checkpoints_fail_the_last_one_stays_and_what_rests_is_counted_as_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, held = settings_in(tmp_path), Scopes(settings_in(tmp_path))
    held.of("one", 10).feed(FEW_ROWS.take(np.arange(10)))
    state.save(settings, state.State(held))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(held.store, "commit", full)
        for turn in range(10):
            for name in ("one", "two"):
                held.of(name, 10).feed(FEW_ROWS.take(np.arange(10 * turn, 10 * turn + 10)))
            with pytest.raises(OSError, match="no space"):
                state.save(settings, state.State(held))
        for name in "abc":
            held.of(name, 1).feed(FEW_ROWS.take(np.arange(1)))
        assert "two" not in held.awake and "one" not in held.awake
        assert state.resumed(settings).scopes.of("one").total == 10
        with pytest.raises(OSError, match="no space"):  # and undoes what rested since
            state.save(settings, state.State(held))
    held.of("one", 5).feed(FEW_ROWS.take(np.arange(5)))
    assert held.lost == {"one": {"disk": 100}}
    state.save(settings, state.State(held))
    again = state.resumed(settings).scopes
    assert (again.of("one").total, again.of("two").total) == (15, 0)
    assert again.lost == {"one": {"disk": 100}, "two": {"disk": 100}}


def test_what_was_consumed_and_is_not_learned_is_counted_by_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The events of a scope are what it has learned from, and what is lost; also behind a save."""
    settings = settings_in(tmp_path)
    held = Scopes(settings)

    def feed(scopes: Scopes, name: str, first: int, count: int) -> None:
        scopes.of(name, count).feed(FEW_ROWS.take(np.arange(first, first + count)))

    def adds_up(scopes: Scopes, name: str) -> bool:
        learned = scopes.of(name).total
        return scopes.entries[name] == learned + sum(scopes.lost.get(name, {}).values())

    feed(held, "one", 0, 50)
    state.save(settings, state.State(held))
    feed(held, "one", 50, 30)
    held.abandon("one", "fault")
    assert held.lost == {"one": {"fault": 30}} and adds_up(held, "one")
    feed(held, "one", 80, 20)
    with monkeypatch.context() as full:

        def refused(*_: object, **__: object) -> None:
            raise OSError(28, "no space left on device")

        full.setattr(held.store, "put", refused)
        for other in "abc":
            feed(held, other, 0, 5)
    assert held.lost == {"one": {"fault": 30, "disk": 20}} and adds_up(held, "one")
    feed(held, "one", 100, 10)
    held.of("one", 7)
    held.pass_over("one", "side", 7)
    held.abandon("one", "fault")
    assert held.lost["one"] == {"fault": 40, "disk": 20, "side": 7} and adds_up(held, "one")
    feed(held, "one", 110, 10)
    state.save(settings, state.State(held, offsets={0: 9}))
    again = state.resumed(settings).scopes
    assert adds_up(again, "one") and again.of("one").total == 60
    spoil(held, "scope one")
    once_more = state.resumed(settings).scopes
    assert adds_up(once_more, "one") and once_more.of("one").total == 0
    assert once_more.lost["one"] == {"fault": 40, "disk": 20, "side": 7, "damaged": 60}
    assert once_more.of("a").total == 5 and state.resumed(settings).offsets == {0: 9}
    assert "one" in caplog.text and "unusable" in caplog.text
