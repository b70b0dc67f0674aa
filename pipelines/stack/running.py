"""The whole service on one machine: broker, registry, worker and learner as child processes.

What already runs elsewhere is used instead: a broker named by ``HVD_KAFKA_BOOTSTRAP_SERVERS``, a
registry named by ``HVD_LEARNER_MLFLOW_TRACKING_URI``.
"""

from __future__ import annotations

import json
import os
import ssl
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Final

import httpx
from rich.console import Console

from decoder.contracts.errors import ProcessError, SettingsError
from decoder.contracts.loopback import is_loopback
from decoder.contracts.settings import KafkaSettings
from learner.state_dir import clear, lock
from learner.topics import ensure_topics
from pipelines import embedded, machine
from pipelines.reports import Shown, write_json
from pipelines.stack import broker, processes
from pipelines.stack.processes import Child, Part, begin

REGISTRY_SECONDS: Final = 120.0
"""A first start creates the database: a hundred migrations."""
WORKER_SECONDS: Final = 900.0
"""One to three minutes; two cores that others keep busy took more than five."""
LEARNER_NICENESS: Final = 10
"""The learner shares the cores with the model that serves, and must lose every contest for them."""
STOPPED: Final = ("worker", "learner", "registry", "broker")
"""In this order: the last events still find a broker, the last promotion a registry."""
TRACKING_VARIABLE: Final = "HVD_LEARNER_MLFLOW_TRACKING_URI"
KEY_VARIABLE: Final = "VLLM_API_KEY"
"""Where it is set, the worker answers nobody without it."""
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
    """Where a stack keeps what it writes: the registry's files, and below ``root`` the rest.
    ``is_fresh``: what an earlier stack left in ``root`` is removed at the start."""

    root: Path
    registry: Path
    is_fresh: bool = False

    @classmethod
    def under(cls, root: Path, is_fresh: bool = False) -> Home:
        """Everything below ``root``."""
        return cls(root, root / "mlruns", is_fresh)

    def log(self, name: str) -> Path:
        """Of a part."""
        return self.root / "logs" / f"{name}.log"


@dataclass(frozen=True)
class Stack:
    """A running stack: what was started for it, and those of its processes that are there."""

    api: str
    tracking_uri: str
    kafka: KafkaSettings
    model: str
    parts: Mapping[str, Part]
    children: dict[str, Child]

    def check(self) -> None:
        """Do nothing while all processes run.

        Raises:
            ProcessError: one has ended; with the end of its log.
        """
        for child in self.children.values():
            child.check()


def registry_arguments(port: int, home: Path) -> list[str]:
    """``mlflow server`` over SQLite, artefacts beside it, under names that hold without a server:
    a notebook or ``hvd policy`` reads the same database when nothing runs."""
    from learner.release.registry.connection import database_uri  # late: doctor runs without it

    root = home.resolve()
    return [
        *(sys.executable, "-m", "mlflow", "server", "--workers", "1"),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--backend-store-uri", database_uri(root / "mlflow.db")),
        *("--artifacts-destination", str(root / "artifacts")),
        *("--default-artifact-root", (root / "artifacts").as_uri()),
    ]


QUIET: Final[Mapping[str, str]] = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    "GIT_PYTHON_REFRESH": "quiet",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
}
SERVER_OPTIONS: Final = ("MLFLOW_", "_MLFLOW_", "UVICORN_", "GUNICORN_")
"""How variables begin by which the registry's server would take options."""
PLAIN: Final = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""For what is asked over http, again and again: by default each one first reads all certificates
of the system, 20 ms of a core that the server could have used."""


def responds(url: str) -> bool:
    """Whether an HTTP server answers ``url`` with success."""
    try:
        verify, by_proxy = PLAIN if url.startswith("http:") else True, not is_loopback(url)
        return httpx.get(url, timeout=2.0, verify=verify, trust_env=by_proxy).is_success
    except (httpx.HTTPError, httpx.InvalidURL, ImportError, ValueError):
        return False  # the last two: of a proxy that httpx knows no way to speak to


@contextmanager
def _locked(home: Home, own_registry: bool) -> Iterator[None]:
    """Hold the folders that a stack writes to, of the registry's only where it runs one.

    Raises:
        ProcessError: another stack holds one, or it cannot be used.
    """
    with ExitStack() as held:
        for folder in (home.root, home.registry)[: 1 + own_registry]:
            try:
                held.enter_context(lock(folder))
                if home.is_fresh and folder == home.root:
                    clear(folder)
            except BlockingIOError as error:
                raise ProcessError(
                    f"another stack keeps its state in {folder.resolve()}: stop it, or start this "
                    "one in a folder of its own."
                ) from error
            except OSError as error:
                raise ProcessError(
                    f"{folder.resolve()} cannot be used ({error}): start where files can be "
                    "written and locked."
                ) from error
        yield


def inherited(own_registry: bool) -> dict[str, str]:
    """This process's environment, as the parts of a stack may have it.

    Options of servers that a shell sets are meant for others. A registry that somebody else runs
    may ask for credentials, which its client finds in the environment alone.
    """
    return {
        name: value
        for name, value in os.environ.items()
        if not (own_registry and name.startswith(SERVER_OPTIONS))
    }


EXPECTED_S: Final[Mapping[str, float]] = {"model": 1, "broker": 1, "registry": 12, "worker": 45}
"""Seconds that each part takes to start where :data:`LOOP_S` is true, until one was seen to start
on this machine."""
LOOP_S: Final = 0.05
LOOPS: Final = 1_000_000


class Starts:
    """How long each part takes to start: what is expected, from the last start on this machine, and
    a line of each on ``console``, with its seconds so far."""

    def __init__(self, console: Console) -> None:
        """Read what was recorded; where nothing was, time a loop."""
        self._console = console
        self._file = machine.cache_directory() / "starts.json"
        try:
            held = json.loads(self._file.read_text(encoding="utf-8"))
            self.seconds = {str(name): float(seconds) for name, seconds in held.items()}
        except (OSError, ValueError, TypeError, AttributeError):
            began = time.perf_counter()
            sum(range(LOOPS))
            slowness = max((time.perf_counter() - began) / LOOP_S, 0.5)
            self.seconds = {name: s * slowness for name, s in EXPECTED_S.items()}

    @contextmanager
    def starting(self, name: str, what: str) -> Iterator[Callable[[], None]]:
        """While ``name`` starts, whatever waits for it calls what this gives; the time that it
        took is recorded, a failed start's not."""
        began, expected = time.monotonic(), self.seconds.get(name, 0.0)
        expects = f", about {expected:.0f} s" if expected >= 1.0 else ""
        if not self._console.is_terminal:
            self._console.print(f"  starting {what}{expects}", highlight=False, soft_wrap=True)
        with Shown(self._console) as bar:
            yield lambda: bar.step(f"starting {what}", round(time.monotonic() - began), expected)
        took = time.monotonic() - began
        self._console.print(f"  [green]ready[/green]  {what}  [dim]{took:.0f} s[/dim]")
        self.seconds[name] = round(took, 1)
        with suppress(SettingsError):  # a full disk: the next start knows less
            write_json(self.seconds, self._file)


