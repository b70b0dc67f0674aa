"""What hvd up starts, what it says, and what it stops."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import shlex
import socket
import subprocess
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text

from decoder.contracts.errors import ModelError, ProcessError
from decoder.contracts.settings import KafkaSettings
from decoder.contracts.topics import DRAFTS, POLICY, STATUS, TRIALS
from learner.state_dir import lock
from learner.topics import ensure_topics
from pipelines import machine
from pipelines.stack import broker, processes
from pipelines.stack.running import (
    KEY_VARIABLE,
    TRACKING_VARIABLE,
    Home,
    Ports,
    Stack,
    inherited,
    running,
)
from pipelines.stack.up import first_request, greeting, say
from pipelines.watch.ledger import Ledger, Observer
from tests.conftest import patience, until
from tests.decoder.telemetry.broker import send, start_broker
from tests.events import encode_events
from tests.pipelines.watch.records import ORIGIN, WORKER, event, rounds, worker_status


def test_what_was_started_is_stopped_when_the_rest_cannot_start(
    expanded_model, tmp_path, monkeypatch
) -> None:
    for variable in (broker.VARIABLE, TRACKING_VARIABLE):
        monkeypatch.delenv(variable, raising=False)
    shown = io.StringIO()
    kafka_port = machine.free_port()
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        ports = Ports(api=machine.free_port(), kafka=kafka_port, mlflow=taken)
        with (
            pytest.raises(ProcessError, match=f"port {taken} is taken"),
            running(ports, Home.under(tmp_path / "run"), Console(file=shown)),
        ):
            pytest.fail("the stack came up on a taken port")
    assert f"broker 127.0.0.1:{kafka_port}" in shown.getvalue()
    assert not broker.answers(KafkaSettings(bootstrap_servers=f"127.0.0.1:{kafka_port}"))


def files_in(folder: Path) -> dict[str, str]:
    return {str(file): file.read_text() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.parametrize("is_fresh", [True, False])
@pytest.mark.parametrize("held", ["run", "run/mlruns"])
def test_a_second_stack_in_one_folder_is_refused_before_it_touches_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: str, is_fresh: bool
) -> None:
    monkeypatch.delenv(TRACKING_VARIABLE, raising=False)
    monkeypatch.setenv(broker.VARIABLE, f"127.0.0.1:{machine.free_port()}")  # given, and away
    home, shown = Home.under(tmp_path / "run", is_fresh and held == "run"), io.StringIO()
    home.log("worker").parent.mkdir(parents=True)
    home.log("worker").write_text("of the first")
    with lock(tmp_path / held):
        before = files_in(tmp_path)
        with (
            pytest.raises(ProcessError, match=f"another stack .*{held}: stop it"),
            running(Ports.free(), home, Console(file=shown)),
        ):
            pytest.fail("two stacks in one folder")
        now = files_in(tmp_path)
    assert before.items() <= now.items() and {Path(name).name for name in now} == {
        "lock", "worker.log",
    }  # fmt: skip
    assert not shown.getvalue()


def test_what_an_earlier_stack_left_goes_only_where_a_stack_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")  # no model: it ends after its folders
    for is_fresh in (False, True):
        home = Home.under(tmp_path / "run", is_fresh)
        home.log("worker").parent.mkdir(parents=True, exist_ok=True)
        home.log("worker").write_text("of an earlier one")
        (home.root / "elsewhere").symlink_to(tmp_path)
        with (
            pytest.raises(ModelError),
            running(Ports.free(), home, Console(file=io.StringIO())),
        ):
            pytest.fail("a stack without a model")
        assert home.log("worker").exists() == (home.root / "elsewhere").exists() == (not is_fresh)
        (home.root / "elsewhere").unlink(missing_ok=True)
    assert (home.root / "lock").exists(), "removed, it would lock nobody out"


def test_options_of_servers_in_a_shell_are_not_those_of_our_registry(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    theirs = {
        "MLFLOW_REGISTRY_STORE_URI": "sqlite:///production.db", "MLFLOW_STATIC_PREFIX": "/mlflow",
        "_MLFLOW_SERVER_FILE_STORE": "sqlite:///production.db", "UVICORN_ROOT_PATH": "/mlflow",
        "GUNICORN_CMD_ARGS": "--bind :1", "MLFLOW_TRACKING_TOKEN": "hunter",
    }  # fmt: skip
    for name, value in {**theirs, "HVD_WORKER_NAME": "w", "VLLM_CPU_KVCACHE_SPACE": "1"}.items():
        monkeypatch.setenv(name, value)
    kept = inherited(own_registry=True)
    assert not theirs.keys() & kept.keys()
    assert kept.items() >= {"HVD_WORKER_NAME": "w", "VLLM_CPU_KVCACHE_SPACE": "1"}.items()
    assert inherited(own_registry=False) == dict(os.environ), "its client may need a token"


@pytest.mark.parametrize("folder", ["plain", "a b", "o'brien", "$HOME"])
def test_what_is_to_be_typed_is_what_a_shell_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    stack = Stack(
        "http://127.0.0.1:8000", "http://127.0.0.1:5000", KafkaSettings(), "the 'model'", {}, {}
    )
    programs = tmp_path / folder / "bin"
    programs.mkdir(parents=True)
    (programs / "hvd").write_text('#!/bin/sh\necho "$@"\n')
    (programs / "hvd").chmod(0o755)
    monkeypatch.setattr("sys.executable", str(programs / "python"))
    shown = Text.from_markup(greeting(stack, "http://127.0.0.1:8010", Home.under(tmp_path))).plain
    typed = next(line for line in shown.splitlines() if line.endswith(" policy list"))
    done = subprocess.run(["sh", "-c", typed], capture_output=True, text=True, check=True)
    assert done.stdout == "policy list\n"
    for name in ("HTTP_PROXY", "http_proxy", "no_proxy", "NO_PROXY", "ALL_PROXY", KEY_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    plain = shlex.split(first_request(stack))
    assert json.loads(plain[-1])["model"] == stack.model and "--noproxy" not in plain
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv(KEY_VARIABLE, "hunter")
    typed = shlex.split(first_request(stack))
    assert typed[typed.index("--noproxy") + 1] == "*" and json.loads(typed[-1])
    assert f"Authorization: Bearer ${KEY_VARIABLE}" in typed and "hunter" not in " ".join(typed)


def test_a_terminal_that_nobody_reads_ends_nothing(capsys) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    pipe = os.fdopen(writer, "w", buffering=1)
    for _ in range(2):
        say(Console(file=pipe), "broker ended with status 1; [next] try in 1 s")
    with contextlib.suppress(BrokenPipeError):
        pipe.close()
    say(Console(file=pipe), "after the end")
    say(Console(), "broker runs again")
    assert "broker runs again" in capsys.readouterr().out


class _Stumbling(Ledger):
    """Cannot take the status of one second."""

    def add_status(self, status) -> None:
        if status.time == 3.0:
            raise OverflowError("out of range")
        super().add_status(status)


@patience()
def test_an_observer_reads_on_whatever_comes_and_records_survive_a_restart_of_the_broker(
    tmp_path: Path,
) -> None:
    port, data, log = machine.free_port(), tmp_path / "data", tmp_path / "broker.log"
    kafka = KafkaSettings(bootstrap_servers=f"127.0.0.1:{port}")
    said = {second: worker_status(second, 60).model_dump_json().encode() for second in (3.0, 4.0)}
    (one,) = rounds(1, 3.0, 1.0, {"champion": 40.0})
    broker = start_broker(port, data, log)
    try:
        ensure_topics(kafka)
        send(kafka, DRAFTS.name, encode_events([event(0, 1.0)], ORIGIN, 0))
        ledger = _Stumbling(WORKER)
        with Observer(kafka, ledger) as observer:
            until(lambda: observer._next)  # its place in the topics is fixed
            more = encode_events([event(1, 2.0), event(2, 3.0)], ORIGIN, 1)
            send(kafka, DRAFTS.name, more, b"not an event")
            send(kafka, STATUS.name, said[3.0], said[4.0])
            send(kafka, POLICY.name, b"not a bundle", key=b"key")
            send(kafka, TRIALS.name, one.model_dump_json().encode())
            until(lambda: ledger.seen == 2 and ledger.statuses and ledger.rounds)
            until(
                lambda: ledger.refused == 3, "two that keep no contract, and one that is not taken"
            )
        assert [status.time for status in ledger.statuses] == [4.0]
        assert ledger.rounds[0].blocks[0].side == "champion"
        processes.stop([broker])
        broker = start_broker(port, data, log)
        whole = Ledger(WORKER)
        with Observer(kafka, whole, since_s=math.inf):
            until(lambda: (whole.seen, len(whole.statuses), whole.refused) == (3, 2, 2))
    finally:
        processes.stop([broker])
