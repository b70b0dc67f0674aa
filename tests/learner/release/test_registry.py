"""A real MLflow on SQLite: versions, aliases, and artefacts that are checked when read."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import PERMISSION_DENIED

from decoder.contracts.bundle import Policy
from decoder.contracts.errors import RegistryError
from decoder.contracts.features import NUM_FEATURES
from decoder.policy.estimate import predict
from learner.release.registry import ARTIFACT, AliasState, Registry, digest_of, moves, versions
from learner.release.registry.aliases import LOGGED_TAG
from learner.release.registry.connection import database_of, database_uri
from learner.release.registry.runs import EXPERIMENT
from learner.settings import LearnerSettings
from tests.conftest import random_policy
from tests.learner.conftest import copied
from tests.learner.stage import WARNINGS, champion_of, client_of

pytestmark = WARNINGS

PROBES = np.random.default_rng(0).random((8, NUM_FEATURES)).astype(np.float32)


def registered(registry: Registry, count: int = 3) -> list[Policy]:
    """Policies that are registered as versions from 1, three unless told."""
    policies = [random_policy(seed, scope="ab12") for seed in range(count)]
    for policy in policies:
        registry.register(policy)
    return policies


def artefact(registry: Registry, policy: Policy, version: int) -> Path:
    held = client_of(registry).get_model_version(
        registry.alias_state(policy.scope).name, str(version)
    )
    return Path(str(held.source).removeprefix("file://")) / ARTIFACT


def test_register_promote_and_roll_back(registry: Registry) -> None:
    policy = random_policy(scope="ab12")
    assert champion_of(registry, "ab12") is None
    first = registry.register(policy, {"p": 1}, {"mae": 0.5}, {"verdict": "x"}, {"events": 9})
    assert registry.alias_states() == {"ab12": AliasState("ab12")}
    second = registry.register(random_policy(seed=1, scope="ab12"))
    assert (first, second) == (1, 2)
    client = client_of(registry)
    name = registry.alias_state("ab12").name
    assert int(client.get_model_version_by_alias(name, "candidate").version) == 2
    run = client.get_run(client.get_model_version(name, "1").run_id)
    assert run.data.metrics == {"mae": 0.5} and run.data.params["window.events"] == "9"
    assert run.info.status == "FINISHED" and run.data.tags["verdict"] == "x"
    for version in (2, 1):
        registry.move("ab12", "champion", version)
        champion = champion_of(registry, "ab12")
        assert champion is not None and champion.version == version
    assert np.array_equal(predict(champion, PROBES), predict(policy, PROBES))
    assert "mlruns/artifacts" in str(artefact(registry, policy, 1))


@pytest.mark.parametrize("folder", ["a b", "c#d", "e%41f", "g?h", "100%", "%2F", "i;j&k=ü'\""])
def test_a_database_uri_opens_its_path(
    empty_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    home = tmp_path / folder
    copied(empty_store, home / "mlruns")
    at, policy = home / "mlruns" / "mlflow.db", random_policy(scope="ab12")
    monkeypatch.chdir(home)  # as hvd up works there, and hvd policy afterwards
    uri = database_uri(at)
    assert database_of(uri) == at
    Registry(uri).register(policy)
    by_default = LearnerSettings.model_fields["mlflow_tracking_uri"].default
    assert Registry(by_default).load("ab12", 1).scope == "ab12"
    monkeypatch.chdir("/")
    assert database_of(database_uri(at)) == at
    assert [each.name for each in tmp_path.iterdir()] == [folder]
    assert {each.name for each in home.iterdir()} == {"mlruns"}


def test_history_records_moves_and_drops_the_oldest(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    registered(registry, 2)
    registry.move("ab12", "champion", 1, "learner", "the first")
    registry.move("ab12", "champion", 2, "learner", "won")
    registry.move("ab12", "pinned", 1, "anna", "looks wrong")
    registry.move("ab12", "pinned", None, "anna", "")
    name = registry.alias_state("ab12").name
    client_of(registry).set_registered_model_tag(name, "moved.by-hand", "not ours")
    found = [(m.alias, m.before, m.after, m.by, m.why) for m in registry.history("ab12")]
    assert all(m.at.tzinfo == UTC for m in registry.history("ab12"))
    assert found == [
        ("champion", None, 1, "learner", "the first"),
        ("champion", 1, 2, "learner", "won"),
        ("pinned", None, 1, "anna", "looks wrong"),
        ("pinned", 1, None, "anna", ""),
    ]
    assert registry.alias_state("ab12") == AliasState("ab12", champion=2)
    monkeypatch.setattr(moves, "MAX_MOVES", 2)
    for version in (1, 2, 1):
        registry.move("ab12", "champion", version)
    kept = [move.alias for move in registry.history("ab12")]
    assert kept.count("champion") <= 3 and kept.count("pinned") == 2, "of each alias its own"


@pytest.mark.parametrize("value", ["[" * 50_000, "[]", "3", "no JSON", {"alias": []}, {"why": 5}])
def test_an_invalid_move_tag_is_skipped(value: str | dict[str, object]) -> None:
    """Else one that a person has mended by hand would end all promotions."""
    sound = {"alias": "champion", "before": 1, "after": None, "by": "me", "why": "so"}
    when = datetime(2026, 11, 27, tzinfo=UTC)
    key, told = moves.to_tag(moves.AliasMove(when, **sound))  # type: ignore[arg-type]
    assert moves.moves_in({key: told}) == [moves.AliasMove(when, **sound)]  # type: ignore[arg-type]
    spoilt = value if isinstance(value, str) else json.dumps({**sound, **value})
    assert moves.moves_in({key: spoilt}) == [] and moves.expired_keys({key: spoilt}) == []


def test_the_oldest_versions_without_alias_are_retired_with_artifacts(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "PAGE_SIZE", 2)
    policies = registered(registry, 6)
    registry.move("ab12", "champion", 1)
    client, name = client_of(registry), registry.alias_state("ab12").name
    client.set_registered_model_alias(name, "trial", "3")
    assert registry.alias_state("ab12") == AliasState("ab12", champion=1, trial=3)
    gone = artefact(registry, policies[1], 2)
    run = client.get_model_version(name, "2").run_id
    assert registry.retire("ab12", 6) == []
    assert registry.retire("ab12", 4) == [2, 4]
    assert registry.retire("ab12", 4) == []
    assert [version.number for version in registry.versions("ab12")] == [1, 3, 5, 6]
    assert not gone.exists() and client.get_run(run).info.status == "FINISHED"
    assert registry.retire("ab12", 0) == [5]  # aliases are somebody's word
    assert digest_of(registry.load("ab12", 1)) == digest_of(policies[0])


@pytest.mark.parametrize("alias", ["pinned", "champion"])
def test_a_version_named_during_retirement_stays(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, alias: str
) -> None:
    policies = registered(registry, 6)
    registry.move("ab12", "champion", 6)
    person, through, named = Registry(registry.tracking_uri), registry._connection.files, []

    def slow(uri: str) -> object:
        if not named:
            named.append(uri)
            person.move("ab12", alias, 2, "anna", "hold this while we look")
        return through(uri)

    monkeypatch.setattr(registry._connection, "files", slow)
    assert registry.retire("ab12", 2) == [1, 3, 4]
    assert getattr(person.alias_state("ab12"), alias) == 2
    assert digest_of(person.load("ab12", 2)) == digest_of(policies[1])
    assert not [key for key in person.alias_state("ab12").tags if key.startswith("retired.")]


def test_an_invalid_retirement_tag_is_skipped(registry: Registry) -> None:
    policies = registered(registry)
    client, name = client_of(registry), registry.alias_state("ab12").name
    for key, value in {"x": "[]", "7": "[" * 5_000, "8": "3", "1": '["a", null]'}.items():
        client.set_registered_model_tag(name, f"retired.{key}", value)
    assert registry.retire("ab12", 5) == []
    assert digest_of(registry.load("ab12", 1)) == digest_of(policies[0])


@pytest.mark.parametrize("refused", ["create_model_version", "log_model_artifacts", "log_batch"])
def test_a_retry_continues_the_existing_run(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise MlflowException("no more of these for you", PERMISSION_DENIED)

    policy, params = random_policy(scope="ab12"), {"champion": 1}
    for again in (registry, registry, Registry(registry.tracking_uri)):
        with monkeypatch.context() as patch, pytest.raises(RegistryError, match="no more"):
            patch.setattr(again._client, refused, refuse)
            again.register(policy, params, {"mae": 0.5}, {"origin": "learner"}, {"events": 9})
    assert registry.register(policy, {"champion": 2}, {"mae": 0.5}) == 1
    client = client_of(registry)
    experiment = client.get_experiment_by_name(EXPERIMENT).experiment_id
    (run,) = client.search_runs([experiment])
    (model,) = client.search_logged_models([experiment])
    assert run.info.status == "FINISHED" and run.data.metrics == {"mae": 0.5}
    assert digest_of(registry.load("ab12", 1)) == digest_of(policy)
    assert (
        client.get_model_version(registry.alias_state("ab12").name, "1").run_id == run.info.run_id
    )
    assert model.source_run_id == run.info.run_id


def test_versions_created_by_others_keep_their_files(registry: Registry, tmp_path: Path) -> None:
    """It is no policy, so nobody serves it; and its files may be a run's of another project."""
    registered(registry)
    weights = tmp_path / "theirs" / "weights"
    weights.parent.mkdir()
    weights.write_text("")
    name = registry.alias_state("ab12").name
    client_of(registry).create_model_version(name, weights.parent.as_uri())
    assert registry.retire("ab12", 1) == [1, 2]
    assert [version.number for version in registry.versions("ab12")] == [3, 4]
    assert weights.exists()


