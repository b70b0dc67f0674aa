"""What people do in MLflow by hand, and servers that refuse: each is one sentence, what was good
last stays in force, and nobody ends. With a real MLflow."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from mlflow import MlflowClient

from learner.release import registrar
from learner.release.registrar import Registrar
from learner.release.registrations import MoveRequest, Registration, move_aliases
from learner.release.registry import Registry, digest_of, moves
from learner.release.registry.runs import EXPERIMENT
from tests.conftest import random_policy, until
from tests.learner.stage import SERVED, WARNINGS, Stage, client_of, settled
from tests.learner.stream import SCOPE

pytestmark = WARNINGS

FIRST, WINNER = (random_policy(seed, "ab12", 0) for seed in (0, 1))


@pytest.fixture
def desk(registry: Registry) -> Iterator[Registrar]:
    """First policy and champion is version 1."""
    made = Registrar(registry, lambda scope: True)
    made.submit(Registration(FIRST))
    made.start()
    assert settled(made).version == 1
    yield made
    made.close()


def lines(caplog: pytest.LogCaptureFixture, level: int = logging.WARNING) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= level]


def test_a_deleted_experiment_is_restored_and_logged_once(
    desk: Registrar, registry: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    client = client_of(registry)
    client.delete_experiment(client.get_experiment_by_name(EXPERIMENT).experiment_id)
    for seed in (1, 2):
        winner = random_policy(seed, "ab12", 0)
        against = registry.digest("ab12", registry.alias_state("ab12").champion or 0)
        desk.submit(Registration(winner, against=against))
        assert settled(desk).refusal == ""
    assert client.get_experiment_by_name(EXPERIMENT).lifecycle_stage == "active"
    assert sum("was deleted" in line and "restored" in line for line in lines(caplog)) == 1


def test_a_renamed_experiment_is_left_alone(desk: Registrar, registry: Registry) -> None:
    client = client_of(registry)
    renamed = client.get_experiment_by_name(EXPERIMENT).experiment_id
    client.rename_experiment(renamed, "mine")
    again = Registry(registry.tracking_uri)
    assert again.register(WINNER) == 2
    assert client.get_experiment_by_name(EXPERIMENT).experiment_id != renamed
    assert digest_of(again.load("ab12", 1)) == digest_of(FIRST)


GONE: dict[str, Callable[[Stage, MlflowClient, str], object]] = {
    "model": lambda stage, client, name: client.delete_registered_model(name),
    "alias": lambda stage, client, name: stage.name("champion", None),
}


@pytest.mark.parametrize("gone", GONE)
def test_the_policy_in_force_survives_its_version(
    stage: Stage, gone: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(moves, "IN_PROGRESS", timedelta(0))  # it was promoted a moment ago
    learner = stage.learner("off")

    def serves() -> bool:
        last = learner.publisher.topic.last(SCOPE)
        return last is not None and learner.scopes.loaded[SCOPE].version == last.version

    def step_until(done: Callable[[], bool]) -> None:
        until(done, turn=learner.step)

    step_until(lambda: SCOPE in learner.scopes.loaded and serves())
    GONE[gone](stage, client_of(stage.registry), stage.registry.alias_state(SCOPE).name)

    def again() -> bool:
        standing = stage.registry.alias_states().get(SCOPE)
        return standing is not None and standing.champion is not None

    step_until(again)
    champion = stage.standing.champion
    assert champion is not None
    step_until(lambda: serves() and learner.scopes.loaded[SCOPE].version == champion)
    assert stage.registry.digest(SCOPE, champion) == digest_of(SERVED)
    step_until(lambda: any("had lost its champion" in line for line in lines(caplog)))
    assert sum("had lost its champion" in line for line in lines(caplog)) == 1


def test_a_deleted_run_is_harmless(registry: Registry, caplog: pytest.LogCaptureFixture) -> None:
    for policy in (FIRST, WINNER):
        registry.register(policy, {"p": 1}, {"mae": 0.5})
    registry.move("ab12", "champion", 1)
    client = client_of(registry)
    for version in registry.versions("ab12"):
        client.delete_run(version.run)
    tags = {2: {"trial": "promoted"}}
    done = move_aliases(registry, MoveRequest("ab12", "l", "won", tags, over=1, to=2))
    assert not done.refusal and registry.alias_state("ab12").champion == 2
    assert digest_of(registry.load("ab12", 2)) == digest_of(WINNER)
    assert not lines(caplog, logging.ERROR)


def test_artifact_errors_are_reported_in_one_sentence(
    desk: Registrar,
    registry: Registry,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(registrar, "MAX_TRIES", 3)
    monkeypatch.setattr(registrar, "MAX_PAUSE_SECONDS", 0.3)
    artefacts = Path(registry.tracking_uri.removeprefix("sqlite:///")).parent / "artifacts"
    shutil.move(artefacts, artefacts.with_name("away"))
    artefacts.write_text("no folder")
    desk.submit(Registration(WINNER, against=digest_of(FIRST)))
    desk.request([("ab12", 1)])
    until(lambda: desk.given_up["refused"] == 1)
    assert desk.pending() and not desk.away_since
    (told,) = (line for line in lines(caplog) if "the served policy stays;" in line)
    assert "waits, and is tried" in told and "\n" not in told
    assert not any(record.exc_info for record in caplog.records)
    assert registry.alias_state("ab12").champion == 1
    client = client_of(registry)
    held = client.get_experiment_by_name(EXPERIMENT)
    runs = client.search_runs([held.experiment_id])
    assert len(runs) == 2, "each try goes on with the run that is there"
    states = {run.info.status for run in runs}
    assert states <= {"FINISHED", "FAILED"}, "none is left as if it were under way"
    artefacts.unlink()
    shutil.move(artefacts.with_name("away"), artefacts)
    assert settled(desk).version == 2
