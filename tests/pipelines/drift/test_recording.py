"""The project's own recordings: the embedded model's answers, and what its drafter foresaw."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pipelines.cli import app
from pipelines.drift import command
from pipelines.drift.recording import record
from pipelines.replay.traces import read
from pipelines.workloads import WORKLOADS


@pytest.mark.long
def test_recordings_are_made_once_and_can_be_replayed(tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    record(tmp_path, 1, ["chat"])
    first = path.read_bytes()
    with path.open("a") as file:
        file.write('{"cut')
    record(tmp_path, 2, ["chat"])
    assert path.read_bytes().startswith(first)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({line["session"] for line in lines}) == len(lines) == 2
    traces = read(path, None).traces
    assert len(traces) == len(lines)
    for trace in traces:
        assert trace.model_accepted is not None
        assert len(trace.model_accepted) == len(trace.output) > 1


@pytest.mark.release
def test_the_command_records_first_and_then_measures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "recordings", lambda: tmp_path / "made")
    (tmp_path / "small.toml").write_text('[[segments]]\nkinds = ["edits"]\ngenerations = 4\n')
    asked = ["drift", "--record", "8", "--scenario", str(tmp_path / "small.toml"), "--json"]
    asked += ["--seeds", "1", "--policies", "counting,oracle", "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, asked, catch_exceptions=False)
    (found,) = json.loads(done.stdout)["scenarios"]
    assert found["requests"] > 0 and found["policies"]["counting"]["rate"] > 1.0
    assert {path.stem for path in (tmp_path / "made").iterdir()} == set(WORKLOADS)
