"""A person moves an alias while the learner does, at a server that takes its time: the person's
word stands, whichever call it falls between, and it is told."""

from __future__ import annotations

import itertools
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from learner import registrar
from learner.moves import Move, Moved, carry_out
from learner.registrar import Registrar
from learner.registrations import Registration, Settled
from learner.registry import Registry, digest_of
from pipelines.machine import free_port
from tests.conftest import random_policy, until
from tests.learner.proxied import Proxy, mlflow_server, proxied
from tests.learner.stage import client_of

# mlflow uses parts of sqlalchemy that are to go; that is theirs to mend
pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning"), pytest.mark.timeout(900)]

SET, READ = "registered-models/alias", "registered-models/get"
numbers = itertools.count()


@pytest.fixture(scope="module")
def server(empty_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    home = tmp_path_factory.mktemp("mlruns")
    shutil.copy(empty_store, home / "mlflow.db")
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
        client, name = client_of(self.persons), self.persons.model_name(self.scope)
        for key in self.persons.standing(self.scope).tags:
            if key.startswith("moved."):
                client.delete_registered_model_tag(name, key)
        for key in {v.number: v.tags for v in self.persons.versions(self.scope)}[2]:
            if key in ("refusal", "trial", "moved_at", "moved_by", "why"):
                client.delete_model_version_tag(name, "2", key)
        self.by_hand(1)

    def by_hand(self, version: int | None = 3, alias: str = "champion") -> None:
        """As on MLflow's page."""
        client, name = client_of(self.persons), self.persons.model_name(self.scope)
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


@pytest.mark.parametrize("how", ["by_hand", "by_command"])
def test_whichever_call_of_a_move_a_persons_falls_before_theirs_stands(
    place: Callable[[], Place], proxy: Proxy, how: str
) -> None:
    def move(of: Place) -> Moved:
        tags = {2: {"trial": "promoted"}}
        return carry_out(of.registry, Move(of.scope, "learner-a", "won", tags, over=1, to=2))

    held = place()
    calls = calls_of(proxy, lambda: move(held))
    assert held.champion == 2
    assert READ in calls[calls.index(SET) + 1 :], "it is read after it was moved"
    for call in itertools.count():
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
    carry_out(held.registry, Move(held.scope, "learner-a", "compared", {}, begun=2))
    assert held.persons.standing(held.scope).trial == 3


@pytest.mark.long
def test_ten_times_of_ten_a_person_wins_over_a_slow_registration(
    place: Callable[[], Place],
    proxy: Proxy,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registrar, "FOLLOW_SECONDS", 0.05)

    held = place()

    def register(seed: int) -> tuple[Settled, Registrar]:
        desk = Registrar(held.registry, lambda scope: scope == held.scope)
        winner = random_policy(seed, held.scope, 0)
        desk.hand(Registration(winner, against=digest_of(random_policy(0, held.scope, 0))))
        found: list[Settled] = []
        desk.start()
        until(lambda: found or found.extend(a for a in desk.answers() if isinstance(a, Settled)))
        desk.close()
        return found[0], desk

    calls = calls_of(proxy, lambda: register(9))
    assert held.champion == 4
    writes = [n for n, path in enumerate(calls) if path == SET]  # candidate, champion
    chosen = sorted({round(k * writes[-1] / 9) for k in range(10)} | {writes[-1]})
    assert len(chosen) == 10
    for call in chosen:
        held.stand_again()
        proxy.watch(at(call, proxy, held.by_hand))
        settled, desk = register(10 + call)
        moved = [n for n, path in enumerate(proxy.calls) if path == SET and READ in proxy.calls[:n]]
        if call > min([*moved, call]):
            continue  # the machine was quicker, and read less often before
        assert held.champion == 3, (call, calls)
        assert "version 3 was made champion" in settled.refusal
        assert desk.given_up["person"] == 1
        if settled.version is not None:
            tags = {v.number: v.tags for v in held.persons.versions(held.scope)}[settled.version]
            assert "version 3 was made champion" in tags["refusal"] and "moved_at" not in tags
