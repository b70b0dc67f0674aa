"""Trials by the whole learner, with a real broker and a real registry; rounds are the tests'."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from kafka import KafkaProducer

from decoder.contracts.bundle import CHAMPION, FIRST, TRIAL
from decoder.contracts.settings import KafkaSettings
from decoder.contracts.status import WorkerStatus
from decoder.contracts.topics import POLICY, STATUS, TRIALS, policy_key
from learner import comparison, loop, registrar
from learner.comparison import WIDTH
from learner.loop import Learner
from learner.published import Published
from learner.registrations import Registration
from learner.registry import Registry, Standing, digest_of
from tests.conftest import random_policy
from tests.learner.conftest import Broker, client_of
from tests.learner.rounds import rounds
from tests.learner.stream import (
    SCOPE,
    Connect,
    batches,
    consume,
    last_status,
    produce,
    settings_in,
    step_until,
    stop,
)
from tests.learner.traffic import Traffic

# mlflow uses parts of sqlalchemy that are to go, and a kafka client that is left in mid-flight
# leaves its sockets to the garbage collector
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

SERVED, OTHER, WINNER = (random_policy(seed, SCOPE, 0) for seed in (1, 2, 3))
EVENTS = Traffic(seed=9).events(60)


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registrar, "FOLLOW_SECONDS", 0.3)
    monkeypatch.setattr(registrar, "RETRY_SECONDS", 0.5)
    monkeypatch.setattr(loop, "FOLLOW_SECONDS", 0.2)
    yield
    gc.collect()


class Workers:
    """Play rounds with what lies on the policy topic; ``rates`` of versions, 1 of all others."""

    def __init__(self, kafka: KafkaSettings, rates: Mapping[int, float], noise: float) -> None:
        self.rates, self.noise = rates, noise
        self.played = 0
        self.shares: list[tuple[int, float]] = []
        self._topic = Published(kafka)
        self._producer = KafkaProducer(**kafka.client_options())

    def play(self, count: int = 8) -> None:
        self._topic.read()
        held = {role: self._topic.last(SCOPE, role) for role in (CHAMPION, TRIAL)}
        trial = held[TRIAL]
        if held[CHAMPION] is None or trial is None:
            return
        if (trial.version, trial.share) not in self.shares[-1:]:
            self.shares.append((trial.version, trial.share))
        sides = {
            role: (lain.version, self.rates.get(lain.version, 1.0))
            for role, lain in held.items()
            if lain is not None
        }
        for each in rounds(
            count, sides, first=self.played, noise=self.noise, publication=trial.number
        ):
            self._producer.send(TRIALS.name, value=each.model_dump_json().encode(), key=b"w")
        self.played += count
        self._producer.flush()

    def close(self) -> None:
        self._topic.close()
        self._producer.close()


@pytest.fixture
def workers(broker: Broker) -> Iterator[Callable[..., Workers]]:
    made: list[Workers] = []

    def employ(rates: Mapping[int, float], noise: float = 0.05) -> Workers:
        made.append(Workers(broker.kafka, rates, noise))
        return made[-1]

    yield employ
    for each in made:
        each.close()


def stood_up(registry: Registry, kafka: KafkaSettings) -> None:
    """Version 1 is champion, version 2 another that is registered; the scope has drafts."""
    registry.promote(SCOPE, registry.register(SERVED))
    registry.register(OTHER)
    produce(kafka, batches(EVENTS[:200]))


def won(learner: Learner) -> None:
    """Version 3 wins the offline gate."""
    verdict = {"verdict": "chooses better and is faster"}
    learner.registrar.hand(Registration(WINNER, against=digest_of(SERVED), tags=verdict))


def on_trial(learner: Learner) -> int:
    last = learner.publisher.published.last(SCOPE, TRIAL)
    return 0 if last is None else last.version


def work(
    learner: Learner, done: Callable[[], bool], *workers: Workers, seconds: float = 120.0
) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, (learner.rollouts.of, learner.standings)
        for each in workers:
            each.play()
        learner.step()


def tags_of(registry: Registry, version: int) -> dict[str, str]:
    """Of a version, and none of one that there is not."""
    versions = client_of(registry).search_model_versions(f"name = '{registry.model_name(SCOPE)}'")
    return next((dict(v.tags) for v in versions if int(v.version) == version), {})


def tagged(registry: Registry, version: int, **tags: str) -> Callable[[], bool]:
    return lambda: tags.items() <= tags_of(registry, version).items()


def is_withdrawn(kafka: KafkaSettings) -> bool:
    lain = [r for r in consume(kafka, POLICY) if r.key == policy_key(SCOPE, TRIAL)]
    return bool(lain) and lain[-1].value is None


def test_a_candidate_that_is_worse_is_dropped(
    broker: Broker,
    connected: Connect,
    registry: Registry,
    tmp_path: Path,
    workers: Callable[..., Workers],
) -> None:
    stood_up(registry, broker.kafka)
    learner = connected(settings_in(tmp_path, registry, rollout="auto"))
    won(learner)
    produce(broker.kafka, [b"no round", b"", b"[1]", b"\xff" * 50], TRIALS)
    work(learner, lambda: learner.rollouts.busy(SCOPE) and on_trial(learner) == 3)
    learner._report()
    told = last_status(broker.kafka)
    assert (told.rollout, told.trial_version, told.trial_share) == ("trial", 3, 0.1)
    assert (told.trial_pairs, told.trial_ratio, told.trial_high) == (0, 0.0, 0.0)
    step_until(learner, lambda: registry.standing(SCOPE) == Standing(SCOPE, 1, trial=3))
    work(learner, lambda: not learner.rollouts.busy(SCOPE), workers({3: 0.8}))
    step_until(learner, lambda: on_trial(learner) == 0)
    learner._report()
    stop(learner)
    tags = tags_of(registry, 3)
    assert tags["trial"] == "dropped" and "slower than the champion" in tags["trial_why"]
    assert tags["trial_by"] == learner.lease.holder and tags["trial_at"]
    assert float(tags["trial_high"]) < 1.0 and int(tags["trial_pairs"]) >= 12
    assert "moved_at" not in tags and tags["trial_against"] == "1"
    assert registry.standing(SCOPE) == Standing(SCOPE, champion=1) and is_withdrawn(broker.kafka)
    last = last_status(broker.kafka)
    assert last.rollout == "" and "slower than the champion" in last.rollout_said
    assert last.rounds_refused == 4 and learner.scopes.awake[SCOPE].version == 1


def test_one_that_loses_nothing_is_promoted_and_watched(
    broker: Broker,
    connected: Connect,
    registry: Registry,
    tmp_path: Path,
    workers: Callable[..., Workers],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "learner.rollouts")
    stood_up(registry, broker.kafka)
    learner = connected(settings_in(tmp_path, registry, rollout="auto"))
    won(learner)
    crew = workers({3: 1.1}, noise=0.15)
    work(learner, lambda: tags_of(registry, 1) and registry.standing(SCOPE).champion == 3, crew)
    work(learner, tagged(registry, 3, watch="kept"), crew)
    step_until(learner, lambda: on_trial(learner) == 0 and not learner.rollouts.busy(SCOPE))
    stop(learner)
    tags = tags_of(registry, 3)
    assert tags["trial"] == "promoted" and tags["moved_by"] == learner.lease.holder
    assert "a loss of 3% is excluded" in tags["why"] and float(tags["trial_low"]) > 0.97
    assert crew.shares == [(3, 0.1), (3, 0.5), (1, 0.1)]
    assert tags["watch_against"] == "1" and float(tags["watch_ratio"]) > 1.0
    assert learner.scopes.awake[SCOPE].version == 3 and is_withdrawn(broker.kafka)
    assert caplog.text.count("version 3 is watched in comparison with version 1") == 1


def test_one_that_is_forced_through_is_rolled_back(
    broker: Broker,
    connected: Connect,
    registry: Registry,
    tmp_path: Path,
    workers: Callable[..., Workers],
) -> None:
    stood_up(registry, broker.kafka)
    learner = connected(settings_in(tmp_path, registry, rollout="auto"))
    step_until(learner, lambda: SCOPE in learner.rollouts.of)
    step_until(learner, lambda: learner.rollouts.of[SCOPE].champion == 1)
    step_until(learner, lambda: learner.scopes.awake[SCOPE].version == 1)
    registry.promote(SCOPE, 2, {"moved_by": "somebody", "why": "it looks good"})
    crew = workers({2: 0.8})
    work(learner, lambda: learner.scopes.awake[SCOPE].version == 2, crew)
    work(learner, lambda: registry.standing(SCOPE).champion == 1, crew)
    step_until(learner, lambda: on_trial(learner) == 0)
    step_until(learner, lambda: learner.scopes.awake[SCOPE].version == 1)
    stop(learner)
    back, forced = tags_of(registry, 1), tags_of(registry, 2)
    assert back["moved_by"] == learner.lease.holder
    assert "rolled back from version 2: slower than version 1" in back["why"]
    assert forced["watch"] == "rolled back" and float(forced["watch_high"]) < 1.0
    assert not learner.rollouts.busy(SCOPE)


@pytest.mark.parametrize("alias", ["champion", "pinned"])
def test_a_persons_move_wins_and_ends_the_trial(
    broker: Broker,
    connected: Connect,
    registry: Registry,
    tmp_path: Path,
    workers: Callable[..., Workers],
    alias: str,
) -> None:
    stood_up(registry, broker.kafka)
    learner = connected(settings_in(tmp_path, registry, rollout="auto"))
    won(learner)
    crew = workers({3: 1.0}, noise=0.5)
    work(learner, lambda: len(pairs_of(learner)) > 20, crew)
    client, name = client_of(registry), registry.model_name(SCOPE)
    client.set_registered_model_alias(name, alias, "2")
    work(learner, lambda: learner.scopes.awake[SCOPE].version == 2, crew)
    work(learner, tagged(registry, 3, trial="ended"), crew)
    if alias == "pinned":
        step_until(learner, lambda: on_trial(learner) == 0)
    else:  # put in force by hand, it is watched
        work(learner, lambda: on_trial(learner) == 1, crew)
    stop(learner)
    assert "version 2" in tags_of(registry, 3)["trial_why"]


def pairs_of(learner: Learner) -> list[list[float]]:
    rollout = learner.rollouts.of.get(SCOPE)
    if rollout is None or rollout.one is None:
        return []
    return np.array(rollout.one.pairs).reshape(-1, WIDTH).tolist()  # type: ignore[no-any-return]


def test_a_learner_that_is_killed_in_mid_trial_goes_on(
    broker: Broker,
    connected: Connect,
    registry: Registry,
    tmp_path: Path,
    workers: Callable[..., Workers],
) -> None:
    stood_up(registry, broker.kafka)
    settings = settings_in(tmp_path, registry, rollout="auto")
    learner = connected(settings)
    won(learner)
    crew = workers({3: 1.2}, noise=1.0)
    work(learner, lambda: len(pairs_of(learner)) > 10, crew)
    learner.checkpoint()
    saved = len(pairs_of(learner))
    crew.play()
    learner.step()
    known = pairs_of(learner)
    learner.close()  # dies here, after rounds that no checkpoint knows of

    again = connected(settings)
    assert pairs_of(again) == known[:saved]
    step_until(again, lambda: len(pairs_of(again)) >= len(known))
    assert pairs_of(again)[: len(known)] == known, "each round once"
    crew.noise = 0.02
    work(again, lambda: registry.standing(SCOPE).champion == 3, crew)
    stop(again)
    assert crew.shares[0] == (3, 0.1) and tags_of(registry, 3)["trial"] == "promoted"


def test_whoever_approves_reads_the_figures_and_moves_the_alias(
    broker: Broker,
    connected: Connect,
    registry: Registry,
    tmp_path: Path,
    workers: Callable[..., Workers],
) -> None:
    stood_up(registry, broker.kafka)
    learner = connected(settings_in(tmp_path, registry, rollout="approve"))
    won(learner)
    crew = workers({3: 1.1})
    work(learner, tagged(registry, 3, trial="passed"), crew)
    work(learner, lambda: on_trial(learner) == 0 and not learner.rollouts.busy(SCOPE), crew)
    assert registry.standing(SCOPE).champion == 1
    assert float(tags_of(registry, 3)["trial_low"]) > 0.97
    crew.rates = {3: 0.8}
    registry.promote(SCOPE, 3)
    work(learner, tagged(registry, 3, watch="found slower"), crew)
    step_until(learner, lambda: on_trial(learner) == 0)
    stop(learner)
    assert registry.standing(SCOPE).champion == 3, "a person decides"


def test_where_no_worker_plays_the_gate_alone_decides(
    broker: Broker,
    connected: Connect,
    registry: Registry,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stood_up(registry, broker.kafka)
    learner = connected(settings_in(tmp_path, registry, rollout="auto"))
    won(learner)
    step_until(learner, lambda: on_trial(learner) == 3)
    monkeypatch.setattr(comparison, "QUIET_SECONDS", 1.0)
    step_until(learner, quietly(broker.kafka, lambda: registry.standing(SCOPE).champion == 3))
    learner._report()
    stop(learner)
    tags = tags_of(registry, 3)
    assert tags["trial"] == "promoted" and tags["trial_pairs"] == "0"
    assert "the offline gate alone decides" in tags["why"]
    assert "version 3" in last_status(broker.kafka).rollout_said


def test_what_no_worker_plays_that_could_is_dropped(
    broker: Broker,
    connected: Connect,
    registry: Registry,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stood_up(registry, broker.kafka)
    learner = connected(settings_in(tmp_path, registry, rollout="auto"))
    won(learner)
    step_until(learner, lambda: on_trial(learner) == 3)
    worker = WorkerStatus(process="w", scope=SCOPE, time=time.time())
    old = worker.model_dump_json(exclude_unset=True).encode()
    of_today = worker.model_copy(update={"rounds_made": 0}).model_dump_json().encode()
    one = learner.rollouts.of[SCOPE].one
    assert one is not None
    for values, playable in (([old, b"\xff"], False), ([of_today], True)):
        for _ in range(8):
            produce(broker.kafka, values, STATUS)
            learner.step()
            time.sleep(0.2)
        assert one.playable is playable
    monkeypatch.setattr(comparison, "QUIET_SECONDS", 1.0)
    step_until(learner, quietly(broker.kafka, tagged(registry, 3, trial="dropped")))
    stop(learner)
    assert registry.standing(SCOPE).champion == 1
    assert "they refused it" in tags_of(registry, 3)["trial_why"]


def quietly(kafka: KafkaSettings, done: Callable[[], bool]) -> Callable[[], bool]:
    """``done``, with a draft each time it is asked: traffic without rounds."""
    values = iter(batches(EVENTS[200:], size=1, first=4))

    def asked() -> bool:
        produce(kafka, [next(values)])
        return done()

    return asked


def test_a_person_puts_a_version_on_trial(
    broker: Broker,
    connected: Connect,
    registry: Registry,
    tmp_path: Path,
    workers: Callable[..., Workers],
) -> None:
    stood_up(registry, broker.kafka)
    learner = connected(settings_in(tmp_path, registry, rollout="auto"))
    step_until(learner, lambda: learner.lease.holds(SCOPE))
    client, name = client_of(registry), registry.model_name(SCOPE)
    client.set_registered_model_alias(name, "trial", "2")
    step_until(learner, lambda: on_trial(learner) == 2)
    client.delete_registered_model_alias(name, "trial")
    step_until(learner, lambda: on_trial(learner) == 0)
    client.set_registered_model_alias(name, "trial", "2")
    work(learner, tagged(registry, 2, trial="dropped"), workers({2: 0.7}))
    stop(learner)


def test_of_two_learners_one_acts_and_the_other_takes_over_with_what_it_saw(
    broker: Broker,
    connected: Connect,
    registry: Registry,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    workers: Callable[..., Workers],
) -> None:
    monkeypatch.setattr("learner.lease.TTL_SECONDS", 6.0)
    monkeypatch.setattr("learner.lease.RENEW_SECONDS", 0.5)
    monkeypatch.setattr(loop, "MARGIN_SECONDS", 0.5)
    monkeypatch.setattr("learner.rollouts.MARGIN_SECONDS", 0.5)
    stood_up(registry, broker.kafka)
    one = connected(settings_in(tmp_path / "one", registry, rollout="auto"))
    step_until(one, lambda: one.lease.holds(SCOPE))
    two = connected(settings_in(tmp_path / "two", registry, rollout="auto"))
    won(one)
    won(two)  # it learns the same, and waits
    crew = workers({3: 0.8}, noise=1.0)
    deadline = time.monotonic() + 120
    while len(pairs_of(one)) < 16 or pairs_of(two) != pairs_of(one):
        assert time.monotonic() < deadline, (one.rollouts.of, two.rollouts.of)
        if len(pairs_of(one)) < 16:
            crew.play(1)
            one.step()
        two.step()
    assert one.lease.holds(SCOPE) and not two.lease.holds(SCOPE)
    # the first is stopped where it stands
    step_until(two, lambda: two.lease.holds(SCOPE))
    assert len(pairs_of(two)) >= 16 and len(two.registrar.waiting()) == 1
    crew.noise = 0.02
    work(two, tagged(registry, 3, trial="dropped"), crew)
    assert tags_of(registry, 3)["trial_by"] == two.lease.holder
    step_until(two, lambda: on_trial(two) == 0 and not two.registrar.waiting())
    for _ in range(5):
        two.step()
    assert not two.rollouts.busy(SCOPE), "what it would have proposed was tried already"
    assert len({r.value for r in consume(broker.kafka, POLICY)}) == len(
        consume(broker.kafka, POLICY)
    )
    stop(two)


def test_a_scope_that_starts_from_counting_never_goes_back_to_the_first_policy(
    broker: Broker, connected: Connect, registry: Registry, tmp_path: Path
) -> None:
    produce(broker.kafka, batches(EVENTS[:200]))
    learner = connected(settings_in(tmp_path, registry, start="counting"))
    step_until(learner, lambda: registry.standings().get(SCOPE) is not None)
    step_until(learner, lambda: learner.publisher.published.last(SCOPE) is not None)
    contest = learner.scopes.awake[SCOPE].contest
    stop(learner)
    assert registry.load(SCOPE, 1).kind == contest.first.kind == "frequency"
    assert contest.first.role == FIRST and tags_of(registry, 1)["origin"] == "counting"


def test_versions_without_alias_are_retired_and_what_was_refused_is_a_run(
    broker: Broker, connected: Connect, registry: Registry, tmp_path: Path
) -> None:
    stood_up(registry, broker.kafka)
    learner = connected(settings_in(tmp_path, registry, rollout="auto", keep_versions=2))
    won(learner)
    refused = Registration(replace(WINNER, threshold=7.0), "x", metrics={"rate": 3.0})
    learner.registrar.note(refused)
    step_until(learner, lambda: on_trial(learner) == 3)
    step_until(learner, lambda: not learner.registrar._refused)
    stop(learner)
    client = client_of(registry)
    experiments = [each.experiment_id for each in client.search_experiments()]
    (run,) = client.search_runs(experiments, "tags.refused = 'true'")
    assert run.data.metrics["rate"] == 3.0
    held = client_of(registry).search_model_versions(f"name = '{registry.model_name(SCOPE)}'")
    assert sorted(int(version.version) for version in held) == [1, 3]


def test_a_trial_is_withdrawn_where_rollouts_are_off(
    broker: Broker, connected: Connect, registry: Registry, tmp_path: Path
) -> None:
    stood_up(registry, broker.kafka)
    learner = connected(settings_in(tmp_path, registry, rollout="auto"))
    won(learner)
    step_until(learner, lambda: on_trial(learner) == 3)
    stop(learner)
    again = connected(settings_in(tmp_path, registry, rollout="off"))
    step_until(again, lambda: on_trial(again) == 3)
    step_until(again, lambda: on_trial(again) == 0)
    again.registrar.hand(Registration(replace(WINNER, threshold=9.0), against=digest_of(SERVED)))
    step_until(again, lambda: registry.standing(SCOPE).champion == 4)
    stop(again)
