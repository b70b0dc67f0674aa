"""``hvd up`` as a person starts it, whose parts are killed one by one and in pairs.

It serves in float32, so that every answer can be compared token for token with the one that was
given before anything happened. With ``-s`` it prints the table of docs/reliability.md.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
import pytest

from decoder.contracts.settings import KafkaSettings
from pipelines import embedded, machine
from pipelines.lab.chaos.clients import Seen, answer_of, asking
from pipelines.prompts import Prompt
from pipelines.stack.running import HVD, Ports, responds
from pipelines.workloads import prompts
from tests import conftest
from tests.end_to_end.service import Reader

pytestmark = [
    pytest.mark.stack,
    pytest.mark.release,
    pytest.mark.timeout(2400),
    # mlflow's own, and sockets that a Kafka client leaves open while its broker is away
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

PARTS = {
    "broker": r"noida-db start",
    "registry": r"mlflow server",
    "learner": r"pipelines\.cli learn",
    "worker": r"vllm\.entrypoints|pipelines\.cli serve",
}
KILLED = [*((name,) for name in PARTS), *itertools.combinations(PARTS, 2)]
KILLED.sort(key=lambda names: "worker" in names)  # which takes the longest to come back
PATIENCE_S = 600.0
until = partial(conftest.until, seconds=PATIENCE_S)
DYING_S = 2.0


@dataclass
class Service:
    """A running ``hvd up``, and what its API answers while nothing happens to it."""

    process: subprocess.Popen[bytes]
    said: Path
    ports: Ports
    reader: Reader
    asked: list[Prompt]
    answers: list[tuple[int, ...]]

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

    @property
    def api(self) -> str:
        return f"http://127.0.0.1:{self.ports.api}"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    embedded.ensure_model()
    folder, ports = tmp_path_factory.mktemp("up"), Ports.free()
    numbers = (ports.api, ports.kafka, ports.mlflow, machine.free_port())
    named = zip(
        ("--api-port", "--kafka-port", "--mlflow-port", "--page-port"), numbers, strict=True
    )
    given = map(str, itertools.chain.from_iterable(named))
    environment = {
        **os.environ,
        machine.FLAGS_VARIABLE: "avx2",  # float32
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "COLUMNS": "200",
    }
    said = folder / "said"
    with said.open("wb") as out:
        process = subprocess.Popen(
            ["env", "--default-signal", *HVD, "up", *given],
            cwd=folder, env=environment,
            stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
        )  # fmt: skip
    reader = Reader(KafkaSettings(bootstrap_servers=f"127.0.0.1:{ports.kafka}"))
    asked = [next(prompts(kind)) for kind in ("edits", "tools", "qa", "chat")]
    made = Service(process, said, ports, reader, asked, [])
    try:
        until(lambda: process.poll() is not None or _greeted(made), "the greeting")
        made.answers.extend(
            answer_of(made.api, embedded.SERVED_NAME, prompt).tokens for prompt in asked
        )
        yield made
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)
        print(said.read_text())
        reader.close()


def _greeted(service: Service) -> bool:
    return "Ctrl-C stops everything" in service.said.read_text()


@dataclass
class Incident:
    """What was killed, when, how long each part was away, and what the clients saw meanwhile."""

    killed: tuple[str, ...]
    at: float
    away_s: dict[str, float]
    seen: list[Seen]

    def touched(self) -> list[Seen]:
        """Requests under way when it happened, or begun before all was well again."""
        well = self.at + max(self.away_s.values())
        return [s for s in self.seen if s.ended >= self.at and s.began <= well]

    def row(self) -> str:
        """Of a Markdown table."""
        touched = self.touched()
        away = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in self.away_s.items())
        errors = sum(bool(s.error) for s in touched)
        waited = [s for s in touched if s.refused and not s.error]
        slowest = max((s.ended - s.began for s in touched if not s.error), default=0.0)
        return (
            f"| {' and '.join(self.killed)} | {away} | {len(touched)} | {errors} | {len(waited)} | "
            f"{slowest:.0f} s |"
        )


def kill(service: Service, names: tuple[str, ...]) -> Incident:
    """Kill with all clients' requests under way; return when all that was killed serves again."""
    with asking(service.api, embedded.SERVED_NAME, service.asked) as clients:
        victims = {name: service.part(name) for name in names}
        until(lambda: all(clients), "requests under way")  # they ask without a pause
        for victim in victims.values():
            assert victim is not None
            victim.kill()
        at, clock = time.monotonic(), time.time()
        away: dict[str, float] = {}

        def all_serve() -> bool:
            _read(service.reader)
            for name in names:
                now = service.part(name)
                anew = now is not None and now != victims[name]
                if name not in away and anew and serves(name, now.pid, clock, at):
                    away[name] = time.monotonic() - at
            return len(away) == len(names)

        def serves(name: str, pid: int, clock: float, at: float) -> bool:
            heard = service.reader
            if name == "broker":  # what was said since has come through it
                return any(s.time > clock for s in [*heard.workers[-5:], *heard.learners[-5:]])
            if name == "learner":
                return any(s.process.endswith(f"-{pid}") for s in heard.learners[-5:])
            if name == "registry":
                return responds(f"http://127.0.0.1:{service.ports.mlflow}/health")
            return any(s.began > at and not s.error for seen in clients for s in seen)

        until(all_serve, f"{names} to come back")
        before = [len(seen) for seen in clients]
        until(
            lambda: all(len(seen) > n + 1 for seen, n in zip(clients, before, strict=True)),
            "an answer to every client",
        )
    return Incident(names, at, away, [*itertools.chain.from_iterable(clients)])


