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
from learner.evaluation.challengers import AGES, FIRST, RETUNED, Challenger
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
        scope.update(rows.take(np.arange(at, min(at + each, len(rows)))))
        candidate = scope.take_candidate()
        if candidate is not None:
            won.append(candidate)
            scope.promote(replace(candidate.policy, version=scope.version + 1))
    return won


def test_the_paper_s_network_is_trained_and_its_threshold_retuned(first: Policy) -> None:
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
    again = Scope.restore("s", SETTINGS, told, scope.buffer.recent(2_000))
    again.update(rows_of(10, seed=4))
    assert again.learners.trainer is not None and again.learners.trainer.kind == "survival"


def test_changed_costs_retune_the_threshold() -> None:
    """The network stays: what contends is the champion with another threshold."""
    rows = rows_of(100, seed=1)
    served_one = replace(
        train.export(train.fit(rows, "payoff"), "s", 0.0, rows.features), version=1
    )
    settings = SETTINGS.model_copy(update={"kind": "payoff"})
    scope = Scope("s", settings, served_one)
    scope.update(rows_of(60, seed=5))
    slot = scope.challengers.slots[RETUNED]
    assert slot is not None and slot.origin == "retuned" and slot.policy.threshold > 0.5
    assert all(
        np.array_equal(mine, theirs)
        for one, other in zip(slot.policy.layers, served_one.layers, strict=True)
        for mine, theirs in zip(one, other, strict=True)
    )


def test_faster_arrivals_reduce_optimiser_steps() -> None:
    settings, steps = SETTINGS.model_copy(update={"buffer_events": 20_000}), []
    for rate in (10.0, PER_SECOND, 4 * PER_SECOND, 1e6):
        rows = rows_of(2 * RECENT // 20, seed=3)
        time = np.arange(len(rows)) / rate
        scope = Scope("s", settings, frequency_policy("s"))
        scope.update(replace(rows, time=time))
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
def test_learning_is_independent_of_batching_and_restarts(sizes: Sequence[int]) -> None:
    rows = ROWS.take(np.arange(900))
    whole, pieces = (Scope("s", SETTINGS, frequency_policy("s")) for _ in range(2))
    expected = whole.update(rows)
    at, alarms, n = 0, [], 0
    while at < len(rows):
        size = sizes[n % len(sizes)]
        alarms += pieces.update(rows.take(np.arange(at, min(at + size, len(rows)))))
        at, n = at + size, n + 1
        if n % 5 == 0 and len(sizes) > 1:
            told = checkpoint.unpack(checkpoint.pack(pieces.snapshot()))
            pieces = Scope.restore("s", SETTINGS, told, pieces.buffer.recent(2_000))
    assert kept(pieces) == kept(whole) and alarms == expected
    mine, theirs = pieces.take_candidate(), whole.take_candidate()
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
    scope.promote(replace(frequency_policy("s"), version=50))
    scope.promote(last)
    assert scope.promotions == promotions, "gone back to"


def test_stationary_traffic_does_not_degrade_a_policy(first: Policy) -> None:
    scope = Scope("s", SETTINGS, first)
    served(scope, rows_of(150, seed=6))
    others = rows_of(40, seed=98)
    assert not any(scope.alarms.values())
    assert error(scope.champion, others) <= 1.02 * error(first, others)


def test_changed_traffic_is_followed_and_earlier_learning_kept(first: Policy) -> None:
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
    scope.update(rows_of(60, seed=5))
    assert all(scope.challengers.slots[: len(AGES)])
    turned, alarms = rows_of(250, seed=6, sign=-1), 0
    for at in range(0, len(turned) - BLOCK, BLOCK):
        if any(each.stream == "cache" for each in scope.update(turned.part(at, at + BLOCK))):
            filled = [one for one in scope.challengers.slots[: len(AGES)] if one is not None]
            assert filled and all(one.since == scope.buffer.total for one in filled)
            alarms += 1
    assert alarms


def test_the_first_policy_returns_with_its_traffic(first: Policy) -> None:
    rows = rows_of(200, seed=9, sign=-1)
    turned = replace(train.export(train.fit(rows), "s", 6.0, rows.features), version=2)
    scope = Scope("s", SETTINGS.model_copy(update={"candidate_every": 10**9}), first)
    scope.promote(turned)
    assert served(scope, rows_of(60, seed=6, sign=-1)) == []
    won = served(scope, rows_of(60, seed=7), each=20)
    assert won[-1].origin == "first"
    assert scope.champion.digest == first.digest and scope.challengers.slots[FIRST] is None


def test_training_continues_from_a_policy_that_a_person_serves(first: Policy) -> None:
    scope = Scope("s", SETTINGS, frequency_policy("s"))
    scope.update(rows_of(60, seed=2))
    scope.promote(replace(first, version=9))
    assert scope.version == 9 and scope.promotions == 0
    assert scope.learners.trainer is not None
    (weight, _), *_ = scope.learners.trainer.layers(SLOW)
    assert np.array_equal(weight, first.layers[0][0])
    slot = scope.challengers.slots[FIRST]
    assert slot is not None and slot.policy.kind == "frequency"
    before = scope.learners.trainer.weights[FAST].copy()
    scope.promote(replace(first, version=10))
    assert scope.version == 10 and np.array_equal(scope.learners.trainer.weights[FAST], before)


FEW_ROWS = from_events(Traffic(seed=2).events(10))


def settings_in(folder: Path) -> LearnerSettings:
    return LearnerSettings(state_dir=folder, awake_scopes=3, buffer_events=500, min_events=50)


def test_an_evicted_scope_resumes_exactly(tmp_path: Path) -> None:
    rested, never = Scopes(settings_in(tmp_path / "a")), Scopes(settings_in(tmp_path / "b"))
    for cut in range(0, 200, 25):
        part = FEW_ROWS.take(np.arange(cut, cut + 25))
        rested.get("mine", 25).update(part)
        for other in "abc":
            rested.get(other, 25).update(part)
        assert "mine" not in rested.loaded and len(rested.loaded) == 3
        never.get("mine", 25).update(part)
    assert rested.events["mine"] == 200
    assert kept(rested.get("mine")) == kept(never.get("mine"))


def test_a_checkpoint_writes_new_rows_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
            each.get("mine", 25).update(part)
        state.save(settings, state.State(held))
    assert written["rows mine"] < 3 * 60 * 25, "each row a few times"
    assert len(held.store.get("rows mine", below=99)) <= 500 // 64 + 2
    again = state.load(settings).scopes
    assert kept(again.get("mine")) == kept(never.get("mine"))
    spoil(held, "rows mine")
    anew = state.load(settings).scopes
    assert anew.get("mine").total == 0
    for _ in range(2):  # what begins again is saved again
        anew.get("mine", 25).update(FEW_ROWS.take(np.arange(25)))
        state.save(settings, state.State(anew))
    assert state.load(settings).scopes.get("mine").total == 50


def spoil(held: Scopes, name: str) -> None:
    """As a disk does that returns other bytes than were written."""
    held.store._write("UPDATE trees SET data = ? WHERE name = ?", b"gone", name)
    held.store.commit()


def test_leftover_rows_belong_to_no_other_scope(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scopes, "PART", 64)
    settings = settings_in(tmp_path)
    held = Scopes(settings)
    held.get("mine", 400).update(FEW_ROWS.take(np.arange(400) % len(FEW_ROWS)))
    state.save(settings, state.State(held))
    spoil(held, "scope mine")
    monkeypatch.setattr(Store, "drop", lambda *_, **__: None)
    anew, never = state.load(settings).scopes, Scopes(settings_in(tmp_path / "never"))
    for each in (anew, never):
        each.get("mine", 70).update(FEW_ROWS.take(np.arange(70)))
    state.save(settings, state.State(anew))
    assert kept(state.load(settings).scopes.get("mine")) == kept(never.get("mine"))


def test_the_number_of_scopes_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scopes, "MAX_SCOPES", 40)
    settings = settings_in(tmp_path)
    held = Scopes(settings)
    few = FEW_ROWS.take(np.arange(2))
    for number in range(100):
        held.get(f"made-up-{number}", 2).update(few)
    assert len(held.loaded) == 3 and len(held.events) == 40
    state.save(settings, state.State(held))
    names = held.store._read("SELECT DISTINCT name FROM trees WHERE name LIKE 'scope %'")
    assert len(names) == 40
    again = state.load(settings).scopes
    assert list(again.events) == [f"made-up-{n}" for n in range(60, 100)] and not again.loaded
    assert again.get("made-up-60").total == 2


