"""A real MLflow on SQLite: versions, aliases, and artefacts that are checked when read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from mlflow import MlflowClient

from decoder.contracts.bundle import Policy
from decoder.contracts.errors import RegistryError
from decoder.contracts.features import NUM_FEATURES
from decoder.policy.estimate import predict
from learner.registry import ARTIFACT, Registry, Standing, model_name
from tests.conftest import random_policy

# mlflow uses parts of sqlalchemy that are to go; that is theirs to mend
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

PROBES = np.random.default_rng(0).random((8, NUM_FEATURES)).astype(np.float32)


def client_of(registry: Registry) -> MlflowClient:
    return MlflowClient(registry.tracking_uri, registry.tracking_uri)


def artefact(registry: Registry, policy: Policy, version: int) -> Path:
    held = client_of(registry).get_model_version(model_name(policy.scope), str(version))
    return Path(str(held.source).removeprefix("file://")) / Path(ARTIFACT).name


def test_register_promote_and_roll_back(registry: Registry) -> None:
    policy = random_policy(scope="ab12")
    assert registry.champion("ab12") is None
    first = registry.register(policy, {"p": 1}, {"mae": 0.5}, {"verdict": "x"}, {"events": 9})
    assert registry.standings() == {"ab12": Standing("ab12", None, False)}
    second = registry.register(policy)
    assert (first, second) == (1, 2)
    client = client_of(registry)
    assert int(client.get_model_version_by_alias(model_name("ab12"), "candidate").version) == 2
    run = client.get_run(client.get_model_version(model_name("ab12"), "1").run_id)
    assert run.data.metrics == {"mae": 0.5} and run.data.params["window.events"] == "9"
    assert run.info.status == "FINISHED" and run.data.tags["verdict"] == "x"
    for version in (2, 1):
        registry.promote("ab12", version)
        champion = registry.champion("ab12")
        assert champion is not None and champion.version == version
        assert np.array_equal(predict(champion, PROBES), predict(policy, PROBES))
    assert "mlruns/artifacts" in str(artefact(registry, policy, 1))


def test_a_person_may_keep_the_alias(registry: Registry) -> None:
    registry.register(random_policy(scope="ab12"))
    client_of(registry).set_registered_model_tag(model_name("ab12"), "promotion", "manual")
    assert registry.standings()["ab12"].manual


@pytest.mark.parametrize("harm", ["flip", "truncate", "delete", "swap"])
def test_a_tampered_artefact_is_refused(registry: Registry, harm: str) -> None:
    policy = random_policy(scope="ab12")
    version = registry.register(policy)
    registry.promote("ab12", version)
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
        registry.register(policy)
        path.write_bytes(artefact(registry, policy, 2).read_bytes())
    with pytest.raises(RegistryError, match="version 1"):
        registry.champion("ab12")


def test_an_unreachable_server_is_a_registry_error() -> None:
    away = Registry("http://127.0.0.1:9")
    with pytest.raises(RegistryError, match="could not list models"):
        away.standings()


def test_runs_are_logged_and_end(registry: Registry) -> None:
    with registry.log_run("drafter", {"layers": 1}, name="first") as log:
        log({"loss": 2.0}, 0)
        log({"loss": 1.0}, 1)
    with pytest.raises(ZeroDivisionError), registry.log_run("drafter"):
        _ = 1 / 0
    client = client_of(registry)
    experiment = client.get_experiment_by_name("drafter")
    assert experiment is not None
    failed, finished = client.search_runs([experiment.experiment_id])
    assert (failed.info.status, finished.info.status) == ("FAILED", "FINISHED")
    history = client.get_metric_history(finished.info.run_id, "loss")
    assert [(m.step, m.value) for m in history] == [(0, 2.0), (1, 1.0)]
