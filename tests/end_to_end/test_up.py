"""``hvd up`` as a person starts it: what is killed comes back, and Ctrl-C ends it all.

Which answers and events survive which kills is judged by ``hvd chaos``, on the same supervision
(``tests/pipelines/lab/chaos``). With ``-s`` it prints what it was told.
"""

from __future__ import annotations

import itertools
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


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    embedded.ensure_model()
    folder, ports = tmp_path_factory.mktemp("up"), Ports.free()
    numbers = (ports.api, ports.kafka, ports.mlflow, machine.free_port())
    named = zip(
        ("--api-port", "--kafka-port", "--mlflow-port", "--page-port"), numbers, strict=True
    )
    environment = {
        **os.environ,
        machine.FLAGS_VARIABLE: "avx2",  # float32
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "COLUMNS": "200",
    }
    said = folder / "said"
    with said.open("wb") as out:
        process = subprocess.Popen(
            ["env", "--default-signal", *HVD, "up",
             *map(str, itertools.chain.from_iterable(named))],
            cwd=folder, env=environment,
            stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        greeted = "Ctrl-C stops everything"
        until(lambda: process.poll() is not None or greeted in said.read_text(), "the greeting")
        yield Service(process, said, ports)
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
    (model,) = MlflowClient(f"http://127.0.0.1:{service.ports.mlflow}").search_registered_models()
    assert "champion" in model.aliases


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
