"""The whole of ``hvd train-drafter``, small: the target writes and reads, a head comes of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from decoder.drafting.eagle3 import load_head
from pipelines.cli import app
from pipelines.drafter import compose, written


@pytest.mark.long
def test_one_command_makes_a_head_and_goes_on_where_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compose, "SEQUENCES", 16)
    monkeypatch.setattr(written, "SEQUENCES", 16)
    monkeypatch.setattr(written, "FUNCTIONS", 20)
    monkeypatch.setattr(written, "TOPICS", 12)
    folder, head = tmp_path / "work", tmp_path / "head"
    asked = ["train-drafter", "--folder", str(folder), "--out", str(head), "--tokens", "1000"]

    def shards() -> dict[str, int]:
        return {p.name: p.stat().st_mtime_ns for p in (folder / "states").glob("*.safetensors")}

    CliRunner().invoke(app, [*asked, "--minutes", "0.1"], catch_exceptions=False)
    first = shards()
    assert {name[:5] for name in first} >= {"60000", "70000", "70001"}
    load_head(head, hidden_size=576, vocab_size=49152, layers=30)
    assert "composed" in (head / "README.md").read_text()
    checkpoint = (folder / "head.safetensors").stat().st_mtime_ns
    CliRunner().invoke(app, [*asked, "--minutes", "0.1"], catch_exceptions=False)
    assert shards() == first, "nothing is written or read twice"
    assert (folder / "head.safetensors").stat().st_mtime_ns > checkpoint