def _read(reader: Reader) -> None:
    from kafka.errors import KafkaError

    try:
        reader.read()
    except (KafkaError, OSError):  # the broker is away: from the beginning, later
        reader.close()
        reader._consumer = None


@pytest.mark.parametrize("names", KILLED, ids="-".join)
def test_the_rest_serves_on_and_what_was_killed_comes_back(service: Service, names) -> None:
    until(lambda: all(service.part(name) is not None for name in PARTS), "quiet")
    incident = kill(service, names)
    print("\n" + incident.row())
    touched = incident.touched()
    for seen in incident.seen:
        right = service.answers[seen.prompt]
        assert seen.tokens == right[: len(seen.tokens)], "a wrong answer"
    errors = [s for s in incident.seen if len(s.tokens) < len(service.answers[s.prompt])]
    if "worker" in names:
        # those under way when it died; its socket takes connections while its memory is freed
        assert all(s.began <= incident.at + DYING_S for s in errors), errors
        assert any(not s.error for s in touched)
    else:
        assert not errors
        assert not any(s.refused for s in touched)
    said = service.said.read_text()
    for name in names:
        assert f"{name} was killed by signal 9" in said
        assert f"{name} runs again" in said


def test_nothing_that_was_learned_or_registered_is_lost_by_it(service: Service) -> None:
    """After the kills above: one state, one history of versions, over all lives."""
    from mlflow import MlflowClient

    _read(service.reader)
    lives = [s.process for s in service.reader.learners]
    assert len(set(lives)) > 1
    last = {s.process: s.events_consumed for s in service.reader.learners}
    firsts = {}
    for status in service.reader.learners:
        firsts.setdefault(status.process, status.events_consumed)
    newest = lives[-1]
    assert last[newest] >= max(firsts.values()) > 0
    client = MlflowClient(f"http://127.0.0.1:{service.ports.mlflow}")
    (model,) = client.search_registered_models()
    assert "champion" in model.aliases


def test_ctrl_c_while_something_restarts_leaves_nothing(service: Service) -> None:
    worker = service.part("worker")
    assert worker is not None
    worker.kill()
    until(lambda: service.part("worker") not in (None, worker), "the new worker to start")
    children = psutil.Process(service.process.pid).children(recursive=True)
    service.process.send_signal(signal.SIGINT)
    service.process.send_signal(signal.SIGINT)
    service.process.wait(60)
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive, alive
    for port in (service.ports.api, service.ports.kafka, service.ports.mlflow):
        assert machine.is_free(port)
