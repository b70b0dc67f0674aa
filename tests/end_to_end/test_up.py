"""``hvd up`` as a person starts it, in a folder of an odd name and a shell that is set up for other
servers: what is killed comes back, and Ctrl-C ends it all.

Which answers and events survive which kills is judged by ``hvd chaos``, on the same supervision
(``tests/pipelines/lab/chaos``). With ``-s`` it prints what it was told.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
import pytest

from pipelines import embedded, machine
from pipelines.lab.chaos.run import answer_of
from pipelines.stack.running import HVD, Ports
from pipelines.workloads import prompts
from tests import conftest

pytestmark = [
    pytest.mark.stack,
    pytest.mark.release,
    pytest.mark.timeout(2400),
    # mlflow's own
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

PARTS = {
    "broker": r"noida-db start",
    "registry": r"mlflow server",
    "learner": r"pipelines\.cli learn",
    "worker": r"vllm\.entrypoints|pipelines\.cli serve",
}
until = partial(conftest.until, seconds=600.0)


@dataclass
class Service:
    """A running ``hvd up``."""

    process: subprocess.Popen[bytes]
    said: Path
    ports: Ports
    environment: dict[str, str]

    @property
    def folder(self) -> Path:
        """Where it works."""
        return self.said.parent

    def part(self, name: str) -> psutil.Process | None:
        """The living leader of a part's processes."""
        for child in psutil.Process(self.process.pid).children():
            try:
                found = re.search(PARTS[name], " ".join(child.cmdline()))
                if found and child.status() != psutil.STATUS_ZOMBIE:
                    return child
            except psutil.NoSuchProcess:
                continue
        return None

    def kill(self, name: str) -> psutil.Process:
        """End a part without a warning."""
        found = self.part(name)
        assert found is not None, name
        found.kill()
        return found


def at(ports: Ports) -> list[str]:
    """Options of ``hvd up``."""
    numbers = (ports.api, ports.kafka, ports.mlflow, machine.free_port())
    flags = ("--api-port", "--kafka-port", "--mlflow-port", "--page-port")
    return [each for pair in zip(flags, map(str, numbers), strict=True) for each in pair]


FOR_OTHERS = {
    "http_proxy": "http://127.0.0.1:9", "ALL_PROXY": "socks5://127.0.0.1:9", "NO_PROXY": "a.org",
    "no_proxy": "a.org",
    "MLFLOW_REGISTRY_STORE_URI": "sqlite:///production.db", "MLFLOW_STATIC_PREFIX": "/mlflow",
    "MLFLOW_SERVER_ALLOWED_HOSTS": "mlflow.example.org", "MLFLOW_ARTIFACTS_ONLY": "true",
    "MLFLOW_EXPOSE_PROMETHEUS": "metrics", "MLFLOW_TRACKING_AUTH": "nobody",
    "UVICORN_SSL_KEYFILE": "/none", "VLLM_PLUGINS": "another",
}  # fmt: skip
"""What a shell may hold that is meant for others."""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    embedded.ensure_model()
    folder, ports = tmp_path_factory.mktemp("up") / "what? e%41f #1 'ü'", Ports.free()
    folder.mkdir()
    environment = {
        **os.environ,
        **FOR_OTHERS,
        machine.FLAGS_VARIABLE: "avx2",  # float32
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "COLUMNS": "200",
    }
    said = folder / "said"
    with said.open("wb") as out:
        process = subprocess.Popen(
            ["env", "--default-signal", *HVD, "up", *at(ports)],
            cwd=folder, env=environment,
            stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        greeted = "Ctrl-C stops everything"
        until(lambda: process.poll() is not None or greeted in said.read_text(), "the greeting")
        yield Service(process, said, ports, environment)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(300)
        print(said.read_text())


def test_all_parts_come_back_answer_as_before_and_nothing_registered_is_lost(
    service: Service,
) -> None:
    from mlflow import MlflowClient

    api, asked = f"http://127.0.0.1:{service.ports.api}", next(prompts("edits"))
    before = answer_of(api, embedded.SERVED_NAME, asked).tokens
    for names in (("registry", "learner"), ("broker",), ("worker",)):
        for name in names:
            service.kill(name)
        for name in names:
            until(lambda name=name: f"{name} runs again" in service.said.read_text(), name)
            assert f"{name} was killed by signal 9" in service.said.read_text()
    after = answer_of(api, embedded.SERVED_NAME, asked)
    assert before and after.tokens == before, after.error
    client = MlflowClient(f"http://127.0.0.1:{service.ports.mlflow}")
    until(client.search_registered_models, "the learner to register what the worker serves")
    until(lambda: "champion" in client.search_registered_models()[0].aliases, "a champion")
    assert len(client.search_registered_models()) == 1
    (beside,) = service.folder.parent.iterdir()
    assert beside == service.folder
    assert {each.name for each in service.folder.iterdir()} == {"mlruns", "said", "var"}


def test_a_second_one_in_the_same_folder_is_refused_and_leaves_the_first_as_it_is(
    service: Service,
) -> None:
    logs = service.folder / "var" / "logs"
    sizes = {log: log.stat().st_size for log in logs.iterdir()}
    kafka = {"HVD_KAFKA_BOOTSTRAP_SERVERS": f"127.0.0.1:{service.ports.kafka}"}
    done = subprocess.run(
        [*HVD, "up", *at(Ports.free())], cwd=service.folder, env=service.environment | kafka,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and "another stack keeps its state in" in done.stderr
    assert all(log.stat().st_size >= size for log, size in sizes.items())


def test_ctrl_c_while_something_restarts_leaves_nothing(service: Service) -> None:
    worker = service.kill("worker")
    until(lambda: service.part("worker") not in (None, worker), "the new worker to start")
    children = psutil.Process(service.process.pid).children(recursive=True)
    service.process.send_signal(signal.SIGINT)
    service.process.send_signal(signal.SIGINT)
    service.process.wait(300)
    _, alive = psutil.wait_procs(children, timeout=300)
    assert not alive, alive
    for port in (service.ports.api, service.ports.kafka, service.ports.mlflow):
        assert machine.is_free(port)
