"""What hvd up starts, what it says, and what it stops."""

from __future__ import annotations

import contextlib
import io
import math
import os
import socket
from pathlib import Path

import pytest
from rich.console import Console

from decoder.contracts.errors import ProcessError
from decoder.contracts.settings import KafkaSettings
from decoder.contracts.topics import DRAFTS, POLICY, STATUS, TRIALS
from learner.topics import make_right
from pipelines import machine
from pipelines.stack import broker, processes
from pipelines.stack.running import TRACKING_VARIABLE, Home, Ports, running
from pipelines.stack.up import say
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
        make_right(kafka)
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
