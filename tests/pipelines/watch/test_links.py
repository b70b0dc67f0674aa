from __future__ import annotations

import os
from pathlib import Path

import pytest

from decoder.policy.first import first_policy
from learner.registry import Registry
from pipelines import machine
from pipelines.stack import processes
from pipelines.stack.running import REGISTRY_SECONDS, registry_arguments, responds
from pipelines.watch.links import versions_at
from tests.pipelines.watch.records import SCOPE

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # mlflow's own


def test_a_version_is_where_a_registry_says_that_its_model_is(tmp_path: Path) -> None:
    tmp_path.joinpath("artifacts").mkdir()
    registry = Registry(f"sqlite:///{tmp_path}/mlflow.db")
    version = registry.register(first_policy(SCOPE))
    url = f"http://127.0.0.1:{(port := machine.free_port())}"
    environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    server = processes.start(
        processes.Part(
            "registry", registry_arguments(port, tmp_path), tmp_path / "log",
            environment=environment,
        )
    )  # fmt: skip
    try:
        processes.wait_until(server, lambda: responds(f"{url}/health"), REGISTRY_SECONDS)
        address = versions_at(url, SCOPE, "http://elsewhere")
        assert version == 1
        assert address == f"http://elsewhere/#/models/{registry.model_name(SCOPE)}/versions/"
        assert versions_at(url, "f" * 16) == ""
    finally:
        processes.stop([server])


def test_without_a_server_there_is_no_link() -> None:
    assert versions_at(f"http://127.0.0.1:{machine.free_port()}", SCOPE) == ""
    assert versions_at("sqlite:///mlflow.db", SCOPE) == ""
    assert versions_at("http://127.0.0.1", "") == ""
