"""The project's own recordings: the embedded model's answers, and what its drafter foresaw."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pipelines import embedded, machine
from pipelines.cli import app
from pipelines.lab.replay import own
from pipelines.lab.replay.traces import read
from pipelines.workloads import WORKLOADS


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that holds the embedded model and nothing else."""
    model = embedded.ensure_model()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    machine.cache_directory().mkdir(parents=True)
    embedded.model_directory().symlink_to(model)


@pytest.mark.long
def test_recordings_are_made_once_and_can_be_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own, "WORKLOADS", ("chat",))
    told = list[tuple[str, int, int]]()

    def step(what: str, done: int, whole: int) -> None:
        told.append((what, done, whole))

    path = own.record(1, step) / "chat.jsonl"
    first = path.read_bytes()
    assert own.record(2, step) == own.folder() == path.parent
    assert path.read_bytes().startswith(first)
    both = [("recording chat", done, 1) for done in (0, 1)] * 2
    assert told == both, "the second time one was there"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({line["session"] for line in lines}) == len(lines) == 2
    traces = read(path, None).traces
    assert len(traces) == len(lines)
    for trace in traces:
        assert trace.model_accepted is not None
        assert len(trace.model_accepted) == len(trace.output) > 1


@pytest.mark.release
def test_the_command_records_first_and_then_measures(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text('[[segments]]\nkinds = ["edits"]\ngenerations = 4\n')
    asked = ["drift", "--record", "8", "--scenario", str(tmp_path / "small.toml"), "--json"]
    asked += ["--seeds", "1", "--policies", "counting,oracle", "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, asked, catch_exceptions=False)
    (found,) = json.loads(done.stdout)["scenarios"]
    assert found["requests"] > 0 and found["policies"]["counting"]["rate"] > 1.0
    assert {path.stem for path in own.folder().glob("*.jsonl")} == set(WORKLOADS)
