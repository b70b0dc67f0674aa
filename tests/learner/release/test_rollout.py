"""Where a rollout goes by what it is told: aliases and figures."""

from __future__ import annotations

from dataclasses import replace

import pytest

from decoder.contracts.bundle import CHAMPION, TRIAL
from learner import checkpoint
from learner.evaluation.effect import WIDTH
from learner.release.comparison import Comparison, Outcome
from learner.release.registry import Standing
from learner.release.rollout import EARLY, TRANSITIONS, Event, Rollout, State
from learner.settings import LearnerSettings
from tests.learner.release.rounds import rounds

NOW = 1e9
RULES = LearnerSettings()
FIVE = Standing("s", champion=5)


def told(rollout: Rollout) -> tuple[str, int, int]:
    one = rollout.one
    return ("", 0, 0) if one is None else (one.kind, one.version, one.over)


def on_trial() -> Rollout:
    rollout = Rollout(champion=5)
    rollout.follow(replace(FIVE, trial=7), NOW)
    assert rollout.one is not None
    rollout.one.published(1_000_001, NOW)
    return rollout


def played(rollout: Rollout, ratio: float, count: int = 400) -> Rollout:
    assert rollout.one is not None
    sides = {TRIAL: (rollout.one.version, ratio), CHAMPION: (rollout.one.over, 1.0)}
    for each in rounds(count, sides, noise=0.05):
        rollout.one.take(each, NOW)
    return rollout


@pytest.mark.parametrize(
    ("standing", "why", "then"),
    [
        (replace(FIVE, pinned=3), "version 3 is pinned", ("", 0, 0)),
        (replace(FIVE, champion=4), "version 4 was made champion", ("", 0, 0)),
        (replace(FIVE, champion=6), "version 6 was made champion", ("watch", 5, 6)),
        (replace(FIVE, champion=7), "version 7 was made champion", ("watch", 5, 7)),
        (replace(FIVE, trial=6), "version 6 was put on trial", ("trial", 6, 5)),
        (FIVE, "alias trial was taken away", ("", 0, 0)),
        (Standing("s"), "version 0 was made champion", ("", 0, 0)),
    ],
)
def test_a_person_may_move_anything_at_any_moment(
    standing: Standing, why: str, then: tuple[str, int, int]
) -> None:
    for decided in (False, True):
        rollout = on_trial()
        if decided:
            assert played(rollout, 0.5).decide(RULES)
        ended = rollout.follow(standing, NOW)
        assert ended is not None and told(rollout) == then
        assert ended[0].version == 7 and (decided or ended[1] == Outcome("give up", why))


@pytest.mark.parametrize("event", Event)
def test_a_rollout_goes_where_the_table_says_and_nowhere_else(event: Event) -> None:
    decided = on_trial()
    decided.step(Event.DECIDED, Outcome("drop", "slower"))
    for rollout in (Rollout(champion=5), on_trial(), decided):
        state, before = rollout.state, replace(rollout)
        begun = Comparison("watch", 5, 6) if event in (Event.BEGUN, Event.FAILED) else None
        to = TRANSITIONS.get((state, event))
        if to is None:
            with pytest.raises(KeyError):
                rollout.step(event, Outcome("keep", "so"), begun)
            assert rollout == before, "what leads nowhere changes nothing"
            continue
        rollout.step(event, Outcome("keep", "so"), begun)
        assert rollout.state is to
        assert rollout.one is (begun or (None if to is State.IDLE else before.one))
        assert (rollout.outcome is not None) == (to is State.ENDING)


def test_a_comparison_whose_figures_fail_ends_without_them() -> None:
    rollout = played(on_trial(), 1.1)
    rollout.fail()
    assert rollout.state is State.ENDING and rollout.outcome is not None
    assert rollout.one is not None and (rollout.one.version, rollout.one.played) == (7, 0)
    Rollout().fail()


def test_what_alias_trial_names_is_tried_once() -> None:
    rollout, asked = on_trial(), replace(FIVE, trial=7)
    assert played(rollout, 0.5).decide(RULES)
    rollout.step(Event.CARRIED_OUT, Outcome("drop", "slower"))
    assert rollout.follow(asked, NOW) is None and told(rollout) == ("", 0, 0)
    rollout.follow(FIVE, NOW)
    rollout.follow(asked, NOW)
    assert told(rollout) == ("trial", 7, 5), "named anew"
    rollout.step(Event.GONE)
    rollout.asked = 0
    rollout.follow(asked, NOW)
    assert told(rollout) == ("trial", 7, 5), "nobody has ended it after all"


def test_the_last_word_on_a_pin_is_that_it_is_over() -> None:
    rollout = on_trial()
    rollout.follow(replace(FIVE, trial=7, pinned=3), NOW)
    assert rollout.said == "version 3 is pinned"
    for each in (rollout, replace(rollout)):
        each.follow(FIVE, NOW)
        assert each.said == "version 3 is no longer pinned"
        each.follow(replace(FIVE, champion=6), NOW)
        assert each.said == "version 6 is watched in comparison with version 5"


def test_rounds_that_are_read_before_their_trial_is_known_are_its_evidence() -> None:
    """Of two learners the one that looks at aliases and policies later comes to the same."""
    sides = {TRIAL: (7, 1.1), CHAMPION: (5, 1.0)}
    before = rounds(4, sides, publication=1_000_001, life="0a")  # of an earlier trial
    come = rounds(20, sides, publication=1_000_003) + rounds(
        20, sides, first=20, publication=1_000_004
    )
    found = []
    for alias, publication in ((0, 0), (4, 4), (4, 12), (14, 44), (44, 44)):
        rollout, lain = Rollout(champion=5), 1_000_003
        for number, each in enumerate([*before, *come, None]):
            if number >= alias:
                rollout.follow(replace(FIVE, trial=7), NOW)
            if number >= publication:
                lain = 1_000_004 if number > 24 else lain
                rollout.published(lain, NOW, 1_000_003)
            if each is not None:
                rollout.take(each, NOW)
        assert rollout.one is not None and not rollout.early
        found.append(rollout.one.pairs.numbers)
    assert len(found[0]) == 20 * 2 * WIDTH and all(each == found[0] for each in found)


def test_rounds_without_a_trial_do_not_pile_up() -> None:
    rollout = Rollout(champion=5)
    for each in rounds(EARLY + 100, {TRIAL: (7, 1.1), CHAMPION: (5, 1.0), "plain": (0, 1.0)}):
        rollout.take(each, NOW)
    assert len(rollout.early) == EARLY and rollout.early[-1].number == EARLY + 99
    assert {len(each.blocks) for each in rollout.early} == {2}, "no more than is asked of them"
    for each in rounds(9, {CHAMPION: (5, 1.0), "plain": (0, 1.0)}):
        rollout.take(each, NOW)
    assert rollout.early[-1].number == EARLY + 99, "nothing was on trial there"


def test_a_rollout_goes_on_from_a_snapshot() -> None:
    rollout, waits = played(on_trial(), 1.1), Rollout()
    rollout.decide(RULES)
    for early in rounds(3, {TRIAL: (7, 1.1), CHAMPION: (5, 1.0)}):
        waits.take(early, NOW)
    for each in (rollout, Rollout(), waits):
        tree = checkpoint.unpack(checkpoint.pack({"scope": each}))
        assert checkpoint.made(Rollout, tree["scope"]) == each
