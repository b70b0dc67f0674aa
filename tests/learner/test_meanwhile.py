"""A person moves an alias while the learner does, at a server that takes its time: the person's
word stands, whichever call it falls between, and it is told."""

from __future__ import annotations

import http.client
import itertools
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from decoder.contracts.errors import RegistryError
from learner import registrar
from learner.registrar import Registrar
from learner.registrations import Move, Moved, Registration, carry_out
from learner.registry import Registry, digest_of
from pipelines.machine import free_port
from pipelines.stack import processes
from pipelines.stack.running import registry_arguments, responds
from tests.conftest import random_policy, until
from tests.learner.stage import WARNINGS, client_of

pytestmark = [*WARNINGS, pytest.mark.timeout(900)]

SET, READ = "registered-models/alias", "registered-models/get"
numbers = itertools.count()
SKIPPED = ("host", "connection", "transfer-encoding", "content-length")


@dataclass
class Proxy:
    """Passes calls on to ``port``; ``url`` is its own.

    ``calls`` and ``answered`` are the paths of those since :meth:`watch`, ``before`` is called with
    the number of each from 0, and may answer it in the server's stead with a status.
    """

    port: int
    url: str = ""
    calls: list[str] = field(default_factory=list)
    answered: list[str] = field(default_factory=list)
    before: Callable[[int, str], int | None] = lambda number, path: None
    headers: dict[str, str] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def watch(self, before: Callable[[int, str], int | None]) -> None:
        """Count calls anew."""
        self.calls, self.answered, self.before = [], [], before


@contextmanager
def proxied(port: int) -> Iterator[Proxy]:
    """A proxy before what listens on ``port``."""
    proxy = Proxy(port)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            path = self.path.partition("?")[0].rpartition("/mlflow/")[2]
            with proxy.lock:
                number = len(proxy.calls)
                proxy.calls.append(path)
                proxy.headers = {key.lower(): value for key, value in self.headers.items()}
            status, headers, told = proxy.before(number, path), [], b"forbidden"
            if status is None:
                onward = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=60)
                kept = {k: v for k, v in self.headers.items() if k.lower() not in SKIPPED}
                onward.request(self.command, self.path, body or None, kept)
                got = onward.getresponse()
                status, headers, told = got.status, got.getheaders(), got.read()
                onward.close()
            proxy.answered.append(path)
            self.send_response(status)
            for key, value in headers:
                if key.lower() not in SKIPPED:
                    self.send_header(key, value)
            self.send_header("Content-Length", str(len(told)))
            self.end_headers()
            self.wfile.write(told)

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = answer  # noqa: N815 -- by http.server

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    proxy.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def mlflow_server(home: Path, port: int) -> Iterator[str]:
    """``mlflow server`` on SQLite in ``home``; its address."""
    url = f"http://127.0.0.1:{port}"
    child = processes.start(
        processes.Part(
            "mlflow", registry_arguments(port, home), home / "server.log",
            environment=os.environ | {
                "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
                "MLFLOW_DISABLE_TELEMETRY": "true",
            },
        )
    )  # fmt: skip
    try:
        processes.wait_until(child, lambda: responds(f"{url}/health"), 300.0)
        yield url
    finally:
        processes.stop([child])


