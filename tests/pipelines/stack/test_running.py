from __future__ import annotations

import io
import os
import socket

import pytest
from rich.console import Console

from decoder.contracts.errors import ProcessError
from decoder.contracts.settings import KafkaSettings
from decoder.settings import WorkerSettings
from learner.settings import LearnerSettings
from pipelines import machine
from pipelines.stack import broker
from pipelines.stack.running import TRACKING_VARIABLE, Home, Ports, child_environment, running


def test_what_was_started_is_stopped_when_the_rest_cannot_start(
    expanded_model, tmp_path, monkeypatch
) -> None:
    for variable in (broker.VARIABLE, TRACKING_VARIABLE):
        monkeypatch.delenv(variable, raising=False)
    shown = io.StringIO()
    kafka_port = machine.free_port()
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        ports = Ports(api=machine.free_port(), kafka=kafka_port, mlflow=taken)
        with (
            pytest.raises(ProcessError, match=f"port {taken} is taken"),
            running(ports, Home.under(tmp_path / "run"), Console(file=shown)),
        ):
            pytest.fail("the stack came up on a taken port")
    assert f"broker 127.0.0.1:{kafka_port}" in shown.getvalue()
    assert not broker.answers(KafkaSettings(bootstrap_servers=f"127.0.0.1:{kafka_port}"))


def test_children_learn_where_the_others_are_and_refuse_none_of_it(tmp_path, monkeypatch) -> None:
    environment = {"PATH": os.defpath, "TOKENIZERS_PARALLELISM": "true"}
    given = child_environment(environment, KafkaSettings(), "http://127.0.0.1:5001", tmp_path)
    assert given.items() >= environment.items()
    assert given[broker.VARIABLE] == KafkaSettings().bootstrap_servers
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    learner = LearnerSettings.load()
    assert learner.mlflow_tracking_uri == "http://127.0.0.1:5001"
    assert (learner.state_dir, KafkaSettings.load()) == (tmp_path, KafkaSettings())
    WorkerSettings.load()
