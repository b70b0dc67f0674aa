"""Killed at random instants, or for minutes without MLflow, a learner ends where it should."""

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
from typing import Any

import numpy as np
import pytest

from decoder.contracts.events import Origin
from decoder.contracts.status import LearnerStatus
from learner.checkpoint import Store, restore
from learner.release.registrations import Registration
from learner.release.registry import Registry, digest_of
from pipelines.machine import free_port
from pipelines.stack import processes
from pipelines.stack.processes import Part
from pipelines.stack.running import registry_arguments, responds
from tests.conftest import until
from tests.end_to_end.service import Reader
from tests.learner.conftest import Broker
from tests.learner.stream import SCOPE, batches, plain, produce
from tests.learner.traffic import Traffic

REQUESTS, RECORD = 400, 50
KILLS, BUFFER = 6, 4_000
AWAY = "http://127.0.0.1:9"
"""No registry: what won waits, and when a version is crowned depends on nobody's clock."""


def values() -> list[bytes]:
    """Two scopes in turns, poison between them."""
    found: list[bytes] = []
    ours, theirs = (
        batches(
            Traffic(seed=seed).events(REQUESTS), RECORD, Origin(f"s{seed}", "w", f"{seed:x}" * 8)
        )
        for seed in (3, 4)
    )
    for number, pair in enumerate(zip(ours, theirs, strict=True)):
        found += pair
        if number % 10 == 0:
            found += [b"poison", pair[0]]
    return found


def started(broker: Broker, folder: Path, **variables: str) -> subprocess.Popen[bytes]:
    """A learner with its state in a folder, and its log beside that."""
    environment = {
        **os.environ,
        "HVD_KAFKA_BOOTSTRAP_SERVERS": broker.kafka.bootstrap_servers,
        "HVD_LEARNER_STATE_DIR": str(folder),
        **variables,
    }
    with (folder.parent / f"{folder.name}.log").open("ab") as log:
        command = [sys.executable, "-m", "tests.learner.killed"]
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log)


def read_up_to(folder: Path) -> int:
    store = Store(folder / "state.db")
    offsets = [int(tree["offsets"].get("0", 0)) for tree in store.get("state")]
    store.close()
    return offsets[0] if offsets else 0


def run_until(
    broker: Broker, folder: Path, done: int, how: signal.Signals, late: float = 0.0
) -> None:
    """Let a learner run until ``late`` seconds after its checkpoint has come to ``done`` records;
    then end it."""
    process = started(
        broker, folder, HVD_LEARNER_MLFLOW_TRACKING_URI=AWAY, HVD_LEARNER_BUFFER_EVENTS=str(BUFFER),
        HVD_LEARNER_AWAKE_SCOPES="1",  # so that scopes rest and wake on the way
    )  # fmt: skip
    until(lambda: process.poll() is not None or read_up_to(folder) >= done)
    assert process.poll() is None
    time.sleep(late)
    process.send_signal(how)
    process.wait(300)


def state_of(folder: Path) -> dict[str, Any]:
    """All that is saved."""
    store = Store(folder / "state.db")
    (tree,) = store.get("state")
    del tree["marks"]  # they hang on the clock
    for name in tree["entries"]:
        parts, (scope,) = store.get(f"rows {name}", below=2**40), store.get(f"scope {name}")
        tree[name] = scope | {
            column: np.concatenate([part[column] for part in parts])[-BUFFER:]
            for column in parts[0]
        }
    store.close()
    return plain(tree)