@pytest.mark.parametrize("dying", ["delete_logged_model", "delete_model_version"])
@pytest.mark.parametrize("through", [True, False])
def test_an_interrupted_retirement_is_completed(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, dying: str, through: bool
) -> None:
    gone = artefact(registry, registered(registry)[0], 1)
    client = client_of(registry)
    model = client.get_model_version(registry.alias_state("ab12").name, "1").tags[LOGGED_TAG]
    delete = getattr(registry._client, dying)

    def killed(*args: object) -> None:
        if through:
            delete(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(registry._client, dying, killed)
        registry.retire("ab12", 2)
    registry.retire("ab12", 2)
    assert [version.number for version in registry.versions("ab12")] == [2, 3]
    assert not gone.exists()
    with pytest.raises(Exception, match=model):
        client.get_logged_model(model)


def test_former_champions_are_retired_last_and_the_previous_one_never(
    registry: Registry,
) -> None:
    registered(registry, 5)
    for version in (1, 2, 4):
        registry.move("ab12", "champion", version)
    assert registry.retire("ab12", 4) == [3]
    assert registry.retire("ab12", 1) == [1], "2 was champion before 4; 5 is the last candidate"
    assert registry.find(random_policy(1, scope="ab12")) == 2
    assert registry.find(random_policy(9, scope="ab12")) is None


def test_equal_policies_are_one_version(registry: Registry) -> None:
    policy = random_policy(scope="ab12")
    assert registry.register(policy) == registry.register(replace(policy, version=7)) == 1
    published = replace(policy, version=1, publication=9, role="trial")
    assert digest_of(published) == digest_of(policy) != digest_of(random_policy(1, "ab12"))
    assert registry.digest("ab12", 1) == digest_of(registry.load("ab12", 1)) == digest_of(policy)


STEPS = (
    "create_registered_model", "create_run", "create_logged_model", "log_model_artifacts",
    "finalize_logged_model", "create_model_version",
)  # fmt: skip


@pytest.mark.parametrize("dying", STEPS)
def test_a_kill_leaves_no_version_without_its_artifact(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, dying: str
) -> None:
    policy = random_policy(scope="ab12")
    through = getattr(registry._client, dying)

    def killed(*args: object, **kwargs: object) -> None:
        through(*args, **kwargs)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(registry._client, dying, killed)
        registry.register(policy)
    version = registry.register(policy)
    assert digest_of(registry.load("ab12", version)) == digest_of(policy)
    assert len(registry.versions("ab12")) == version == 1


def test_models_are_listed_page_by_page(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "PAGE_SIZE", 3)
    for number in range(8):
        client_of(registry).create_registered_model(f"{registry.prefix}s{number}")
    assert sorted(registry.alias_states()) == [f"s{number}" for number in range(8)]


def test_two_deployments_share_a_server(registry: Registry) -> None:
    staging = Registry(registry.tracking_uri, "staging_")
    other = Registry(registry.tracking_uri, "stagingX")
    for each, scope in ((registry, "a"), (staging, "b"), (other, "c")):
        each.register(random_policy(scope=scope))
    found = [set(each.alias_states()) for each in (registry, staging, other)]
    assert found == [{"a"}, {"b"}, {"c"}]


@pytest.mark.parametrize("harm", ["flip", "truncate", "delete", "swap"])
def test_a_tampered_artifact_is_refused(registry: Registry, harm: str) -> None:
    policy = random_policy(scope="ab12")
    version = registry.register(policy)
    registry.move("ab12", "champion", version)
    path = artefact(registry, policy, version)
    data = bytearray(path.read_bytes())
    if harm == "flip":
        data[-3] ^= 0x40
        path.write_bytes(data)
    elif harm == "truncate":
        path.write_bytes(data[:100])
    elif harm == "delete":
        path.unlink()
    else:
        registry.register(random_policy(seed=1, scope="ab12"))
        path.write_bytes(artefact(registry, policy, 2).read_bytes())
    with pytest.raises(RegistryError, match="version 1"):
        champion_of(registry, "ab12")


def test_missing_models_are_reported_in_one_sentence(registry: Registry) -> None:
    registered(registry, 1)
    for ask in (
        lambda: registry.load("ab12", 9),
        lambda: registry.alias_state("cd34"),
        lambda: registry.move_from("ab12", "champion", None, 9, "l", ""),
        lambda: registry.move("ab12", "champion", 9),
    ):
        with pytest.raises(RegistryError) as told:
            ask()
        assert "\n" not in str(told.value)
    away = Registry("http://127.0.0.1:9")
    with pytest.raises(RegistryError, match="could not list models"):
        away.alias_states()
