"""What a person sees of the topics: rows as they come, what lies there, an export."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from decoder.contracts.settings import KafkaSettings
from decoder.contracts.topics import LEASE, TOPICS
from decoder.kafka.clients import close, open_admin
from pipelines import machine
from pipelines.cli import app
from tests.pipelines.telemetry.conftest import folder_of, of_learner
from tests.pipelines.telemetry.records import ONE, mixed, produce, record, spread


@pytest.fixture
def filled(empty: KafkaSettings, monkeypatch: pytest.MonkeyPatch) -> KafkaSettings:
    monkeypatch.setenv("HVD_KAFKA_BOOTSTRAP_SERVERS", empty.bootstrap_servers)
    spread(empty)
    produce(empty, mixed())
    return empty


def asked(*arguments: str) -> Any:
    done = CliRunner().invoke(app, ["telemetry", *arguments])
    assert done.exit_code == 0, (done.output, done.exception)
    return done


@pytest.mark.usefixtures("filled")
def test_tail_shows_rows_of_who_was_asked_for() -> None:
    shown = asked("tail", "--since", "1h", "--worker", "one", "--workload", "chat", "-n", "20")
    head, *lines = shown.stdout.splitlines()
    assert head.split()[:4] == ["time", "worker", "workload", "arm"] and len(lines) == 20
    assert all(line.split()[1:3] == ["one", "chat"] for line in lines)
    assert shown.stderr.startswith("20 rows; ")
    whole = asked("tail", "--since", "1h", "--arm", "none", "-n", "30", "--json")
    rows = [json.loads(line) for line in whole.stdout.splitlines()]
    assert {row["arm"] for row in rows} == {"none"} and len(rows) == 30
    assert len({(row["life"], row["number"]) for row in rows}) == 30
    assert rows[0]["feature_match_len"] == 0.0


def test_tail_shows_what_comes_and_what_is_hostile_is_only_counted(filled: KafkaSettings) -> None:
    later = [(0, b"\xff" * 50), (0, record(ONE, 6, 900, 3))]
    timer = threading.Timer(6.0, produce, (filled, later))  # when the command listens by then
    timer.start()
    shown = asked("tail", "-n", "3", "--json")
    timer.join()
    assert [json.loads(line)["number"] for line in shown.stdout.splitlines()] == [900, 901, 902]
    assert "1 refused" in shown.stderr


def test_ctrl_c_ends_a_tail_with_what_it_read(filled: KafkaSettings) -> None:
    child = subprocess.Popen(
        [sys.executable, "-m", "pipelines.cli", "telemetry", "tail", "--since", "1h"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder_of("."),
        env={**os.environ, "HVD_KAFKA_BOOTSTRAP_SERVERS": filled.bootstrap_servers},
    )  # fmt: skip
    assert child.stdout is not None
    lines = [child.stdout.readline() for _ in range(101)]  # the head, and all that lies there
    child.send_signal(signal.SIGINT)
    rest, told = child.communicate(timeout=30)
    assert child.returncode == 130 and "Traceback" not in told
    assert all(lines) and not rest and "100 rows; 15 records read" in told


def test_a_reader_that_has_enough_ends_a_tail_in_peace(filled: KafkaSettings) -> None:
    child = subprocess.Popen(
        [sys.executable, "-m", "pipelines.cli", "telemetry", "tail", "--since", "1h", "--json"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder_of("."),
        env={**os.environ, "HVD_KAFKA_BOOTSTRAP_SERVERS": filled.bootstrap_servers},
    )  # fmt: skip
    assert child.stdout is not None and child.stderr is not None
    assert child.stdout.readline()
    child.stdout.close()  # what lies there is more than a pipe holds
    with child.stderr:
        told = child.stderr.read()
    assert child.wait(timeout=30) == 0
    assert "records read" in told and "Exception" not in told and "Traceback" not in told


def test_describe_counts_what_lies_there(filled: KafkaSettings) -> None:
    of_learner(filled)
    told = json.loads(asked("describe", "--json").stdout)
    topics = {topic["topic"]: topic for topic in told["topics"]}
    assert set(topics) == {topic.name for topic in TOPICS}
    drafts = topics["hvd.drafts.v2"]
    assert (drafts["partitions"], drafts["records"], drafts["cleanup"]) == (3, 15, "delete")
    assert topics["hvd.policy.v2"]["records"] >= 2
    assert abs(drafts["last"] - time.time()) < 120 and drafts["bytes_a_record"] > 1000
    assert told["counts"]["rows"] == 100 and told["counts"]["missing"] == 2
    assert told["by"]["worker"] == {"one": 70, "other": 30}
    assert sum(told["by"]["arm"].values()) == 100
    assert told["seconds"] == pytest.approx(6.9) and told["lag"] == {"learner": 0}
    # each partition's over its own time; which of two that hold the same five events is read first
    # is anybody's guess
    rates = [first / 6.9 + (70 - first) / 3.9 + 30 / 2.9 for first in (35, 40)]
    assert min(rates) * 0.99 < told["events_per_s"] < max(rates) * 1.01
    few = json.loads(asked("describe", "--sample", "1", "--json").stdout)
    assert few["counts"]["records"] == 3 and few["topics"][0]["records"] == 15
    page = asked("describe").stdout
    assert "hvd.drafts.v2" in page and "Events by worker: one 70, other 30" in page


def test_a_topic_that_is_not_there_is_described_as_one_without_partitions(
    filled: KafkaSettings,
) -> None:
    admin = open_admin(filled, "test", 10_000)
    admin.delete_topics([LEASE.name])
    close(admin)
    told = json.loads(asked("describe", "--json").stdout)
    topics = {topic["topic"]: topic for topic in told["topics"]}
    assert (topics[LEASE.name]["partitions"], topics[LEASE.name]["records"]) == (0, 0)
    assert told["counts"]["rows"] == 100


@pytest.mark.usefixtures("filled")
def test_export_says_what_it_wrote(tmp_path: Path) -> None:
    told = json.loads(asked("export", str(tmp_path / "out"), "--json").stdout)
    assert (told["rows_written"], told["files"], told["refused"]) == (100, 1, 4)
    shown = asked("export", str(tmp_path / "out")).stderr
    assert "100 rows in 1 files" in shown and "15 rows came twice, 2 records missing" in shown


@pytest.mark.parametrize("command", [["tail"], ["describe"], ["export", "nowhere"]])
def test_without_a_broker_it_says_what_to_do(
    command: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HVD_KAFKA_BOOTSTRAP_SERVERS", f"127.0.0.1:{machine.free_port()}")
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["telemetry", *command])
    assert "start it, or let HVD_KAFKA_BOOTSTRAP_SERVERS name yours" in str(done.exception)
