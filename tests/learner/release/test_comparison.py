"""What rounds say of a policy on trial, and of one that is watched."""

from __future__ import annotations

from array import array

import pytest

from decoder.contracts.bundle import CHAMPION, FIRST, TRIAL
from decoder.contracts.trials import Block, Round
from learner.evaluation.effect import FEWEST, UNKNOWN, WIDTH, Effect
from learner.release.comparison import GAP_SECONDS, MOST, SHARE, WIDER, Comparison
from learner.settings import LearnerSettings
from tests.learner.release.rounds import rounds

RULES = LearnerSettings(trial_minutes=30.0)
FASTER, SAME = Effect(1.05, 1.02, 1.08, 20), Effect(1.01, 0.98, 1.04, 20)
NOW = 1e9


def compared(kind: str = "trial", **changes: object) -> Comparison:
    one = Comparison(kind, 7, 5, at=NOW)  # type: ignore[arg-type]
    one.published(1_000_003, NOW)
    one.labels = FASTER
    return one


def played(one: Comparison, count: int, ratio: float, **changes: object) -> Comparison:
    start = one.played
    for each in rounds(count, {TRIAL: (7, ratio), CHAMPION: (5, 1.0)}, first=start, **changes):  # type: ignore[arg-type]
        one.take(each, each.time)
    return one


def word(one: Comparison, settings: LearnerSettings = RULES) -> str:
    outcome = one.outcome(settings)
    return "" if outcome is None else outcome.word


def test_who_is_faster_by_labels_and_live_does_no_harm_is_promoted() -> None:
    one = played(compared(), 60, 1.02, noise=0.05)
    assert word(one) == "promote" and "a loss of 10% is excluded" in str(one.outcome(RULES))
    assert "by labels" in str(one.outcome(RULES))
    assert word(played(compared(), FEWEST - 1, 1.2, noise=0.0)) == "", "too few pairs to say"
    one.labels = SAME
    assert word(one) == "", "the labels of all traffic do not exclude a loss"
    one.labels = Effect(0.97, 0.95, 0.99, 40)
    assert word(one) == "drop"
    one.labels = UNKNOWN
    assert word(one) == "", "by live rounds alone it has to be faster"
    assert word(played(one, 400, 1.2, noise=0.05)) == "promote"


def test_a_busy_trial_promotes_none_that_it_sees_to_be_slower_by_less_than_the_margin() -> None:
    assert word(played(compared(), 2_000, 0.99, noise=0.05)) == "drop"
    one = played(compared(), 60, 0.99, noise=0.05)
    assert one.figures().cost.low > 0.9 and word(one) == "", "whatever labels say"


def test_by_costs_that_wall_time_speaks_against_nothing_is_promoted_or_rolled_back() -> None:
    for kind, end in (("trial", ""), ("watch", "")):
        one = played(compared(kind), 200, 1.2, noise=0.05, wall=1.4)
        found = one.figures()
        assert found.cost.low > 1.0 and found.wall.high < 1.0
        assert word(one) == end
    one = played(compared(), 200, 1.2, noise=0.05, wall=1.4, seconds=10.0)
    assert word(one) == "cannot tell"


@pytest.mark.parametrize(("ratio", "share"), [(0.8, SHARE), (1.0, WIDER)])
def test_a_trial_is_widened_once_great_harm_is_excluded(ratio: float, share: float) -> None:
    one = played(compared(), FEWEST - 1, 1.0, noise=0.1)
    assert one.wider(RULES) == SHARE
    played(one, 20, ratio, noise=0.2)
    assert one.wider(RULES) == share
    one.share = WIDER
    assert played(one, 50, 0.5, noise=0.2).wider(RULES) == WIDER, "it is dropped, or goes on so"
    assert played(compared("watch"), 40, 1.0, noise=0.1).wider(RULES) == SHARE


