"""The project's own recordings: the embedded model's answers, and what its drafter foresaw."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipelines.drift.recording import record
from pipelines.replay.traces import read


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
