"""Where a rollout goes by what it is told: aliases, figures, and what another learner sends."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from decoder.contracts.bundle import CHAMPION, TRIAL
from learner.comparison import Outcome
from learner.published import Publication
from learner.registry import Standing
from learner.rollout import AGAIN_SECONDS, REST_SECONDS, Rollout
from learner.settings import LearnerSettings
from tests.learner.rounds import rounds

NOW = 1e9
RULES = LearnerSettings()
FIVE = Standing("s", champion=5)


def told(rollout: Rollout) -> tuple[str, int, int]:
    one = rollout.one
    return ("", 0, 0) if one is None else (one.kind, one.version, one.over)


def on_trial() -> Rollout:
    rollout = Rollout()
    rollout.follow(FIVE, NOW)
    rollout.begin("trial", 7, 5, NOW)
    assert rollout.one is not None
    rollout.one.published(1_000_001, NOW)
    return rollout


def played(rollout: Rollout, ratio: float, count: int = 400) -> Rollout:
    assert rollout.one is not None
    sides = {TRIAL: (rollout.one.version, ratio), CHAMPION: (rollout.one.over, 1.0)}
    for each in rounds(count, sides, noise=0.05):
        rollout.one.take(each, NOW)
    return rollout


def test_promoted_then_watched_then_left_alone() -> None:
    rollout = played(on_trial(), 1.1)
    outcome = rollout.decide(RULES)
    assert outcome is not None and outcome.word == "promote"
    assert rollout.decide(RULES) is None, "said once"
    ended = rollout.follow(replace(FIVE, champion=7), NOW)
    assert ended is not None and ended.outcome == outcome
    assert told(rollout) == ("watch", 5, 7)
    assert rollout.one is not None
    rollout.one.published(1_000_002, NOW)
    kept = played(rollout, 0.9).decide(RULES)
    assert kept is not None and kept.word == "keep"


def test_rolled_back_is_not_watched_and_not_tried_again() -> None:
    rollout = on_trial()
    rollout.follow(replace(FIVE, champion=7), NOW)
    assert rollout.one is not None
    rollout.one.published(1_000_002, NOW)
    outcome = played(rollout, 1.2).decide(RULES)
    assert outcome is not None and outcome.word == "roll back"
    ended = rollout.follow(FIVE, NOW)
    assert ended is not None and ended.outcome == outcome and told(rollout) == ("", 0, 0)
    assert rollout.champion == 5 and not rollout.may_try(7, NOW + 1.0)


@pytest.mark.parametrize(
    ("standing", "why", "then"),
    [
        (replace(FIVE, pinned=3), "version 3 is pinned", ("", 0, 0)),
        (replace(FIVE, champion=4), "version 4 was made champion", ("", 0, 0)),
        (replace(FIVE, champion=6), "version 6 was made champion", ("watch", 5, 6)),
        (replace(FIVE, champion=7), "version 7 was made champion", ("watch", 5, 7)),
        (replace(FIVE, trial=6), "version 6 was put on trial", ("trial", 6, 5)),
        (Standing("s"), "version 0 was made champion", ("", 0, 0)),
    ],
)
def test_a_person_may_move_anything_at_any_moment(
    standing: Standing, why: str, then: tuple[str, int, int]
) -> None:
    for decided in (False, True):
        rollout = on_trial()
        if decided:
            assert played(rollout, 0.5).decide(RULES) is not None
        ended = rollout.follow(standing, NOW)
        assert ended is not None and told(rollout) == then
        assert ended.one.version == 7 and (decided or ended.outcome == Outcome("give up", why))


def test_what_a_person_puts_on_trial_is_tried_once_and_ends_with_the_alias() -> None:
    rollout = on_trial()
    asked = replace(FIVE, trial=6)
    rollout.follow(asked, NOW)
    assert rollout.follow(asked, NOW) is None and told(rollout) == ("trial", 6, 5)
    ended = rollout.follow(FIVE, NOW)
    assert ended is not None and ended.outcome.why == "alias trial was taken away"
    rollout.follow(asked, NOW)
    assert told(rollout) == ("trial", 6, 5)
    rollout.end(Outcome("drop", "slower"), NOW)
    assert rollout.follow(asked, NOW) is None and told(rollout) == ("", 0, 0)


def test_what_was_tried_rests_until_another_is_champion() -> None:
    rollout = on_trial()
    assert not rollout.may_try(8, NOW), "one at a time"
    rollout.end(Outcome("drop", "slower"), NOW)
    assert rollout.may_try(8, NOW) and not rollout.may_try(7, NOW + AGAIN_SECONDS - 1.0)
    assert rollout.may_try(7, NOW + AGAIN_SECONDS)
    rollout.follow(replace(FIVE, champion=4), NOW)
    assert rollout.may_try(7, NOW)
    rollout.follow(FIVE, NOW)
    assert not rollout.may_try(7, NOW + 1.0), "another in between lets nothing be tried again"


def test_after_a_roll_back_nothing_is_tried_for_a_while() -> None:
    rollout = Rollout(champion=5)
    rollout.begin("watch", 5, 7, NOW)
    rollout.end(Outcome("roll back", "slower"), NOW)
    assert not rollout.may_try(8, NOW + REST_SECONDS - 1.0)
    assert rollout.may_try(8, NOW + REST_SECONDS)


def test_a_clock_that_was_ahead_keeps_nothing_from_trial() -> None:
    rollout = Rollout(champion=5)
    rollout.begin("watch", 5, 7, NOW + 1e8)
    rollout.end(Outcome("roll back", "slower"), NOW + 1e8)
    assert rollout.rests(NOW + 1e8) and not rollout.rests(NOW) and rollout.may_try(7, NOW)


def test_an_older_version_that_a_person_tries_is_no_watch_for_who_follows() -> None:
    rollout = Rollout()
    rollout.trail(replace(FIVE, trial=3), Publication(3, 1_000_001, 0, 3, 0.1), NOW)
    assert told(rollout) == ("trial", 3, 5)


def test_who_waits_follows_the_topic_and_goes_on_from_there() -> None:
    rollout = Rollout()
    rollout.trail(FIVE, None, NOW)
    assert told(rollout) == ("", 0, 0)
    rollout.trail(FIVE, Publication(7, 1_000_001, 0, 3, 0.1), NOW)
    assert told(rollout) == ("trial", 7, 5)
    played(rollout, 1.1, 6)
    rollout.trail(FIVE, Publication(7, 1_000_002, 0, 4, 0.5), NOW)
    assert rollout.one is not None
    assert (rollout.one.played, rollout.one.share, rollout.one.since) == (6, 0.5, 1_000_001)
    seven = replace(FIVE, champion=7)
    rollout.trail(seven, Publication(7, 1_000_002, 0, 4, 0.5), NOW)
    assert told(rollout) == ("", 0, 0)
    rollout.trail(seven, Publication(5, 1_000_003, 0, 5, 0.1), NOW)
    assert told(rollout) == ("watch", 5, 7)
    rollout.follow(seven, NOW)
    assert told(rollout) == ("watch", 5, 7)
    rollout.trail(seven, None, NOW)
    assert told(rollout) == ("", 0, 0)


def test_a_champion_that_was_moved_ends_what_still_lies_on_the_topic() -> None:
    rollout, lain = on_trial(), Publication(7, 1_000_001, 0, 3, 0.1)
    for _ in range(2):
        rollout.trail(replace(FIVE, champion=4), lain, NOW)
    assert told(rollout) == ("", 0, 0)
    rollout.follow(replace(FIVE, champion=4), NOW)
    assert told(rollout) == ("", 0, 0)


def test_a_rollout_goes_on_from_a_snapshot() -> None:
    rollout = played(on_trial(), 1.1)
    rollout.tried[3, 5], rollout.rests_until = 12.5, NOW
    rollout.decide(RULES)
    for each in (rollout, Rollout()):
        arrays, numbers = each.snapshot()
        again = Rollout.restored((arrays, json.loads(json.dumps(numbers))))
        assert again == each and again.snapshot()[1] == numbers