def test_rounds_of_the_same_sessions_are_one_pair_whoever_sends_them() -> None:
    one = compared()
    for number, each in enumerate(rounds(24, {TRIAL: (7, 1.0), CHAMPION: (5, 1.0)})):
        sent = {"unit": number // 6, "life": "ab" if number % 2 else "cd"}
        one.take(each.model_copy(update=sent), each.time)
    assert one.played == 8
    assert sum(one.pairs.numbers[::WIDTH]) == 24 * 100
    one = compared()
    for each in rounds(60, {TRIAL: (7, 1.0), CHAMPION: (5, 1.0)}, seconds=2.0):
        one.take(each.model_copy(update={"unit": None}), each.time)  # of a worker from before
    assert one.played <= 5


@pytest.mark.parametrize("ratio", [0.96, 1.04])
def test_what_its_time_does_not_tell_keeps_the_champion_and_says_what_would(ratio: float) -> None:
    one = compared()
    while one.seconds < 1_800.0:
        assert word(one) == ""
        played(one, 1, ratio, noise=0.6, seconds=60.0)
    outcome = one.outcome(RULES)
    assert outcome is not None and outcome.word == "cannot tell"
    assert "to tell 10% takes" in outcome.why


def test_losses_do_not_add_up_beside_the_first_policy() -> None:
    sides = {TRIAL: (7, 1.02), CHAMPION: (5, 1.0)}
    for first, settings, end in (
        (1.2, RULES, ""), (1.0, RULES, "promote"),
        (1.2, RULES.model_copy(update={"start": "counting"}), "promote"),
    ):  # fmt: skip
        one = compared()
        for each in rounds(400, sides | {FIRST: (1, first)}, noise=0.05):
            one.take(each, each.time)
        assert word(one, settings) == end


def test_neither_a_pause_nor_a_clock_that_leaps_decides_anything() -> None:
    one = played(compared(), 10, 1.0, noise=0.3)
    seconds = one.seconds
    played(one, 1, 1.0, start=NOW + 8 * 3600.0)
    assert one.seconds <= seconds + GAP_SECONDS and word(one) == ""
    one = compared()
    for each in rounds(3, {TRIAL: (7, 1.0), CHAMPION: (5, 1.0)}, start=2.0**35):
        one.take(each, NOW)
    assert one.at == NOW and one.seconds == 0.0
    one.hear(NOW - 86_400.0)
    for second in range(1, 4):  # nor does it keep others from being counted
        played(one, 1, 1.0, start=NOW - 86_400.0 + second, seconds=0.0)
    assert one.seconds == 3.0


@pytest.mark.parametrize("number", [0, 1_000_003])
def test_what_nobody_plays_ends_in_its_time_of_traffic(number: int) -> None:
    one, end = Comparison("trial", 7, 5, at=NOW), "cannot tell" if number else "give up"
    one.labels = FASTER
    if number:
        one.published(number, NOW)
    for minute in range(1, 31):
        assert word(one) == "" and one.wider(RULES) == SHARE
        one.hear(NOW + 60.0 * minute)
    assert word(one) == end
    one, nothing = compared(), {"steps": 0, "requests": 0, "tokens": 0.0, "us": 0.0, "cost_us": 0.0}
    for each in rounds(50, {TRIAL: (7, 1.0), CHAMPION: (5, 1.0)}, seconds=40.0):
        blocks = tuple(block.model_copy(update=nothing) for block in each.blocks)
        one.take(each.model_copy(update={"blocks": blocks}), each.time)
    assert word(one) == "cannot tell" and one.played == 0, "all its steps read prompts as well"


def test_rounds_of_other_versions_and_of_an_earlier_trial_are_none_of_its_own() -> None:
    one = compared()
    for trial, champion, publication in ((6, 5, 0), (7, 4, 0), (7, 5, 1_000_002)):
        sides = {TRIAL: (trial, 2.0), CHAMPION: (champion, 1.0)}
        for each in rounds(5, sides, publication=publication or 1_000_003):
            one.take(each, NOW)
    alone = Round(
        scope="s", worker="w", life="a", number=1, time=1.0,
        blocks=(Block(side=TRIAL, version=7, steps=1, requests=1, tokens=1, us=1.0, cost_us=1.0),),
    )  # fmt: skip
    one.take(alone, NOW)
    assert not one.played


def test_a_new_champion_that_is_slower_than_the_first_policy_is_rolled_back() -> None:
    one = compared("watch")
    sides = {FIRST: (1, 1.3), CHAMPION: (5, 1.0)}
    for each in rounds(100, sides, noise=0.1):
        one.take(each, NOW)
    outcome = one.outcome(RULES)
    assert outcome is not None and outcome.word == "roll back" and "first policy" in outcome.why
    assert outcome.to_first, "the one before may be slower still"
    assert word(one, LearnerSettings(start="counting")) == "", "there it is no version"


def test_pairs_are_bounded() -> None:
    one = compared()
    one.pairs.numbers = array("d", [1.01, *[1.0] * (WIDTH - 1)]) * MOST
    played(one, 3, 1.0)
    assert one.played == MOST and word(one) == "promote"