@pytest.mark.long
def test_a_killed_learner_equals_an_uninterrupted_one(broker: Broker, tmp_path: Path) -> None:
    sent = values()
    produce(broker.kafka, sent)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run_until(broker, whole, len(sent), signal.SIGTERM)
    draw = random.Random(1)
    for number in range(KILLS):
        done, late = len(sent) * number // KILLS + 1, draw.random() * 0.3
        run_until(broker, killed, done, signal.SIGKILL, late)
    run_until(broker, killed, len(sent), signal.SIGTERM)
    mine, twin = state_of(whole), state_of(killed)
    assert mine.keys() == twin.keys() and all(mine[part] == twin[part] for part in mine)
    assert mine["refused"] == {"malformed": REQUESTS * 20 // RECORD // 10} and mine["waiting"]


AWAY_SECONDS = 130.0
KNOWN = 4
"""Records that make a scope one that belongs into the registry."""


class Server:
    """``mlflow server``, which may die or fall silent."""

    def __init__(self, home: Path) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.part = Part("mlflow", registry_arguments(port, home), home / "server.log")

    def start(self) -> None:
        self.child = processes.start(self.part, again=True)
        wait(self.answers)

    def answers(self) -> bool:
        return responds(f"{self.url}/health")

    def signal(self, number: signal.Signals) -> None:
        os.killpg(self.child.process.pid, number)  # its workers too
        if number is signal.SIGKILL:
            self.child.process.wait(300)


def wait(done: Callable[[], bool]) -> None:
    until(done, turn=lambda: time.sleep(0.2))


def learner(broker: Broker, server: Server, folder: Path) -> subprocess.Popen[bytes]:
    return started(
        broker, folder, HVD_LEARNER_MLFLOW_TRACKING_URI=server.url,
        HVD_LEARNER_CANDIDATE_EVERY="200",
        HVD_LEARNER_ROLLOUT="off",  # no worker is here to try anything
    )  # fmt: skip


def champion_in(registry: Registry) -> int | None:
    standing = registry.alias_states().get(SCOPE)
    return None if standing is None else standing.champion


def waiting_in(folder: Path) -> list[str]:
    """Digests of the candidates that wait, as a restart would find them."""
    store = Store(folder / "state.db")
    waiting = [
        restore(Registration, each) for tree in store.get("state") for each in tree["waiting"]
    ]
    store.close()
    return [digest_of(each.policy) for each in waiting if each.against]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of mlflow's own parts
@pytest.mark.parametrize("how", ["dead", "silent"])
def test_an_outage_of_mlflow_costs_no_event_and_no_candidate(
    how: str, broker: Broker, empty_store: Path, tmp_path: Path
) -> None:
    home, folder = tmp_path / "mlruns", tmp_path / "learner"
    home.mkdir()
    shutil.copy(empty_store, home / "mlflow.db")
    server, records = Server(home), batches(Traffic(seed=9).events(400))
    process = learner(broker, server, folder)
    try:
        server.start()
        told = Reader(broker.kafka)
        registry = Registry(f"sqlite:///{home / 'mlflow.db'}")  # which is there all the time
        produce(broker.kafka, records[:KNOWN])
        wait(lambda: champion_in(registry) is not None)
        before = champion_in(registry)

        def status() -> LearnerStatus:
            assert process.poll() is None
            until(lambda: told.learners, turn=told.read)
            told.read()
            return told.learners[-1]

        wait(lambda: status().scope == SCOPE and status().champion_version == before)
        server.signal(signal.SIGKILL if how == "dead" else signal.SIGSTOP)
        gone, sent = time.monotonic(), KNOWN
        killed = gone + random.Random(how).uniform(0.2, 0.8) * AWAY_SECONDS
        while time.monotonic() < gone + AWAY_SECONDS:
            if sent < len(records) - 1:
                produce(broker.kafka, records[sent : sent + 1])
                sent += 1
            if killed < time.monotonic():
                process.kill()
                process.wait(300)
                process, killed = learner(broker, server, folder), float("inf")
            time.sleep(1.0)
        # it is still away, and everything has been learned from but what is under way
        wait(lambda: status().drafts_consumed == 50 * sent and status().lag == 0)
        wait(lambda: status().registry_away_since > 0 and status().waiting >= 1)
        assert not server.answers()
        wait(lambda: bool(waiting_in(folder)))
        (won,) = waiting_in(folder)
        server.start() if how == "dead" else server.signal(signal.SIGCONT)
        wait(lambda: champion_in(registry) not in (None, before))
        champion = champion_in(registry)
        assert champion is not None and registry.digest(SCOPE, champion) == won
        wait(lambda: status().champion_version == champion)
        produce(broker.kafka, records[sent : sent + 1])
        wait(lambda: status().drafts_consumed == 50 * (sent + 1))
        last = status()
        assert (last.records_refused, last.records_missing, last.faults) == (0, 0, 0)
        assert last.registry_away_since == 0
        told.close()
    finally:
        process.kill()
        process.wait(300)
        processes.stop([server.child])
