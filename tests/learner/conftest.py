"""A real broker, real MLflow on SQLite, and traffic whose payoff depends on its features."""

from __future__ import annotations

import logging
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from kafka.admin import KafkaAdminClient, NewTopic
from sqlalchemy import Engine, event

from decoder.contracts.topics import TOPICS
from decoder.kafka.clients import listens
from learner import background, lease, loop
from learner.loop import Learner
from learner.release import registrar
from learner.release.registry import Registry
from learner.settings import LearnerSettings
from pipelines.machine import free_port
from pipelines.stack import processes
from pipelines.stack.broker import broker_part, local
from tests.conftest import patience, swept, until
from tests.learner.stage import EVENTS, OTHER, SERVED, Stage
from tests.learner.stream import SCOPE, Connect, batches, produce

logging.getLogger("kafka").setLevel(logging.CRITICAL)
torch.set_num_threads(1)  # as the learner does; two threads on busy cores take fifty times longer


@event.listens_for(Engine, "connect")
def _unsynchronised(connection: Any, _: object) -> None:
    """A registry of a test outlives no power cut: it waits for no disk."""
    if isinstance(connection, sqlite3.Connection):
        connection.execute("PRAGMA synchronous=OFF")


class Broker:
    """The embedded broker, without topics but for those that ``folder`` holds."""

    def __init__(self, folder: Path, port: int | None = None) -> None:
        self.port = port or free_port()
        self.kafka = local(self.port)
        part = broker_part(self.port, folder / "data", folder / "broker.log")
        self.child = processes.start(part)
        # no client is made before it listens, since one that fails leaves sockets
        until(lambda: listens(self.kafka), "the broker")

    def make_topics(self) -> None:
        with closing(KafkaAdminClient(**self.kafka.client_options())) as admin:
            admin.create_topics([NewTopic(topic.name, 1, 1) for topic in TOPICS])

    def stop(self) -> None:
        processes.stop([self.child])


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registries, leases and topics are followed closely, and no thread outlives its test."""
    for place, seconds in {
        (registrar, "FOLLOW"): 0.2, (registrar, "RETRY"): 0.3, (registrar, "CLOSE"): 60.0,
        (background, "CLOSE"): 60.0,
        (loop, "FOLLOW"): 0.1, (loop, "POLL"): 0.05, (lease, "LOOK"): 0.05,
    }.items():  # fmt: skip
        monkeypatch.setattr(place[0], f"{place[1]}_SECONDS", seconds)


class Clock:
    """It goes on a little whenever it is asked, however long the machine stands still."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        self.now += 1e-5  # it may be asked a million times
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """By which leases run out: when the test says so. They are renewed all the time."""
    for name, seconds in {"RENEW": 1e-3, "LOOK": 0.0, "RETRY": 1e-3}.items():
        monkeypatch.setattr(lease, f"{name}_SECONDS", seconds)
    made = Clock()
    monkeypatch.setattr(lease, "time", made)
    return made


@pytest.fixture
def bare_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """A broker without topics, one for each test: it starts in a tenth of a second."""
    started = Broker(tmp_path_factory.mktemp("broker"))
    with patience():
        yield started
    started.stop()
    swept()  # here, and not in somebody else's test


@pytest.fixture
def broker(bare_broker: Broker) -> Broker:
    bare_broker.make_topics()
    return bare_broker


@pytest.fixture
def connected(broker: Broker) -> Iterator[Connect]:
    """Makes learners that are connected, and closes them all."""
    made: list[Learner] = []

    def connect(settings: LearnerSettings) -> Learner:
        learner = Learner(settings, broker.kafka)
        made.append(learner)
        learner.registrar.start()
        return learner

    yield connect
    for learner in made:
        learner.close()


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An MLflow database with its tables: making them takes seconds, copying them nothing."""
    folder = tmp_path_factory.mktemp("mlflow")
    Registry(f"sqlite:///{folder / 'mlflow.db'}").alias_states()
    return folder / "mlflow.db"


@pytest.fixture(scope="session")
def store(empty_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One in which version 1 is champion, and version 2 another that is registered."""
    folder = tmp_path_factory.mktemp("standing")
    shutil.copy(empty_store, folder)
    registry = Registry(f"sqlite:///{folder / 'mlflow.db'}")
    registry.move(SCOPE, "champion", registry.register(SERVED))
    registry.register(OTHER)
    return folder / "mlflow.db"


def copied(store: Path, home: Path) -> Registry:
    """A registry in ``home`` with all that ``store`` has, artefacts and all."""
    shutil.copytree(store.parent, home)
    with sqlite3.connect(home / "mlflow.db") as held:
        columns = held.execute(
            "SELECT t.name, c.name FROM sqlite_master t, pragma_table_info(t.name) c "
            "WHERE t.type = 'table' AND c.type LIKE 'VARCHAR%'"
        ).fetchall()
        for table, column in columns:
            changed = f'UPDATE "{table}" SET "{column}" = replace("{column}", ?, ?)'
            held.execute(changed, (str(store.parent), str(home)))
    held.close()
    return Registry(f"sqlite:///{home / 'mlflow.db'}")


@pytest.fixture
def registry(empty_store: Path, tmp_path: Path) -> Registry:
    return copied(empty_store, tmp_path / "mlruns")


@pytest.fixture
def bare(broker: Broker, connected: Connect, registry: Registry, tmp_path: Path) -> Iterator[Stage]:
    """Nothing is registered, and nothing was sent."""
    made = Stage(broker.kafka, registry, connected, tmp_path)
    yield made
    made.close()


@pytest.fixture
def stage(broker: Broker, connected: Connect, store: Path, tmp_path: Path) -> Iterator[Stage]:
    """Two versions are registered, as in ``store``, and the scope has drafts."""
    made = Stage(broker.kafka, copied(store, tmp_path / "mlruns"), connected, tmp_path)
    produce(broker.kafka, batches(EVENTS[:200]))
    yield made
    made.close()
