"""A service without engines: a broker, a registry, learners, and workers that play rounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pytest
from kafka import KafkaProducer

from decoder.contracts.bundle import CHAMPION, TRIAL, Policy
from decoder.contracts.settings import KafkaSettings
from decoder.contracts.topics import POLICY, TRIALS, policy_key
from learner.evaluation.effect import WIDTH
from learner.loop import Learner
from learner.release.published import Published
from learner.release.registrar import Registrar
from learner.release.registrations import Registration, Settled
from learner.release.registry import Registry, Standing, digest_of
from tests.conftest import random_policy, until
from tests.learner.release.rounds import rounds
from tests.learner.stream import SCOPE, Connect, consume, settings_in
from tests.learner.traffic import Traffic

# mlflow uses parts of sqlalchemy that are to go, and a kafka client that finds no broker, or is
# left in mid-flight, leaves its sockets to the garbage collector
WARNINGS = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:starlette.middleware.wsgi"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
SERVED, OTHER, WINNER = (random_policy(seed, SCOPE, 0) for seed in (1, 2, 3))
EVENTS = Traffic(seed=9).events(60)


def champion_of(registry: Registry, scope: str) -> Policy | None:
    """What a learner finds served."""
    standing = registry.standings().get(scope)
    served = None if standing is None else standing.served
    return None if served is None else registry.load(scope, served)


def client_of(registry: Registry) -> mlflow.MlflowClient:
    """What a person's browser does."""
    return mlflow.MlflowClient(registry.tracking_uri, registry.tracking_uri)


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


class Stage:
    """A broker, a registry, and whoever plays: learners and workers.

    ``settings`` of its learners lie in a folder for each.
    """

    def __init__(
        self, kafka: KafkaSettings, registry: Registry, connected: Connect, folder: Path
    ) -> None:
        self.kafka, self.registry = kafka, registry
        self._connected, self._folder = connected, folder
        self._made: list[Workers] = []

    def learner(self, rollout: str = "auto", home: str = "", **changes: Any) -> Learner:
        folder = self._folder / home
        return self._connected(settings_in(folder, self.registry, rollout=rollout, **changes))

    def workers(self, rates: Mapping[int, float], noise: float = 0.05) -> Workers:
        self._made.append(Workers(self.kafka, rates, noise))
        return self._made[-1]

    @property
    def standing(self) -> Standing:
        return self.registry.standing(SCOPE)

    def tags(self, version: int) -> dict[str, str]:
        """Of a version, and none of one that there is not."""
        held = {each.number: each.tags for each in self.registry.versions(SCOPE)}
        return dict(held.get(version, {}))

    def tagged(self, version: int, **tags: str) -> Callable[[], bool]:
        return lambda: tags.items() <= self.tags(version).items()

    def name(self, alias: str, version: int | None) -> None:
        """Move an alias, or take it away, as a person does in MLflow."""
        client, model = client_of(self.registry), self.registry.standing(SCOPE).name
        if version is None:
            client.delete_registered_model_alias(model, alias)
        else:
            client.set_registered_model_alias(model, alias, str(version))

    def close(self) -> None:
        for each in self._made:
            each.close()


def won(learner: Learner) -> None:
    """Version 3 wins the offline gate."""
    verdict = {"verdict": "chooses better and is faster"}
    learner.registrar.hand(Registration(WINNER, against=digest_of(SERVED), tags=verdict))


def answers_until(desk: Registrar, done: Callable[[list[Any]], bool]) -> list[Any]:
    """What a registrar answers beside where the aliases stand."""
    found: list[Any] = []

    def answered() -> bool:
        found.extend(a for a in desk.answers() if not isinstance(a, dict))
        return done(found)

    until(answered)
    return found


def settled(desk: Registrar) -> Settled:
    """What became of the registration that was handed over."""
    found = answers_until(desk, lambda found: any(isinstance(a, Settled) for a in found))
    return next(a for a in found if isinstance(a, Settled))


def on_trial(learner: Learner) -> int:
    last = learner.publisher.published.last(SCOPE, TRIAL)
    return 0 if last is None else last.version


def work(learner: Learner, done: Callable[[], bool], *workers: Workers) -> None:
    def turn() -> None:
        for each in workers:
            each.play()
        learner.step()

    until(done, "what is worked for", turn=turn, pause=0.0)


def is_withdrawn(kafka: KafkaSettings) -> bool:
    lain = [r for r in consume(kafka, POLICY) if r.key == policy_key(SCOPE, TRIAL)]
    return bool(lain) and lain[-1].value is None


def pairs_of(learner: Learner) -> list[list[float]]:
    rollout = learner.rollouts.of.get(SCOPE)
    if rollout is None or rollout.one is None:
        return []
    return np.array(rollout.one.pairs.numbers).reshape(-1, WIDTH).tolist()  # type: ignore[no-any-return]
