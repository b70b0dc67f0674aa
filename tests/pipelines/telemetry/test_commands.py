"""What a person is told by a command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from decoder.contracts.settings import KafkaSettings
from pipelines import machine
from pipelines.cli import app
from tests.pipelines.telemetry.records import mixed, produce, spread


def test_export_says_what_it_wrote(
    empty: KafkaSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HVD_KAFKA_BOOTSTRAP_SERVERS", empty.bootstrap_servers)
    spread(empty)
    produce(empty, mixed())
    command = ["telemetry", "export", str(tmp_path / "out")]
    told = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)
    assert (told["rows_written"], told["files"], told["refused"]) == (100, 1, 4)
    shown = CliRunner().invoke(app, command).stderr
    assert "100 rows in 1 files" in shown and "15 rows came twice, 2 records missing" in shown


@pytest.mark.parametrize("command", [["export", "nowhere"], ["forget", "--tenant", "5f" * 12]])
def test_without_a_broker_it_says_what_to_do(
    command: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HVD_KAFKA_BOOTSTRAP_SERVERS", f"127.0.0.1:{machine.free_port()}")
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["telemetry", *command])
    assert "start it, or let HVD_KAFKA_BOOTSTRAP_SERVERS name yours" in str(done.exception)
