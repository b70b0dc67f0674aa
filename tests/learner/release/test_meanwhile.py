"""A person moves an alias while the learner does, at a server that takes its time: the person's
word stands, whichever call it falls between, and it is told."""

from __future__ import annotations

import itertools
import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from werkzeug.serving import WSGIRequestHandler, make_server

from decoder.contracts.errors import RegistryError
from learner.release.registrar import Registrar
from learner.release.registrations import MoveRequest, MoveResult, Registration, move_aliases
from learner.release.registry import Registry
from tests.conftest import random_policy
from tests.learner.stage import WARNINGS, client_of, settled

pytestmark = WARNINGS

SLOW_SECONDS = 0.05
SET, READ = "registered-models/alias", "registered-models/get"
numbers = itertools.count()


@dataclass
class Front:
    """Stands before the ``server`` of what comes to ``url``.

    ``calls`` and ``answered`` are the paths of those since :meth:`watch`, ``before`` is called with
    the number of each from 0, and may answer it in the server's stead with a status.
    """

    server: Callable[..., Iterable[bytes]]
    url: str = ""
    calls: list[str] = field(default_factory=list)
    answered: list[str] = field(default_factory=list)
    before: Callable[[int, str], int | None] = lambda number, path: None
    authorization: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def watch(self, before: Callable[[int, str], int | None]) -> None:
        """Count calls anew."""
        self.calls, self.answered, self.before = [], [], before

    def __call__(self, environ: dict[str, Any], respond: Callable[..., object]) -> Iterable[bytes]:
        path = environ["PATH_INFO"].rpartition("/mlflow/")[2]
        with self.lock:
            number = len(self.calls)
            self.calls.append(path)
        self.authorization = environ.get("HTTP_AUTHORIZATION", "")
        status = self.before(number, path)
        if status is None:
            told = self.server(environ, respond)
        else:
            respond(f"{status} refused", [("Content-Type", "text/plain")])
            told = [b"forbidden"]
        self.answered.append(path)
        return told


class Quiet(WSGIRequestHandler):
    """Says nothing of a request."""

    def log_request(self, *_: object) -> None:
        pass


@contextmanager
def fronted(server: Callable[..., Iterable[bytes]]) -> Iterator[Front]:
    """``server``, listening, with a front before it."""
    front = Front(server)
    listening = make_server("127.0.0.1", 0, front, True, request_handler=Quiet)
    front.url = f"http://127.0.0.1:{listening.server_port}"
    thread = threading.Thread(target=listening.serve_forever, daemon=True)
    thread.start()
    try:
        yield front
    finally:
        listening.shutdown()
        listening.server_close()
        thread.join()


