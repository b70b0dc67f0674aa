"""Minutes without MLflow: what comes in is learned from, and who won is registered afterwards."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from kafka import KafkaConsumer, TopicPartition

from decoder.contracts.status import LearnerStatus, decode_status
from decoder.contracts.topics import STATUS
from learner import checkpoint, state
from learner.registry import Registry, digest_of
from learner.settings import LearnerSettings
from pipelines.machine import free_port
from pipelines.stack.running import registry_arguments
from tests.learner.conftest import Broker
from tests.learner.stream import SCOPE, batches, produce
from tests.learner.traffic import Traffic

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(1_800),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of mlflow's own parts
]

AWAY_SECONDS = 130.0
RECORDS = batches(Traffic(seed=9).events(400))
KNOWN = 4
"""Records that make a scope one that belongs into the registry."""


class Server:
    """``mlflow server``, which may die or fall silent."""

    def __init__(self, home: Path) -> None:
        self.port, self.home = free_port(), home
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with (self.home / "server.log").open("ab") as log:
            self.process = subprocess.Popen(
                registry_arguments(self.port, self.home),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        wait(self.answers)

    def answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=2.0).is_success
        except httpx.HTTPError:
            return False

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        os.killpg(self.process.pid, number)  # its workers too
        if number is signal.SIGKILL:
            self.process.wait(10)

    def leave(self, how: str) -> None:
        self.signal(signal.SIGKILL if how == "dead" else signal.SIGSTOP)

    def come_back(self, how: str) -> None:
        if how == "dead":
            self.start()
        else:
            self.signal(signal.SIGCONT)

    def end(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.signal(signal.SIGKILL)


def wait(done: Callable[[], bool], seconds: float = 400.0) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.2)


def learner(broker: Broker, server: Server, folder: Path) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "HVD_KAFKA_BOOTSTRAP_SERVERS": broker.kafka.bootstrap_servers,
        "HVD_LEARNER_MLFLOW_TRACKING_URI": server.url,
        "HVD_LEARNER_STATE_DIR": str(folder),
        "HVD_LEARNER_CANDIDATE_EVERY": "200",
        "HVD_LEARNER_ROLLOUT": "off",  # no worker is here to try anything
    }
    with (folder.parent / "learner.log").open("ab") as log:
        command = [sys.executable, "-m", "tests.learner.killed"]
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log)


def champion_in(registry: Registry) -> int | None:
    standing = registry.standings().get(SCOPE)
    return None if standing is None else standing.champion


class Statuses:
    """What learners say, read on from where it was read before."""

    def __init__(self, broker: Broker) -> None:
        self.consumer = KafkaConsumer(**broker.kafka.client_options(), group_id=None)
        self.consumer.assign([TopicPartition(STATUS.name, 0)])
        self.consumer.seek_to_beginning()
        self.last: LearnerStatus | None = None

    def newest(self) -> LearnerStatus:
        deadline = time.monotonic() + 60.0
        while (polled := self.consumer.poll(timeout_ms=500)) or self.last is None:
            assert time.monotonic() < deadline, "nothing is said"
            for records in polled.values():
                found = decode_status(records[-1].value)
                assert isinstance(found, LearnerStatus)
                self.last = found
        return self.last


def waiting_in(folder: Path) -> list[str]:
    """Digests of the candidates that wait, as a restart would find them."""
    if checkpoint.load(folder / "checkpoint.safetensors") is None:
        return []
    held = state.resumed(LearnerSettings(state_dir=folder)).waiting
    return [digest_of(each.policy) for each in held if each.against]


@pytest.mark.parametrize("how", ["dead", "silent"])
def test_minutes_without_mlflow_cost_no_event_and_no_verdict(
    how: str, broker: Broker, empty_store: Path, tmp_path: Path
) -> None:
    home, folder = tmp_path / "mlruns", tmp_path / "learner"
    home.mkdir()
    shutil.copy(empty_store, home / "mlflow.db")
    server = Server(home)
    process = learner(broker, server, folder)
    try:
        server.start()
        told = Statuses(broker)
        registry = Registry(f"sqlite:///{home / 'mlflow.db'}")  # which is there all the time
        produce(broker.kafka, RECORDS[:KNOWN])
        wait(lambda: champion_in(registry) is not None)
        before = champion_in(registry)

        def status() -> LearnerStatus:
            assert process.poll() is None
            return told.newest()

        wait(lambda: status().scope == SCOPE and status().champion_version == before)
        server.leave(how)
        gone, sent = time.monotonic(), KNOWN
        killed = gone + random.Random(how).uniform(0.2, 0.8) * AWAY_SECONDS
        while time.monotonic() < gone + AWAY_SECONDS:
            if sent < len(RECORDS) - 1:
                produce(broker.kafka, RECORDS[sent : sent + 1])
                sent += 1
            if killed < time.monotonic():
                process.kill()
                process.wait(10)
                process, killed = learner(broker, server, folder), float("inf")
            time.sleep(1.0)
        # it is still away, and everything has been learned from but what is under way
        wait(lambda: status().drafts_consumed == 50 * sent and status().lag == 0)
        assert status().registry_away_since > 0 and status().waiting >= 1
        assert not server.answers()
        wait(lambda: bool(waiting_in(folder)))
        (won,) = waiting_in(folder)
        server.come_back(how)
        wait(lambda: champion_in(registry) not in (None, before))
        champion = champion_in(registry)
        assert champion is not None and registry.digest(SCOPE, champion) == won
        wait(lambda: status().champion_version == champion)
        produce(broker.kafka, RECORDS[sent : sent + 1])
        wait(lambda: status().drafts_consumed == 50 * (sent + 1))
        last = status()
        assert (last.records_refused, last.records_missing, last.faults) == (0, 0, 0)
        assert last.registry_away_since == 0
        told.consumer.close()
    finally:
        process.kill()
        process.wait(10)
        server.end()