def test_failed_checkpoints_keep_the_last_one_and_evicted_events_count_as_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, held = settings_in(tmp_path), Scopes(settings_in(tmp_path))
    held.get("one", 10).update(FEW_ROWS.take(np.arange(10)))
    state.save(settings, state.State(held))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(held.store, "commit", full)
        for turn in range(10):
            for name in ("one", "two"):
                held.get(name, 10).update(FEW_ROWS.take(np.arange(10 * turn, 10 * turn + 10)))
            with pytest.raises(OSError, match="no space"):
                state.save(settings, state.State(held))
        for name in "abc":
            held.get(name, 1).update(FEW_ROWS.take(np.arange(1)))
        assert "two" not in held.loaded and "one" not in held.loaded
        assert state.load(settings).scopes.get("one").total == 10
        with pytest.raises(OSError, match="no space"):  # and undoes what rested since
            state.save(settings, state.State(held))
    held.get("one", 5).update(FEW_ROWS.take(np.arange(5)))
    assert held.lost == {"one": {"disk": 100}}
    state.save(settings, state.State(held))
    again = state.load(settings).scopes
    assert (again.get("one").total, again.get("two").total) == (15, 0)
    assert again.lost == {"one": {"disk": 100}, "two": {"disk": 100}}


def test_unlearned_events_are_counted_by_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The events of a scope are what it has learned from, and what is lost; also behind a save."""
    settings = settings_in(tmp_path)
    held = Scopes(settings)

    def feed(scopes: Scopes, name: str, first: int, count: int) -> None:
        scopes.get(name, count).update(FEW_ROWS.take(np.arange(first, first + count)))

    def adds_up(scopes: Scopes, name: str) -> bool:
        learned = scopes.get(name).total
        return scopes.events[name] == learned + sum(scopes.lost.get(name, {}).values())

    feed(held, "one", 0, 50)
    state.save(settings, state.State(held))
    feed(held, "one", 50, 30)
    held.discard("one", "fault")
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
    held.get("one", 7)
    held.count_lost("one", "side", 7)
    held.discard("one", "fault")
    assert held.lost["one"] == {"fault": 40, "disk": 20, "side": 7} and adds_up(held, "one")
    feed(held, "one", 110, 10)
    state.save(settings, state.State(held, offsets={0: 9}))
    again = state.load(settings).scopes
    assert adds_up(again, "one") and again.get("one").total == 60
    spoil(held, "scope one")
    once_more = state.load(settings).scopes
    assert adds_up(once_more, "one") and once_more.get("one").total == 0
    assert once_more.lost["one"] == {"fault": 40, "disk": 20, "side": 7, "damaged": 60}
    assert once_more.get("a").total == 5 and state.load(settings).offsets == {0: 9}
    assert "one" in caplog.text and "learning anew" in caplog.text