@pytest.fixture(scope="module")
def home(empty_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the server keeps everything."""
    folder = tmp_path_factory.mktemp("mlruns")
    shutil.copy(empty_store, folder / "mlflow.db")
    return folder


@pytest.fixture(scope="module")
def server(home: Path) -> Iterator[str]:
    """MLflow's server on SQLite, in this process, which need not import it again; the address of
    its database, for who does not come through the front."""
    from mlflow.server import handlers  # late: what it imports warns

    database = f"sqlite:///{home / 'mlflow.db'}"
    runs, models = handlers._tracking_store_registry, handlers._model_registry_store_registry
    handlers._tracking_store = runs.get_store(database, (home / "artifacts").as_uri())
    handlers._model_registry_store = models.get_store(database)
    yield database
    handlers._tracking_store = handlers._model_registry_store = None


@pytest.fixture
def front(server: str) -> Iterator[Front]:
    from mlflow.server import app

    with fronted(app) as made:
        yield made


class Place:
    """A scope of its own with three versions, of which the first is champion: the learner reaches
    it through the front, a person does not."""

    def __init__(self, server: str, front: Front) -> None:
        self.scope = f"scope{next(numbers)}"
        self.registry, self.persons = Registry(front.url), Registry(server)
        for seed in range(3):
            self.persons.register(random_policy(seed, self.scope, 0))
        self.persons.move(self.scope, "champion", 1, "learner-a", "the first")
        self.registry.alias_state(self.scope)  # what a registry remembers of a server, it does

    def stand_again(self) -> None:
        """As at first, but for what was registered since."""
        client, name = client_of(self.persons), self.persons.alias_state(self.scope).name
        for key in self.persons.alias_state(self.scope).tags:
            if key.startswith("moved."):
                client.delete_registered_model_tag(name, key)
        for key in {v.number: v.tags for v in self.persons.versions(self.scope)}[2]:
            if key in ("refusal", "trial", "moved_at", "moved_by", "why"):
                client.delete_model_version_tag(name, "2", key)
        self.by_hand(1)

    def by_hand(self, version: int | None = 3, alias: str = "champion") -> None:
        """As on MLflow's page."""
        client, name = client_of(self.persons), self.persons.alias_state(self.scope).name
        if version is None:
            client.delete_registered_model_alias(name, alias)
        else:
            client.set_registered_model_alias(name, alias, str(version))

    def by_command(self, version: int | None = 3, alias: str = "champion") -> None:
        """As ``hvd policy`` does."""
        self.persons.move(self.scope, alias, version, "anna", "it looks good")

    @property
    def champion(self) -> int | None:
        return self.persons.alias_state(self.scope).champion


@pytest.fixture
def place(server: str, front: Front) -> Callable[[], Place]:
    return lambda: Place(server, front)


def calls_of(front: Front, does: Callable[[], object]) -> list[str]:
    front.watch(lambda number, path: None)
    does()
    return list(front.calls)


@pytest.mark.parametrize("how", ["by_hand", "by_command"])
def test_a_person_s_move_wins_except_between_a_learner_s_read_and_write(
    place: Callable[[], Place], front: Front, how: str
) -> None:
    """MLflow has no compare-and-set: what a person does by hand between these two is lost."""

    def move(of: Place) -> MoveResult:
        tags = {2: {"trial": "promoted"}}
        return move_aliases(
            of.registry, MoveRequest(of.scope, "learner-a", "won", tags, over=1, to=2)
        )

    held = place()
    calls = calls_of(front, lambda: move(held))
    written, last_read = calls.index(SET), 1  # where aliases stand, and then this one
    assert held.champion == 2 and calls[written + 1] == READ
    assert last_read < written <= last_read + 2, "MLflow's client reads once before it writes"
    for call in range(len(calls)):
        held.stand_again()

        def before(number: int, path: str, call: int = call) -> None:
            if number == call:
                getattr(held, how)()

        front.watch(before)
        done = move(held)
        lost = how == "by_hand" and last_read < call <= written
        assert held.champion == (2 if lost else 3), (call, calls)
        assert bool(done.refusal) == (call <= written + 1 and not lost), (call, calls)
        if done.refusal:
            assert "version 3 was made champion" in done.refusal
            tags = {v.number: v.tags for v in held.persons.versions(held.scope)}[2]
            assert "version 3" in tags["refusal"] and "moved_at" not in tags
            history = [(m.before, m.after) for m in held.persons.history(held.scope)]
            assert (1, 2) not in history


@pytest.mark.parametrize("call", range(0, 24, 3))
def test_a_person_s_move_during_a_slow_registration_wins(
    place: Callable[[], Place], front: Front, call: int
) -> None:
    held = place()
    won = Registration(random_policy(9, held.scope, 0), against=held.registry.digest(held.scope, 1))

    def before(number: int, path: str) -> None:
        if number == call:
            held.by_command()
        time.sleep(SLOW_SECONDS)

    front.watch(before)
    desk = Registrar(held.registry, lambda scope: True)
    desk.submit(won)
    desk.start()
    done = settled(desk)
    desk.close()
    assert len(front.calls) > call and held.champion == 3
    moved = [number for number, path in enumerate(front.calls) if path == SET][1:]  # candidate's
    assert "version 3" in done.refusal or moved[0] < call


def test_a_person_s_removal_of_the_champion_wins(place: Callable[[], Place], front: Front) -> None:
    held = place()
    calls = calls_of(front, lambda: held.registry.alias_state(held.scope))
    assert calls == [READ]
    front.watch(lambda number, path: held.by_hand(None) if number == 1 else None)
    done = move_aliases(
        held.registry, MoveRequest(held.scope, "learner-a", "won", {}, over=1, to=2)
    )
    assert held.champion is None and "champion" in done.refusal


def test_a_person_s_second_move_wins(place: Callable[[], Place], front: Front) -> None:
    held = place()
    moves = iter([3, 1])

    def before(number: int, path: str) -> None:
        theirs = next(moves, None) if path == SET else None
        if theirs is not None:
            held.by_command(theirs)

    front.watch(before)
    move_aliases(held.registry, MoveRequest(held.scope, "learner-a", "won", {}, over=1, to=2))
    assert held.champion == 1 == held.persons.history(held.scope)[-1].after


def test_a_person_s_trial_stays(place: Callable[[], Place], front: Front) -> None:
    held = place()

    def before(number: int, path: str) -> None:
        if path == SET and held.persons.alias_state(held.scope).trial is None:
            held.by_command(3, "trial")

    front.watch(before)
    held.registry.move_from(held.scope, "trial", None, 2, "learner-a", "won the gate")
    assert held.persons.alias_state(held.scope).trial == 3


def test_a_password_is_not_stored(
    home: Path, front: Front, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    mine = front.url.replace("://", "://anna:hunter2@")
    registry = Registry(mine)
    registry.move("secret", "champion", registry.register(random_policy(1, "secret", 0)))
    assert registry.load("secret", 1).version == 1
    with pytest.raises(RegistryError) as refused:
        registry.load("secret", 9)
    assert "hunter2" not in str(refused.value)
    kept = [path for path in home.rglob("*") if path.is_file()]
    assert len(kept) > 4 and not [path for path in kept if b"hunter2" in path.read_bytes()]
    ours = [r for r in caplog.records if r.name.startswith(("learner", "decoder", "pipelines"))]
    assert not any("hunter2" in record.getMessage() for record in ours)


@pytest.mark.parametrize("kind, lacks", [("databricks-uc", "filters"), ("databricks", "aliases")])
def test_an_insufficient_registry_is_reported_in_one_sentence(
    registry: Registry,
    server: str,
    front: Front,
    kind: str,
    lacks: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Databricks' own clients in mlflow, before a server that answers as its workspace does."""
    monkeypatch.setenv("DATABRICKS_HOST", front.url)
    monkeypatch.setenv("DATABRICKS_TOKEN", "hunter2")
    Registry(server).register(random_policy(1, kind, 0))
    theirs = Registry(registry.tracking_uri, registry_uri=kind)
    with pytest.raises(RegistryError) as told:
        theirs.move(kind, "champion", 1)
    assert lacks in str(told.value) and "HVD_LEARNER_MLFLOW_REGISTRY_URI" in str(told.value)
    assert "\n" not in str(told.value) and "hunter2" not in str(told.value)
    assert Registry(server).alias_state(kind).champion is None
