"""MLflow as operators have it: addresses apart, stores without a client, passwords from files."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from decoder.contracts.errors import RegistryError
from learner.release.registry import Registry
from learner.settings import LearnerSettings
from tests.conftest import random_policy
from tests.learner.release.test_meanwhile import fronted
from tests.learner.stage import WARNINGS, client_of

pytestmark = WARNINGS


def test_registry_and_tracking_server_may_differ(
    registry: Registry, empty_store: Path, tmp_path: Path
) -> None:
    server = f"sqlite:///{shutil.copy(empty_store, tmp_path / 'runs.db')}"
    apart = Registry(server, registry_uri=registry.tracking_uri)
    apart.move(
        "apart", "champion", apart.register(random_policy(1, "apart", 0), metrics={"mae": 1.5})
    )
    assert apart.load("apart", 1).version == 1
    (version,) = apart.versions("apart")
    assert client_of(Registry(server)).get_run(version.run).data.metrics == {"mae": 1.5}
    assert "apart" not in Registry(server).alias_states()
    assert registry.alias_state("apart").champion == 1
    apart.register(random_policy(2, "apart", 0))
    apart.register(random_policy(3, "apart", 0))
    assert apart.retire("apart", 1) == [2]


@pytest.mark.parametrize(
    "store, extra", [("s3://b/a", "s3"), ("gs://b/a", "gcs"), ("wasbs://c@a.blob.x/a", "azure")]
)
def test_a_missing_store_client_names_its_extra(registry: Registry, store: str, extra: str) -> None:
    """A server that passes no artefacts on lets the learner write to the store itself."""
    client_of(registry).create_experiment("hvd-learner", artifact_location=store)
    with pytest.raises(RegistryError) as told:
        registry.register(random_policy(1, "ab12", 0))
    assert f"pip install 'hybrid-verified-decoding[{extra}]'" in str(told.value)
    assert "\n" not in str(told.value)
    assert registry.versions("ab12") == []


def test_passwords_are_read_from_files_and_passed_to_mlflow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in {"username": "anna", "password": "hunter2"}.items():
        (tmp_path / f"hvd_learner_mlflow_{name}").write_text(text)
        monkeypatch.delenv(f"MLFLOW_TRACKING_{name.upper()}", raising=False)
    monkeypatch.setenv("HVD_SECRETS_DIR", str(tmp_path))
    with fronted(lambda *_: []) as front:
        settings = LearnerSettings.load(mlflow_tracking_uri=front.url)
        assert "hunter2" not in repr(settings)
        front.watch(lambda number, path: 403)
        with pytest.raises(RegistryError, match="403"):
            Registry.of(settings).alias_states()
    assert front.authorization == "Basic YW5uYTpodW50ZXIy"
