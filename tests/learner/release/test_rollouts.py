"""Trials by the whole learner, with a real broker and a real registry; rounds are the tests'."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from decoder.contracts.bundle import unpack
from decoder.contracts.errors import BrokerError
from decoder.contracts.status import WorkerStatus
from decoder.contracts.topics import POLICY, STATUS, TRIALS, policy_key
from learner import lease
from learner.evaluation.effect import UNKNOWN, Effect
from learner.release import comparison
from learner.release.registrations import Registration
from learner.release.registry import Standing, digest_of
from tests.conftest import until
from tests.learner.conftest import Clock
from tests.learner.stage import (
    EVENTS,
    SERVED,
    WARNINGS,
    WINNER,
    Stage,
    is_withdrawn,
    on_trial,
    pairs_of,
    won,
    work,
)
from tests.learner.stream import SCOPE, batches, consume, produce, reported, step_until, stop

pytestmark = WARNINGS


def test_a_candidate_that_is_worse_is_dropped(stage: Stage) -> None:
    learner = stage.learner(keep_versions=2)
    won(learner)
    produce(stage.kafka, [b"no round", b"", b"[1]", b"\xff" * 50], TRIALS)
    work(learner, lambda: learner.rollouts.busy(SCOPE) and on_trial(learner) == 3)
    told = reported(stage.kafka, learner)
    assert (told.rollout, told.trial_version, told.trial_share) == ("trial", 3, comparison.SHARE)
    assert (told.trial_pairs, told.trial_ratio, told.trial_high) == (0, 0.0, 0.0)
    step_until(learner, lambda: stage.standing == Standing(SCOPE, 1, trial=3))
    work(learner, lambda: not learner.rollouts.busy(SCOPE), stage.workers({3: 0.8}))
    step_until(learner, lambda: on_trial(learner) == 0)
    last = reported(stage.kafka, learner)
    stop(learner)
    assert [each.number for each in stage.registry.versions(SCOPE)] == [1, 3], "2 had no alias"
    tags = stage.tags(3)
    assert tags["trial"] == "dropped" and "slower than the champion" in tags["trial_why"]
    assert tags["trial_by"] == learner.lease.holder and tags["trial_at"]
    assert float(tags["trial_high"]) < 1.0 and int(tags["trial_pairs"]) >= 12
    assert "moved_at" not in tags and tags["trial_against"] == "1"
    assert stage.standing == Standing(SCOPE, champion=1) and is_withdrawn(stage.kafka)
    assert last.rollout == "" and "slower than the champion" in last.rollout_said
    assert last.rounds_refused == 4 and learner.scopes.awake[SCOPE].version == 1


def test_a_comparison_that_fails_is_given_up_and_ends_nothing_else(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(mine: NDArray[np.float64], *_: object) -> Effect:
        if len(mine):
            raise OverflowError("math range error")
        return UNKNOWN

    learner = stage.learner()
    won(learner)
    crew = stage.workers({3: 1.0}, noise=0.5)
    work(learner, lambda: len(pairs_of(learner)) > 10, crew)
    monkeypatch.setattr(comparison, "effect_in", fails)
    work(learner, lambda: not learner.rollouts.busy(SCOPE), crew)
    work(learner, stage.tagged(3, trial="ended"), crew)
    step_until(learner, lambda: on_trial(learner) == 0 and stage.standing.trial is None)
    told = learner.rollouts.status(SCOPE)
    stop(learner)
    assert told["verdicts"] == {"give up": 1}
    assert "a fault of the learner" in str(told["rollout_said"])
    assert "a fault of the learner" in stage.tags(3)["trial_why"]
    assert stage.standing == Standing(SCOPE, champion=1)


def test_one_that_is_faster_is_promoted_and_watched(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "learner.release.rollouts")
    learner = stage.learner()
    won(learner)
    crew = stage.workers({3: 1.1}, noise=0.15)
    work(learner, lambda: stage.tags(1) and stage.standing.champion == 3, crew)
    work(learner, stage.tagged(3, watch="kept"), crew)
    step_until(learner, lambda: on_trial(learner) == 0 and not learner.rollouts.busy(SCOPE))
    stop(learner)
    tags = stage.tags(3)
    assert tags["trial"] == "promoted" and tags["moved_by"] == learner.lease.holder
    assert "a loss of 10% is excluded" in tags["why"] and float(tags["trial_low"]) > 1.0
    assert (crew.shares[0], crew.shares[-1]) == ((3, comparison.SHARE), (1, comparison.SHARE))
    assert tags["watch_against"] == "1" and float(tags["watch_ratio"]) > 1.0
    assert learner.scopes.awake[SCOPE].version == 3 and is_withdrawn(stage.kafka)
    assert caplog.text.count("version 3 is watched in comparison with version 1") == 1


def test_one_that_is_forced_through_is_rolled_back_though_a_lease_is_lost_in_mid_move(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    learner = stage.learner()
    for known in (learner.rollouts.of, learner.scopes.awake):
        step_until(learner, lambda known=known: SCOPE in known)
    step_until(learner, lambda: learner.rollouts.of[SCOPE].champion == 1)
    step_until(learner, lambda: learner.scopes.awake[SCOPE].version == 1)
    stage.registry.move(SCOPE, "champion", 2, "somebody", "it looks good")
    crew = stage.workers({2: 0.8})
    with monkeypatch.context() as lost:
        lost.setattr(learner.registrar, "_may", lambda scope: False)
        work(learner, lambda: learner.scopes.awake[SCOPE].version == 2, crew)
        work(learner, lambda: "the lease is lost" in caplog.text, crew)
    work(learner, lambda: stage.standing.champion == 1, crew)
    step_until(learner, lambda: on_trial(learner) == 0)
    step_until(learner, lambda: learner.scopes.awake[SCOPE].version == 1)
    stop(learner)
    back, forced = stage.tags(1), stage.tags(2)
    assert back["moved_by"] == learner.lease.holder
    assert "rolled back from version 2: slower than version 1" in back["why"]
    assert forced["watch"] == "rolled back" and float(forced["watch_high"]) < 1.0
    assert not learner.rollouts.busy(SCOPE)


@pytest.mark.parametrize("rollout", ["auto", "off"])
def test_what_workers_went_back_from_is_taken_back_for_all(stage: Stage, rollout: str) -> None:
    """The policy before comes back where it is watched, else the first one; a worker that went back
    from an earlier champion says nothing of this one."""
    learner = stage.learner(rollout)
    step_until(learner, lambda: SCOPE in learner.scopes.awake and SCOPE in learner.rollouts.of)
    step_until(learner, lambda: learner.scopes.awake[SCOPE].version == 1)
    status = WorkerStatus(process="w", scope=SCOPE, time=1.0)
    step_until(learner, lambda: learner.publisher.published.last(SCOPE) is not None)
    before = learner.publisher.published.last(SCOPE).number
    stage.registry.move(SCOPE, "champion", 2, "somebody", "it looks good")
    step_until(learner, lambda: learner.publisher.published.last(SCOPE).version == 2)
    step_until(learner, lambda: learner.scopes.awake[SCOPE].version == 2)
    for number in (before, learner.publisher.published.last(SCOPE).number):
        assert stage.standing.champion == 2
        told = status.model_copy(update={"returned_from": number})
        produce(stage.kafka, [told.model_dump_json().encode()], STATUS)
        step_until(learner, lambda number=number: learner.workers.returned.get(SCOPE) == number)
        for _ in range(5):
            learner.step()
    if rollout == "off":  # what is learned next brings the first policy
        produce(stage.kafka, batches(EVENTS[200:400], first=20))
    step_until(learner, lambda: stage.standing.champion != 2)
    if rollout == "auto":
        step_until(learner, stage.tagged(2, watch="rolled back"))
        assert stage.standing.champion == 1 and "draft by draft" in stage.tags(1)["why"]
    stop(learner)


def test_a_persons_move_wins_and_ends_the_trial(stage: Stage) -> None:
    learner = stage.learner()
    won(learner)
    crew = stage.workers({3: 1.0}, noise=0.5)
    work(learner, lambda: len(pairs_of(learner)) > 20, crew)
    stage.name("champion", 2)
    work(learner, lambda: learner.scopes.awake[SCOPE].version == 2, crew)
    work(learner, stage.tagged(3, trial="ended"), crew)
    work(learner, lambda: on_trial(learner) == 1, crew)  # put in force by hand, it is watched
    stop(learner)
    assert "version 2" in stage.tags(3)["trial_why"]


def test_a_learner_that_is_killed_in_mid_trial_goes_on(stage: Stage) -> None:
    learner = stage.learner()
    won(learner)
    crew = stage.workers({3: 1.2}, noise=1.0)
    work(learner, lambda: len(pairs_of(learner)) > 10, crew)
    learner.checkpoint()
    saved = len(pairs_of(learner))
    crew.play()
    learner.step()
    known = pairs_of(learner)
    learner.close()  # dies here, after rounds that no checkpoint knows of

    again = stage.learner()
    assert pairs_of(again) == known[:saved]
    step_until(again, lambda: len(pairs_of(again)) >= len(known))
    assert pairs_of(again)[: len(known)] == known, "each round once"
    crew.noise = 0.02
    work(again, lambda: stage.standing.champion == 3, crew)
    stop(again)
    assert crew.shares[0] == (3, comparison.SHARE) and stage.tags(3)["trial"] == "promoted"


def test_whoever_approves_reads_the_figures_and_moves_the_alias(stage: Stage) -> None:
    learner = stage.learner("approve")
    won(learner)
    crew = stage.workers({3: 1.1})
    work(learner, stage.tagged(3, trial="passed"), crew)
    work(learner, lambda: on_trial(learner) == 0 and not learner.rollouts.busy(SCOPE), crew)
    assert stage.standing.champion == 1
    assert float(stage.tags(3)["trial_low"]) > 0.97
    crew.rates = {3: 0.8}
    stage.registry.move(SCOPE, "champion", 3)
    work(learner, stage.tagged(3, watch="found slower"), crew)
    step_until(learner, lambda: on_trial(learner) == 0)
    stop(learner)
    assert stage.standing.champion == 3, "a person decides"


def test_of_two_learners_one_acts_and_the_other_takes_over_with_what_it_saw(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    one = stage.learner(home="one")
    step_until(one, lambda: one.lease.holds(SCOPE))
    two = stage.learner(home="two")
    step_until(two, lambda: SCOPE in two.rollouts.of)  # it reads rounds from now on
    won(one)
    won(two)  # it learns the same, and waits
    crew = stage.workers({3: 0.8}, noise=1.0)

    def turn() -> None:
        if len(pairs_of(one)) < 16:
            if len(pairs_of(one)) == crew.played:  # it is to stop with nothing unread
                crew.play(1)
            one.step()
        if len(pairs_of(one)) >= 4:  # the second sees alias and publication later than rounds
            two.step()

    until(lambda: len(pairs_of(one)) >= 16 and pairs_of(two) == pairs_of(one), turn=turn)
    assert one.lease.holds(SCOPE) and not two.lease.holds(SCOPE)
    clock.now += lease.TTL_SECONDS  # the first is stopped where it stands
    step_until(two, lambda: two.lease.holds(SCOPE))
    assert len(pairs_of(two)) >= 16 and len(two.registrar.waiting()) == 1
    crew.noise = 0.02
    work(two, stage.tagged(3, trial="dropped"), crew)
    assert stage.tags(3)["trial_by"] == two.lease.holder
    step_until(two, lambda: on_trial(two) == 0 and not two.registrar.waiting())
    for _ in range(5):
        two.step()
    assert not two.rollouts.busy(SCOPE), "what it would have proposed was tried already"
    stage.registry.move(SCOPE, "champion", 2)
    step_until(two, lambda: two.publisher.published.term(SCOPE) > 1)
    # what the first sends when it wakes has another number, and a lower one
    with pytest.raises(BrokerError, match="later term"):
        one.publisher.publish(replace(WINNER, version=2), 1)
    one.publisher.published.numbers[policy_key(SCOPE, "champion")] = 1_000_002
    monkeypatch.setattr(one.publisher.published, "read", lambda seconds: True)
    late = one.publisher.publish(replace(WINNER, version=2), 1)
    step_until(two, lambda: two.publisher.published.last(SCOPE) is None)
    step_until(two, lambda: two.publisher.published.last(SCOPE) is not None)
    assert two.publisher.published.last(SCOPE).number > late.publication
    stop(two)
    # a client that had no answer in time sends the same bytes again, which is no other publication
    values = {record.value for record in consume(stage.kafka, POLICY)} - {None}
    published = [unpack(value)[0] for value in values]
    numbers = {(policy.role, policy.publication) for policy in published}
    assert len(numbers) == len(published), "a number stands for two policies"


def test_a_trial_is_withdrawn_where_rollouts_are_off(stage: Stage) -> None:
    learner = stage.learner()
    won(learner)
    step_until(learner, lambda: on_trial(learner) == 3)
    stop(learner)
    again = stage.learner("off")
    step_until(again, lambda: on_trial(again) == 3)
    step_until(again, lambda: on_trial(again) == 0)
    again.registrar.hand(Registration(replace(WINNER, threshold=9.0), against=digest_of(SERVED)))
    step_until(again, lambda: stage.standing.champion == 4)
    stop(again)
