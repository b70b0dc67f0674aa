"""The whole service on one machine: broker, registry, worker and learner as child processes.

What already runs elsewhere is used instead: a broker named by ``HVD_KAFKA_BOOTSTRAP_SERVERS``, a
registry named by ``HVD_LEARNER_MLFLOW_TRACKING_URI``.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Final

import httpx
from rich.console import Console

from decoder.contracts.errors import ProcessError
from decoder.contracts.settings import KafkaSettings
from pipelines import embedded, machine
from pipelines.stack import broker, processes
from pipelines.stack.processes import Child

REGISTRY_SECONDS: Final = 120.0
"""A first start creates the database: a hundred migrations."""
WORKER_SECONDS: Final = 300.0
LEARNER_NICENESS: Final = 10
"""The learner shares the cores with the model that serves, and must lose every contest for them."""
TRACKING_VARIABLE: Final = "HVD_LEARNER_MLFLOW_TRACKING_URI"
HVD: Final = (sys.executable, "-m", "pipelines.cli")


@dataclass(frozen=True)
class Ports:
    """Where the three servers listen, on 127.0.0.1."""

    api: int = 8000
    kafka: int = 9092
    mlflow: int = 5000

    @classmethod
    def free(cls) -> Ports:
        """Ports that nobody uses now."""
        return cls(*(machine.free_port() for _ in range(3)))


@dataclass(frozen=True)
class Home:
    """Where a stack keeps what it writes."""

    logs: Path
    broker: Path
    registry: Path
    learner: Path

    @classmethod
    def under(cls, root: Path) -> Home:
        """Everything below ``root``."""
        return cls(root / "logs", root / "broker", root / "mlruns", root / "learner")

    @classmethod
    def of_checkout(cls) -> Home:
        """The places a checkout has for it."""
        return cls(Path("var/logs"), Path("var/broker"), Path("mlruns"), Path("var/learner"))


@dataclass(frozen=True)
class Stack:
    """A running stack. ``children`` are in the order in which they are stopped."""

    api: str
    tracking_uri: str
    kafka: KafkaSettings
    model: str
    children: list[Child] = field(default_factory=list)

    def check(self) -> None:
        """Do nothing while all processes run.

        Raises:
            ProcessError: one has ended; with the end of its log.
        """
        for child in self.children:
            child.check()


def registry_arguments(port: int, home: Path) -> list[str]:
    """``mlflow server`` over SQLite, artefacts beside it."""
    root = home.resolve()
    return [
        *(sys.executable, "-m", "mlflow", "server"),
        *("--host", "127.0.0.1"),
        *("--port", str(port)),
        *("--workers", "1"),
        *("--backend-store-uri", f"sqlite:///{root / 'mlflow.db'}"),
        *("--artifacts-destination", str(root / "artifacts")),
    ]


def child_environment(
    environment: Mapping[str, str], kafka: KafkaSettings, tracking_uri: str, learner_state: Path
) -> dict[str, str]:
    """What every process of the stack gets: the caller's environment and where the others are."""
    quiet = {
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "GIT_PYTHON_REFRESH": "quiet",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }
    return {
        **quiet,
        **environment,
        broker.VARIABLE: kafka.bootstrap_servers,
        TRACKING_VARIABLE: tracking_uri,
        "HVD_LEARNER_STATE_DIR": str(learner_state),
    }


def responds(url: str) -> bool:
    """Whether an HTTP server answers ``url`` with success."""
    try:
        return httpx.get(url, timeout=2.0).is_success
    except httpx.HTTPError:
        return False


@contextmanager
def _step(console: Console, what: str) -> Iterator[None]:
    began = time.monotonic()
    with console.status(f"starting {what}"):
        yield
    console.print(f"  [green]ready[/green]  {what}  [dim]{time.monotonic() - began:.0f} s[/dim]")


@contextmanager
def running(
    ports: Ports,
    home: Home,
    console: Console,
    worker_name: str | None = None,
    serve_options: tuple[str, ...] = (),
    settings: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Stack]:
    """Start the stack, wait until it serves, and stop it on leaving, however it is left.

    Args:
        worker_name: how the worker calls itself in telemetry.
        serve_options: further arguments of ``hvd serve``.
        settings: variables of worker and learner; the caller's environment goes before them.

    Raises:
        BrokerError, ProcessError, ModelError, RegistryError: the stack did not come up.
    """
    children: list[Child] = []
    try:
        with _step(console, "model"):
            embedded.ensure_model(Console(quiet=True))
        kafka = _start_broker(ports, home, children, console)
        uri = os.environ.get(TRACKING_VARIABLE) or f"http://127.0.0.1:{ports.mlflow}"
        environment = child_environment({**settings, **os.environ}, kafka, uri, home.learner)
        if worker_name is not None:
            environment["HVD_WORKER_NAME"] = worker_name
        if TRACKING_VARIABLE not in os.environ:
            with _step(console, f"registry {uri}"):
                _start_registry(ports.mlflow, home, children, environment)
        api = f"http://127.0.0.1:{ports.api}"
        with _step(console, f"worker {api} and learner"):
            arguments = [*HVD, "serve", "--port", str(ports.api), *serve_options]
            worker = processes.start("worker", arguments, home.logs / "worker.log", environment)
            children.insert(0, worker)
            learner = processes.start(
                "learner",
                [*HVD, "learn"],
                home.logs / "learner.log",
                {**environment, "OMP_NUM_THREADS": "1"},
                LEARNER_NICENESS,
            )
            children.insert(1, learner)
            processes.wait_until(
                worker, lambda: responds(f"{api}/health"), WORKER_SECONDS, children
            )
        yield Stack(api, uri, kafka, embedded.SERVED_NAME, children)
    finally:
        _stop(children, console)


def _stop(children: list[Child], console: Console) -> None:
    """Stop in order; a second Ctrl-C must not leave half of it running."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        if children:
            with console.status("stopping"):
                processes.stop(children)
    finally:
        signal.signal(signal.SIGINT, before)


def _start_broker(
    ports: Ports, home: Home, children: list[Child], console: Console
) -> KafkaSettings:
    if broker.is_external():
        kafka = KafkaSettings.load()
        with _step(console, f"topics on Kafka at {kafka.bootstrap_servers}"):
            broker.ensure_topics(kafka)
        return kafka
    kafka = KafkaSettings(bootstrap_servers=f"127.0.0.1:{ports.kafka}")
    with _step(console, f"broker {kafka.bootstrap_servers}"):
        log = home.logs / "broker.log"
        children.append(broker.start_broker(ports.kafka, home.broker, log))
        broker.ensure_topics(kafka, broker.EMBEDDED_LIMITS)
    return kafka


def _start_registry(
    port: int, home: Home, children: list[Child], environment: Mapping[str, str]
) -> None:
    if not machine.is_free(port):
        raise ProcessError(
            f"port {port} is taken, so MLflow cannot start there: stop what listens on it, or set "
            f"{TRACKING_VARIABLE}=http://127.0.0.1:{port} if that is the registry you want to use."
        )
    home.registry.mkdir(parents=True, exist_ok=True)
    arguments = registry_arguments(port, home.registry)
    registry = processes.start("registry", arguments, home.logs / "registry.log", environment)
    children.insert(0, registry)
    url = f"http://127.0.0.1:{port}/health"
    processes.wait_until(registry, lambda: responds(url), REGISTRY_SECONDS, children)
