"""``hvd bench decode`` from the shell: checkpoints on disk, prompts on disk, figures on disk."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from decoder.contracts.errors import SettingsError
from pipelines.cli import app
from pipelines.lab.bench.serve.prompts import Asked, levels

METHODS = ["greedy", "eagle3", "suffix", "frequency", "hybrid", "oracle"]


def bench(home: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Result:
    """``hvd bench decode`` in this process, in the folder ``home``."""
    own = ["--prompts", "prompts", "--model", "model", "--drafter", "drafter",
           "--policy", "policy.safetensors", "--max-tokens", "36"]  # fmt: skip
    monkeypatch.chdir(home)
    return CliRunner().invoke(app, ["bench", "decode", *own, *arguments])


def test_a_run_leaves_figures_and_its_generations(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = ["--methods", ",".join(METHODS), "--limit", "2", "--datasets", "good,faulty,gone"]
    done = bench(
        home, monkeypatch, *wanted, "--out", "out", "--json", "figures/out.json", "--check"
    )
    assert done.exit_code == 0, done.output
    said = " ".join(done.output.split())
    for part in (
        "Every output equals greedy's.",
        "dataset 'gone' left out",
        "prompts/faulty.jsonl:1 skipped",
        "faulty: prompt faulty/long skipped: its",
    ):
        assert part in said
    figures: dict[str, Any] = json.loads((home / "figures" / "out.json").read_text())
    assert json.loads((home / "out" / "results.json").read_text()) == figures
    records = {(r["dataset"], r["method"]): r for r in figures["records"]}
    assert set(records) == {(d, m) for d in ("good", "faulty") for m in METHODS}
    assert records["good", "suffix"]["exact"] is True
    assert records["good", "suffix"]["tok_per_s"] > 0
    assert records["good", "greedy"]["speedup_vs_greedy"] == 1.0
    assert len(figures["problems"]) == 3
    told = figures["settings"]["policies"]["hybrid"]
    assert re.fullmatch("version 1, payoff, threshold 2, [0-9a-f]{12}", told)
    again = bench(home, monkeypatch, *wanted, "--out", "out", "--json", "again.json")
    assert again.exit_code == 0, again.output
    assert json.loads((home / "again.json").read_text())["records"] == figures["records"]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("--prompts nowhere", "nowhere is not a folder"),
        ("--clock cpu --device cuda", "use it with --device cpu"),
        ("--methods greedy --device cuda:9", "finds no CUDA device"),
        ("--methods suffix --check", "--check compares with greedy"),
    ],
)
def test_what_no_run_can_be_made_of_is_said(
    home: Path, asked: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    done = bench(home, monkeypatch, *asked.split())
    assert isinstance(done.exception, SettingsError) and said in str(done.exception)


@pytest.mark.parametrize(
    ("turns", "concurrency", "counts"), [(0, (1, 2), [1, 1]), (0, (2,), [2]), (2, (1,), [2])]
)
def test_servers_are_asked_prompts_that_fit_or_the_lack_of_them_is_said(
    home: Path, turns: int, concurrency: tuple[int, ...], counts: list[int]
) -> None:
    asked = Asked(home / "prompts", (), concurrency, 2, 90, turns)
    put = levels(asked, str(home / "model"), [])
    assert [len(prompts) for _, prompts in put] == counts
    ids = [p.id for _, prompts in put for p in prompts]
    assert len(set(ids)) == len(ids) and "faulty/long" not in ids
    with pytest.raises(SettingsError, match=r"are too few.*faulty\.jsonl:1 skipped"):
        levels(replace(asked, concurrency=(1, 8, 9), turns=1), str(home / "model"), [])