@contextmanager
def running(
    ports: Ports,
    home: Home,
    console: Console,
    serve_options: tuple[str, ...] = (),
    settings: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Stack]:
    """Start the stack, wait until it serves, and stop it on leaving, however it is left.

    Args:
        serve_options: further arguments of ``hvd serve``.
        settings: variables of worker and learner; the caller's environment goes before them.

    Raises:
        BrokerError, ProcessError, ModelError, RegistryError: the stack did not come up.
    """
    parts: dict[str, Part] = {}
    children: dict[str, Child] = {}
    own_registry = not os.environ.get(TRACKING_VARIABLE)
    uri = os.environ.get(TRACKING_VARIABLE) or f"http://127.0.0.1:{ports.mlflow}"
    api = f"http://127.0.0.1:{ports.api}"

    starts = Starts(console)

    def start(part: Part, what: str) -> None:
        """Start ``part`` and wait until it serves."""
        with starts.starting(part.name, what) as shown:
            parts[part.name] = part
            child = begin(part, children)

            def is_ready() -> bool:
                shown()
                return part.is_ready()

            processes.wait_until(child, is_ready, part.patience_s, list(children.values()))

    def server(name: str, arguments: Sequence[str], seconds: float, url: str) -> Part:
        answers = partial(responds, f"{url}/health")
        return Part(name, arguments, home.log(name), answers, seconds, environment)

    with _locked(home, own_registry), processes.first_only():
        try:
            with starts.starting("model", "model"):
                embedded.ensure_model(Console(quiet=True))
            if broker.VARIABLE in os.environ:
                kafka = KafkaSettings.load()
                with starts.starting("topics", f"topics on Kafka at {kafka.bootstrap_servers}"):
                    ensure_topics(kafka)
            else:
                kafka = broker.local(ports.kafka)
                part = broker.broker_part(ports.kafka, home.root / "broker", home.log("broker"))
                start(part, f"broker {kafka.bootstrap_servers}")
            places = {broker.VARIABLE: kafka.bootstrap_servers, TRACKING_VARIABLE: uri}
            places["HVD_LEARNER_STATE_DIR"] = str(home.root / "learner")
            environment = {**QUIET, **settings, **inherited(own_registry), **places}
            if own_registry:
                another = f"set {TRACKING_VARIABLE}={uri} if that is the registry to use"
                machine.check_free(ports.mlflow, another)
                arguments = registry_arguments(ports.mlflow, home.registry)
                start(server("registry", arguments, REGISTRY_SECONDS, uri), f"registry {uri}")
            alone = {**environment, "OMP_NUM_THREADS": "1"}
            parts["learner"] = Part(  # it listens on no port, and nobody waits for it
                "learner", (*HVD, "learn"), home.log("learner"),
                environment=alone, niceness=LEARNER_NICENESS,
            )  # fmt: skip
            begin(parts["learner"], children)
            arguments = [*HVD, "serve", "--port", str(ports.api), *serve_options]
            worker = server("worker", arguments, WORKER_SECONDS, api)
            start(worker, f"worker {api} and learner")
            yield Stack(api, uri, kafka, embedded.SERVED_NAME, parts, children)
        finally:
            if children:
                with console.status("stopping"):
                    processes.stop([children[name] for name in STOPPED if name in children])