@pytest.fixture(scope="module")
def home(empty_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the server keeps everything."""
    folder = tmp_path_factory.mktemp("mlruns")
    shutil.copy(empty_store, folder / "mlflow.db")
    return folder


@pytest.fixture(scope="module")
def server(home: Path) -> Iterator[str]:
    with mlflow_server(home, free_port()) as url:
        yield url


@pytest.fixture
def proxy(server: str) -> Iterator[Proxy]:
    with proxied(int(server.rpartition(":")[2])) as made:
        yield made


class Place:
    """A scope of its own with three versions, of which the first is champion: the learner reaches
    it through the proxy, a person does not."""

    def __init__(self, server: str, proxy: Proxy) -> None:
        self.scope = f"scope{next(numbers)}"
        self.registry, self.persons = Registry(proxy.url), Registry(server)
        for seed in range(3):
            self.persons.register(random_policy(seed, self.scope, 0))
        self.persons.promote(self.scope, 1, {"moved_by": "learner-a", "why": "the first"})
        self.registry.standing(self.scope)  # what a registry remembers of a server, it does

    def stand_again(self) -> None:
        """As at first, but for what was registered since."""
        client, name = client_of(self.persons), self.persons.standing(self.scope).name
        for key in self.persons.standing(self.scope).tags:
            if key.startswith("moved."):
                client.delete_registered_model_tag(name, key)
        for key in {v.number: v.tags for v in self.persons.versions(self.scope)}[2]:
            if key in ("refusal", "trial", "moved_at", "moved_by", "why"):
                client.delete_model_version_tag(name, "2", key)
        self.by_hand(1)

    def by_hand(self, version: int | None = 3, alias: str = "champion") -> None:
        """As on MLflow's page."""
        client, name = client_of(self.persons), self.persons.standing(self.scope).name
        if version is None:
            client.delete_registered_model_alias(name, alias)
        else:
            client.set_registered_model_alias(name, alias, str(version))

    def by_command(self, version: int | None = 3, alias: str = "champion") -> None:
        """As ``hvd policy`` does."""
        self.persons.move(self.scope, alias, version, "anna", "it looks good")

    @property
    def champion(self) -> int | None:
        return self.persons.standing(self.scope).champion


@pytest.fixture
def place(server: str, proxy: Proxy) -> Callable[[], Place]:
    return lambda: Place(server, proxy)


def read_on(proxy: Proxy) -> None:
    """Until a read that was begun from now on has been answered: the next one is begun after it."""
    seen = len(proxy.calls)
    until(lambda: len(proxy.calls) > seen + 1, "reads while an alias is being moved")


def at(call: int, proxy: Proxy, does: Callable[[], None]) -> Callable[[int, str], None]:
    """Hold call number ``call`` until ``does`` has been done, which is after all moves that were
    called before; and the one that moves the champion after that, until it can be known: from a
    read."""
    begun, done = threading.Event(), threading.Event()

    def before(number: int, path: str) -> None:
        if number == call:
            begun.set()
            if path == READ:
                until(lambda: proxy.answered.count(SET) == proxy.calls[:number].count(SET))
            does()
            done.set()
        if begun.is_set() and path == SET and READ in proxy.calls[:number]:
            done.wait()
            read_on(proxy)

    return before


def calls_of(proxy: Proxy, does: Callable[[], object]) -> list[str]:
    proxy.watch(lambda number, path: None)
    does()
    return list(proxy.calls)


@pytest.mark.parametrize(("how", "each"), [("by_hand", 2), ("by_command", 3)])
def test_whichever_call_of_a_move_a_persons_falls_before_theirs_stands(
    place: Callable[[], Place], proxy: Proxy, how: str, each: int
) -> None:
    def move(of: Place) -> Moved:
        tags = {2: {"trial": "promoted"}}
        return carry_out(of.registry, Move(of.scope, "learner-a", "won", tags, over=1, to=2))

    held = place()
    calls = calls_of(proxy, lambda: move(held))
    assert held.champion == 2
    assert READ in calls[calls.index(SET) + 1 :], "it is read after it was moved"
    for call in itertools.count(0, each):
        held.stand_again()
        proxy.watch(at(call, proxy, getattr(held, how)))
        done = move(held)
        calls = list(proxy.calls)
        if call >= len(calls):
            break  # how often it is read meanwhile hangs on the machine
        moved = calls.index(SET) if SET in calls else len(calls)
        assert held.champion == 3, (call, calls)
        assert done.refusal or call > moved, (call, calls)
        if call <= moved:
            assert "version 3 was made champion" in done.refusal
            tags = {v.number: v.tags for v in held.persons.versions(held.scope)}[2]
            assert "version 3" in tags["refusal"] and "moved_at" not in tags
        history = [(m.before, m.after) for m in held.persons.history(held.scope)]
        assert (1, 2) not in history or call > moved
    assert call > 6


def test_a_persons_taking_the_champion_away_stands(
    place: Callable[[], Place], proxy: Proxy
) -> None:
    held = place()
    calls = calls_of(proxy, lambda: held.registry.standing(held.scope))
    assert calls == [READ]

    def before(number: int, path: str) -> None:
        if path == SET and held.champion == 1:
            held.by_hand(None)
            read_on(proxy)

    proxy.watch(before)
    done = carry_out(held.registry, Move(held.scope, "learner-a", "won", {}, over=1, to=2))
    assert held.champion is None and "champion" in done.refusal


def test_a_second_move_of_a_person_while_the_first_is_put_back_stands(
    place: Callable[[], Place], proxy: Proxy
) -> None:
    held = place()
    moves = iter([3, 1])

    def before(number: int, path: str) -> None:
        theirs = next(moves, None) if path == SET else None
        if theirs is not None:
            held.by_hand(theirs)
            read_on(proxy)

    proxy.watch(before)
    carry_out(held.registry, Move(held.scope, "learner-a", "won", {}, over=1, to=2))
    assert held.champion == 1
    last = held.persons.history(held.scope)[-1]
    assert last.after == 1 and "learner-a" in last.why, "MLflow says what became of it"


def test_a_persons_trial_stands(place: Callable[[], Place], proxy: Proxy) -> None:
    held = place()

    def before(number: int, path: str) -> None:
        if path == SET and held.persons.standing(held.scope).trial is None:
            held.by_hand(3, "trial")
            read_on(proxy)

    proxy.watch(before)
    held.registry.move_over(held.scope, "trial", None, 2, "learner-a", "won the gate")
    assert held.persons.standing(held.scope).trial == 3


def test_a_server_that_lets_nobody_write_costs_the_candidate_and_nothing_else(
    place: Callable[[], Place],
    proxy: Proxy,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(registrar, "TRIES", 3)
    held = place()
    desk = Registrar(held.registry, lambda scope: True)
    winner = Registration(
        random_policy(9, held.scope, 0), against=digest_of(random_policy(0, held.scope, 0))
    )
    desk.start()
    proxy.watch(lambda _, path: 403 if path.endswith(("create", "alias", "tag")) else None)
    desk.hand(winner)
    desk.move(Move(held.scope, "l", "why", {1: {"watch": "kept"}}))
    until(lambda: not desk.waiting() and desk.given_up["refused"] == 2)
    told = [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR]
    assert len(told) == 2 and all("403" in line and "\n" not in line for line in told)
    assert held.champion == 1 and not desk.away_since
    proxy.watch(lambda _, path: None)
    desk.hand(winner)
    until(lambda: held.champion == 4)
    desk.close()


def test_a_password_is_not_kept(home: Path, server: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    mine = server.replace("://", "://anna:hunter2@")
    registry = Registry(mine)
    registry.promote("secret", registry.register(random_policy(1, "secret", 0)))
    assert registry.load("secret", 1).version == 1
    with pytest.raises(RegistryError) as refused:
        registry.load("secret", 9)
    assert "hunter2" not in str(refused.value)
    kept = [path for path in home.rglob("*") if path.is_file() and path.name != "server.log"]
    assert len(kept) > 4 and not [path for path in kept if b"hunter2" in path.read_bytes()]
    ours = [r for r in caplog.records if r.name.startswith(("learner", "decoder", "pipelines"))]
    assert not any("hunter2" in record.getMessage() for record in ours)


@pytest.mark.parametrize("kind, lacks", [("databricks-uc", "filters"), ("databricks", "aliases")])
def test_a_registry_that_lacks_what_a_learner_needs_says_so_in_one_sentence(
    registry: Registry, server: str, kind: str, lacks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Databricks' own clients in mlflow, before a server that answers as its workspace does."""
    monkeypatch.setenv("DATABRICKS_HOST", server)
    monkeypatch.setenv("DATABRICKS_TOKEN", "hunter2")
    Registry(server).register(random_policy(1, kind, 0))
    theirs = Registry(registry.tracking_uri, registry_uri=kind)
    with pytest.raises(RegistryError) as told:
        theirs.promote(kind, 1)
    assert lacks in str(told.value) and "HVD_LEARNER_MLFLOW_REGISTRY_URI" in str(told.value)
    assert "\n" not in str(told.value) and "hunter2" not in str(told.value)
    assert Registry(server).standing(kind).champion is None


def test_a_persons_move_during_a_slow_registration_wins(
    place: Callable[[], Place], proxy: Proxy
) -> None:
    held = place()
    for turn in range(6):
        held.stand_again()

        def before(number: int, path: str, turn: int = turn) -> None:
            time.sleep(0.05)
            if number == 3 * turn:
                (held.by_hand if turn % 2 else held.by_command)()

        standing = held.registry.standing(held.scope)
        proxy.watch(before)
        version = held.registry.register(random_policy(9 + turn, held.scope, 0))
        stands = held.registry.move_over(
            held.scope, "champion", standing.champion, version, "learner-a", "won"
        )
        assert (stands, held.champion) == (3, 3), proxy.calls
