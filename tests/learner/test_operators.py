# ruff: noqa: F811 -- fixtures of another file are asked for by name
"""MLflow as operators have it: addresses apart, stores without a client, registries that lack what
a learner needs, servers that are slow, and passwords from files."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from decoder.contracts.errors import RegistryError
from learner.registry import Registry
from learner.settings import LearnerSettings
from tests.conftest import random_policy
from tests.learner.stage import client_of
from tests.learner.test_meanwhile import (  # noqa: F401 -- fixtures
    READ,
    SET,
    Place,
    Proxy,
    home,
    place,
    proxy,
    server,
)

# mlflow uses parts of sqlalchemy that are to go; that is theirs to mend
pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning"), pytest.mark.timeout(900)]


def test_versions_lie_in_the_registry_and_their_runs_with_the_tracking_server(
    registry: Registry, server: str
) -> None:
    apart = Registry(server, registry_uri=registry.tracking_uri)
    apart.promote("apart", apart.register(random_policy(1, "apart", 0), metrics={"mae": 1.5}))
    assert apart.load("apart", 1).version == 1
    (version,) = apart.versions("apart")
    assert client_of(Registry(server)).get_run(version.run).data.metrics == {"mae": 1.5}
    assert "apart" not in Registry(server).standings()
    assert registry.standing("apart").champion == 1
    apart.register(random_policy(2, "apart", 0))
    apart.register(random_policy(3, "apart", 0))
    assert apart.retire("apart", 1) == [2]


@pytest.mark.parametrize(
    "store, extra", [("s3://b/a", "s3"), ("gs://b/a", "gcs"), ("wasbs://c@a.blob.x/a", "azure")]
)
def test_a_store_without_a_client_is_named_with_what_brings_it(
    registry: Registry, store: str, extra: str
) -> None:
    """A server that passes no artefacts on lets the learner write to the store itself."""
    client_of(registry).create_experiment("hvd-learner", artifact_location=store)
    with pytest.raises(RegistryError) as told:
        registry.register(random_policy(1, "ab12", 0))
    assert f"pip install 'hybrid-verified-decoding[{extra}]'" in str(told.value)
    assert "\n" not in str(told.value)
    assert registry.versions("ab12") == []


@pytest.mark.parametrize("kind, lacks", [("databricks-uc", "filters"), ("databricks", "aliases")])
def test_a_registry_that_lacks_what_a_learner_needs_says_so_in_one_sentence(
    registry: Registry, server: str, kind: str, lacks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Databricks' own clients in mlflow, before a server that answers as its workspace does."""
    monkeypatch.setenv("DATABRICKS_HOST", server)
    monkeypatch.setenv("DATABRICKS_TOKEN", "hunter2")
    Registry(server).register(random_policy(1, kind, 0))
    theirs = Registry(registry.tracking_uri, registry_uri=kind)
    with pytest.raises(RegistryError) as told:
        theirs.promote(kind, 1)
    assert lacks in str(told.value) and "HVD_LEARNER_MLFLOW_REGISTRY_URI" in str(told.value)
    assert "\n" not in str(told.value) and "hunter2" not in str(told.value)
    assert Registry(server).standing(kind).champion is None


@pytest.mark.parametrize("how", ["by_hand", "by_command"])
def test_a_persons_move_during_a_slow_registration_wins_ten_times_of_ten(
    place: Callable[[], Place], proxy: Proxy, how: str
) -> None:
    for turn in range(5):
        held = place()
        moves = itertools.count()

        def before(
            number: int, path: str, held: Place = held, moves=moves, turn: int = turn
        ) -> None:
            time.sleep(0.05)
            if number == 3 * turn:
                getattr(held, how)()

        standing = held.registry.standing(held.scope)
        proxy.watch(before)
        version = held.registry.register(random_policy(9, held.scope, 0))
        stands = held.registry.move_over(
            held.scope, "champion", standing.champion, version, "learner-a", "won"
        )
        assert (stands, held.champion) == (3, 3), proxy.calls


def test_passwords_come_from_files_and_reach_mlflow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, proxy: Proxy
) -> None:
    for name, text in {"username": "anna", "password": "hunter2"}.items():
        (tmp_path / f"hvd_learner_mlflow_{name}").write_text(text)
        monkeypatch.delenv(f"MLFLOW_TRACKING_{name.upper()}", raising=False)
    monkeypatch.setenv("HVD_SECRETS_DIR", str(tmp_path))
    settings = LearnerSettings.load(mlflow_tracking_uri=proxy.url)
    assert "hunter2" not in repr(settings)
    proxy.watch(lambda number, path: None)
    Registry.of(settings).standings()
    assert proxy.headers["authorization"] == "Basic YW5uYTpodW50ZXIy"
