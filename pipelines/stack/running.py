"""The whole service on one machine: broker, registry, worker and learner as child processes.

``HVD_KAFKA_BOOTSTRAP_SERVERS`` and ``HVD_LEARNER_MLFLOW_TRACKING_URI`` name a broker or registry to
use instead.
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

REGISTRY_SECONDS: Final = 120.0  # the first start runs a hundred database migrations
WORKER_SECONDS: Final = 900.0  # one to three minutes; on two busy cores it took more than five
LEARNER_NICENESS: Final = 10
"""The learner must not take processor time from the serving model on the same cores."""
STOPPED: Final = ("worker", "learner", "registry", "broker")
"""Order of stopping: the last events need a broker, the last promotion a registry."""
TRACKING_VARIABLE: Final = "HVD_LEARNER_MLFLOW_TRACKING_URI"
KEY_VARIABLE: Final = "VLLM_API_KEY"  # if it is set, the worker refuses requests without this key
HVD: Final = (sys.executable, "-m", "pipelines.cli")


@dataclass(frozen=True)
class Ports:
    """Ports of the three servers on 127.0.0.1."""

    api: int = 8000
    kafka: int = 9092
    mlflow: int = 5000

    @classmethod
    def free(cls) -> Ports:
        """Ports that are free now."""
        return cls(*(machine.free_port() for _ in range(3)))


@dataclass(frozen=True)
class Home:
    """The folders of a stack: the registry's, and ``root`` for the rest. With ``is_fresh``,
    ``root`` is cleared at the start."""

    root: Path
    registry: Path
    is_fresh: bool = False

    @classmethod
    def under(cls, root: Path, is_fresh: bool = False) -> Home:
        """All folders below ``root``."""
        return cls(root, root / "mlruns", is_fresh)

    def log(self, name: str) -> Path:
        """The log file of a part."""
        return self.root / "logs" / f"{name}.log"


@dataclass(frozen=True)
class Stack:
    """A running stack: its parts, and the processes that run."""

    api: str
    tracking_uri: str
    kafka: KafkaSettings
    model: str
    parts: Mapping[str, Part]
    children: dict[str, Child]

    def check(self) -> None:
        """Check that all processes run.

        Raises:
            ProcessError: one has ended; with the end of its log.
        """
        for child in self.children.values():
            child.check()


def registry_arguments(port: int, home: Path) -> list[str]:
    """``mlflow server`` over SQLite, with paths that also work without the server: a notebook or
    ``hvd policy`` can read the same database."""
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
"""Prefixes of variables that set options of the registry's server."""
PLAIN: Final = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""For plain HTTP. The default context would read all system certificates at each request, 20 ms of
a core."""


def responds(url: str) -> bool:
    """Whether an HTTP server answers ``url`` with success."""
    try:
        verify, by_proxy = PLAIN if url.startswith("http:") else True, not is_loopback(url)
        return httpx.get(url, timeout=2.0, verify=verify, trust_env=by_proxy).is_success
    except (httpx.HTTPError, httpx.InvalidURL, ImportError, ValueError):
        return False  # the last two: httpx cannot use the proxy


@contextmanager
def _locked(home: Home, own_registry: bool) -> Iterator[None]:
    """Hold the locks of the stack's folders; of the registry's only if it runs one. Raises
    ProcessError if another stack holds one, or a folder cannot be used."""
    with ExitStack() as locks:
        for folder in (home.root, home.registry)[: 1 + own_registry]:
            try:
                locks.enter_context(lock(folder))
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
    """This process's environment for the parts of a stack.

    With an own registry, options of other servers are removed. A foreign registry may need
    credentials from the environment.
    """
    return {
        name: value
        for name, value in os.environ.items()
        if not (own_registry and name.startswith(SERVER_OPTIONS))
    }


EXPECTED_S: Final[Mapping[str, float]] = {"model": 1, "broker": 1, "registry": 12, "worker": 45}
"""Start times of the parts on a machine with :data:`LOOP_S`, until they were measured here."""
LOOP_S: Final = 0.05
LOOPS: Final = 1_000_000


class Starts:
    """Start times of the parts: estimated from the last start on this machine, and shown on
    ``console``."""

    def __init__(self, console: Console) -> None:
        """Read the recorded times; without any, estimate them by timing a loop."""
        self._console = console
        self._file = machine.cache_directory() / "starts.json"
        try:
            recorded = json.loads(self._file.read_text(encoding="utf-8"))
            self.seconds = {str(name): float(seconds) for name, seconds in recorded.items()}
        except (OSError, ValueError, TypeError, AttributeError):
            began = time.perf_counter()
            sum(range(LOOPS))
            slowness = max((time.perf_counter() - began) / LOOP_S, 0.5)
            self.seconds = {name: s * slowness for name, s in EXPECTED_S.items()}

    @contextmanager
    def starting(self, name: str, what: str) -> Iterator[Callable[[], None]]:
        """Show that ``name`` starts; the caller calls the yielded function while it waits. The time
        of a successful start is recorded."""
        began, expected = time.monotonic(), self.seconds.get(name, 0.0)
        expects = f", about {expected:.0f} s" if expected >= 1.0 else ""
        if not self._console.is_terminal:
            self._console.print(f"  starting {what}{expects}", highlight=False, soft_wrap=True)
        with Shown(self._console) as bar:
            yield lambda: bar.step(f"starting {what}", round(time.monotonic() - began), expected)
        took = time.monotonic() - began
        self._console.print(f"  [green]ready[/green]  {what}  [dim]{took:.0f} s[/dim]")
        self.seconds[name] = round(took, 1)
        with suppress(SettingsError):  # a full disk: the next start has no estimate
            write_json(self.seconds, self._file)


class _Launcher:
    """Starts the parts of a stack, one after the other; ``settings`` are variables of worker and
    learner."""

    def __init__(self, ports: Ports, home: Home, console: Console, settings: Mapping[str, str]):
        self._ports, self._home, self._settings = ports, home, settings
        self._starts = Starts(console)
        self._parts: dict[str, Part] = {}
        self.children: dict[str, Child] = {}
        self.own_registry = not os.environ.get(TRACKING_VARIABLE)

    def start_all(self, serve_options: Sequence[str]) -> Stack:
        """Start broker, registry, learner and worker, and wait until they are ready."""
        ports, home = self._ports, self._home
        uri = os.environ.get(TRACKING_VARIABLE) or f"http://127.0.0.1:{ports.mlflow}"
        api = f"http://127.0.0.1:{ports.api}"
        with self._starts.starting("model", "model"):
            embedded.ensure_model(Console(quiet=True))
        kafka = self._broker()
        environment = {
            **QUIET, **self._settings, **inherited(self.own_registry), TRACKING_VARIABLE: uri,
            broker.VARIABLE: kafka.bootstrap_servers,
            "HVD_LEARNER_STATE_DIR": str(home.root / "learner"),
        }  # fmt: skip

        def server(name: str, arguments: Sequence[str], seconds: float, url: str) -> Part:
            is_ready = partial(responds, f"{url}/health")
            return Part(name, arguments, home.log(name), is_ready, seconds, environment)

        if self.own_registry:
            otherwise = f"set {TRACKING_VARIABLE}={uri} if that is the registry to use"
            machine.check_free(ports.mlflow, otherwise)
            arguments = registry_arguments(ports.mlflow, home.registry)
            self._start(server("registry", arguments, REGISTRY_SECONDS, uri), f"registry {uri}")
        self._parts["learner"] = learner = Part(  # it has no port, and nobody waits for it
            "learner", (*HVD, "learn"), home.log("learner"), niceness=LEARNER_NICENESS,
            environment={**environment, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        begin(learner, self.children)
        arguments = [*HVD, "serve", "--port", str(ports.api), *serve_options]
        worker = server("worker", arguments, WORKER_SECONDS, api)
        self._start(worker, f"worker {api} and learner")
        return Stack(api, uri, kafka, embedded.SERVED_NAME, self._parts, self.children)

    def _broker(self) -> KafkaSettings:
        """The broker that the environment names, with our topics; else start the embedded one."""
        if broker.VARIABLE in os.environ:
            kafka = KafkaSettings.load()
            with self._starts.starting("topics", f"topics on Kafka at {kafka.bootstrap_servers}"):
                ensure_topics(kafka)
            return kafka
        kafka, home = broker.local(self._ports.kafka), self._home
        part = broker.broker_part(self._ports.kafka, home.root / "broker", home.log("broker"))
        self._start(part, f"broker {kafka.bootstrap_servers}")
        return kafka

    def _start(self, part: Part, what: str) -> None:
        """Start ``part`` and wait until it is ready."""
        with self._starts.starting(part.name, what) as show:
            self._parts[part.name] = part
            child = begin(part, self.children)

            def is_ready() -> bool:
                show()
                return part.is_ready()

            processes.wait_until(child, is_ready, part.patience_s, list(self.children.values()))


@contextmanager
def running(
    ports: Ports,
    home: Home,
    console: Console,
    serve_options: tuple[str, ...] = (),
    settings: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Stack]:
    """Start a stack, wait until it serves, and stop it on leaving.

    Args:
        serve_options: further arguments of ``hvd serve``.
        settings: variables of worker and learner; the caller's environment overrides them.

    Raises:
        BrokerError, ProcessError, ModelError, RegistryError: the stack did not start.
    """
    launcher = _Launcher(ports, home, console, settings)
    with _locked(home, launcher.own_registry), processes.first_only():
        try:
            yield launcher.start_all(serve_options)
        finally:
            if children := launcher.children:
                with console.status("stopping"):
                    processes.stop([children[name] for name in STOPPED if name in children])
