"""``hvd replay``: from a file of recordings to figures, in one command."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from decoder.contracts.bundle import Policy
from decoder.contracts.errors import ModelError, TraceError
from decoder.contracts.features import FEATURES
from decoder.policy.probes import to_bytes
from learner.state_dir import lock
from pipelines import embedded, machine
from pipelines.cli import app
from pipelines.lab.replay import costs, recording, study
from pipelines.lab.replay.traces import read, split
from pipelines.prompts import tokenise
from pipelines.replay.engine import Trace
from pipelines.workloads import WORKLOADS, prompts
from tests.conftest import random_policy
from tests.pipelines.lab.replay.samples import word_tokenizer, write_traces

RULES = {
    "greedy", "suffix", "frequency", "match4", "buckets", "suffix@2", "frequency@2", "match4@2",
    "eagle3:1", "eagle3:2", "eagle3:3", "eagle3:4", "river-linear", "river-tree", "hybrid",
    "oracle",
}  # fmt: skip


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Two files of recordings; the first also has a line that is broken."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    paths = [write_traces(tmp_path / f"{n}.jsonl", i, 24, 80) for i, n in enumerate(("one", "two"))]
    with paths[0].open("a") as first:
        first.write("{")
    return paths


@pytest.fixture
def replay(tmp_path: Path) -> Callable[..., Result]:
    word_tokenizer().save_pretrained(tmp_path / "tokenizer")

    def ran(*words: object) -> Result:
        asked = ["replay", "--tokenizer", str(tmp_path / "tokenizer"), *map(str, words)]
        return CliRunner().invoke(app, asked)

    return ran


def figures(replay: Callable[..., Result], *words: object) -> dict[str, Any]:
    done = replay("--json", *words)
    assert done.exit_code == 0, done.exception
    return json.loads(done.stdout)


def test_each_file_is_decoded_by_every_rule(
    files: list[Path], replay: Callable[..., Result]
) -> None:
    asked = (*files, "--model-accepts", 1.5, "--kind", "survival")
    found = figures(replay, *asked)
    assert list(found["sets"]) == list(found["x_greedy"]) == ["one", "two"]
    for rates in found["x_greedy"].values():
        assert set(rates) == RULES
        assert rates["oracle"] == max(rates.values())
        assert rates["frequency"] > rates["greedy"] == 1.0
    assert "one.jsonl:25: left out, not JSON" in found["notices"][0]
    assert found["settings"]["model_accepts"] == 1.5
    assert set(found["predicts"]) == {"one", "two", "all"}
    assert found["predicts"]["all"]["mae"] < 6.0


def test_the_paper_is_trained_and_judged_at_every_token_position(
    files: list[Path], replay: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = list[Policy]()
    fitted = study.paper

    def paper(*words: Any) -> Policy:
        made.append(fitted(*words))
        return made[-1]

    monkeypatch.setattr(study, "paper", paper)
    found = figures(replay, *files, "--paper")
    whole, ones = found["predicts"]["all"], [found["predicts"][n] for n in ("one", "two")]
    assert whole["drafts"] == sum(one["drafts"] for one in ones)
    positions = sum(len(t.output) - 1 for path in files for t in held_out(path))
    assert 0.3 * positions < whole["drafts"] <= positions, "a state at each, where there is a match"
    assert 0.0 < whole["high_payoff"] < 1.0 and whole["f1"] > 0.0
    (policy,) = made
    weight, _ = policy.layers[0]
    used = {name for name, row in zip(FEATURES, weight, strict=True) if row.any()}
    assert used == set(study.TABLE_9) and [len(b) for _, b in policy.layers] == [256, 256, 1]
    assert found["settings"]["policy"] == "payoff v0"
    shown = replay(*files, "--paper").stdout
    assert "paper, Qwen3-8B" in shown and "61.4%" in shown
    assert all(len(line) <= 80 for line in shown.splitlines())
    assert replay("--paper").exit_code == 2


def held_out(path: Path) -> list[Trace]:
    return split(read(path, word_tokenizer()).traces).test


def test_what_is_expected_on_a_card_is_priced_by_its_steps_and_says_so(
    files: list[Path], replay: Callable[..., Result], tmp_path: Path
) -> None:
    card, cells = costs.measured("h100-8b")
    assert "H100" in card and [cell.batch for cell in cells] == [1, 8, 32, 64]
    assert cells[3].table.time(1) < cells[0].table.time(1) / 20  # one request's part of a step
    held = json.loads(costs.SHIPPED.read_text())
    paid, free = held["cells"][3], json.loads(json.dumps(held["cells"][3]))
    for method in free["methods"]:
        method["router_exposed_us"] = 0.0
    bundle, own = tmp_path / "bundle.safetensors", tmp_path / "own.json"
    bundle.write_bytes(to_bytes(random_policy()))
    own.write_text(json.dumps(held | {"cells": [paid, free]}))
    asked = (files[0], "--policy", bundle, "--limit", 4, "--costs", own)
    found = figures(replay, *asked)
    assert found["expected_on"] == card and found["expected"][0]["batch"] == 64
    assert found["settings"]["policy"] == "payoff v1"
    with_router, without = (each["x_greedy"]["one"] for each in found["expected"])
    assert without["suffix"] > with_router["suffix"]
    assert without["eagle3:2"] == with_router["eagle3:2"]
    assert f"Expected on {card[:12]}" in replay(*asked).stdout
    own.write_text("{}")
    assert "hvd bench gpu" in str(replay(*asked).exception)


def test_a_file_that_cannot_be_used_leaves_the_rest(
    files: list[Path], replay: Callable[..., Result], tmp_path: Path
) -> None:
    small, gone = tmp_path / "small.jsonl", tmp_path / "no.jsonl"
    small.write_text(json.dumps({"prompt": [5], "output": [6, 7]}), encoding="utf-8")
    found = figures(replay, gone, small, files[1])
    assert list(found["sets"]) == ["two"]
    assert "no.jsonl" in found["notices"][0] and "small.jsonl" in found["notices"][1]
    assert "nothing to measure: cannot read" in str(replay(gone).exception)
    shown = replay(*files)
    assert all(word in shown.stdout for word in ("one", "two", "mean"))
    assert all(len(line) <= 80 for line in shown.stdout.splitlines()) and "…" not in shown.stdout
    assert "one.jsonl:25" in shown.stderr
    assert "labelled drafts" in str(replay(files[0], "--limit", 4).exception)
    refused = replay(files[0], "--tokenizer", tmp_path).exception
    assert isinstance(refused, ModelError) and "no tokenizer at" in str(refused)


def test_without_traces_the_model_answers_the_workloads_that_every_machine_has(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def recorded(sets: recording.Sets, _: object) -> Path:
        for name, asked in sets.items():
            lines = ({"session": str(ids), "prompt": ids, "output": ids[-40:]} for ids in asked)
            (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
        return tmp_path

    monkeypatch.setattr(recording, "record", recorded)
    done = CliRunner().invoke(app, ["replay", "--limit", "1", "--json"])
    assert done.exit_code == 0, done.exception
    found = json.loads(done.stdout)
    assert set(found["x_greedy"]) == set(WORKLOADS)
    assert f"The recordings are in {tmp_path}." in found["notices"]
    both = ["replay", str(tmp_path / "chat.jsonl"), "--prompts", str(tmp_path)]
    assert CliRunner().invoke(app, both).exit_code == 2


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that holds the embedded model and nothing else."""
    model = embedded.ensure_model()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    machine.cache_directory().mkdir(parents=True)
    embedded.model_directory().symlink_to(model)


@pytest.mark.long
@pytest.mark.usefixtures("empty_cache")
def test_recordings_are_made_once_and_can_be_replayed() -> None:
    ids = [tokenise(p, embedded.load_tokenizer(None)).ids for p in islice(prompts("chat"), 2)]
    told = list[tuple[str, int, int]]()

    def step(what: str, done: int, whole: int) -> None:
        told.append((what, done, whole))

    path = recording.record({"chat": ids[:1]}, step) / "chat.jsonl"
    first = path.read_bytes()
    assert recording.record({"chat": ids}, step) == recording.folder_of() == path.parent
    assert path.read_bytes().startswith(first)
    both = [("recording chat", done, 1) for done in (0, 1)] * 2
    assert told == both, "the second time one was there"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({line["session"] for line in lines}) == len(lines) == 2
    traces = read(path, None).traces
    assert len(traces) == len(lines)
    turned = recording.traces_of(path.parent, "chat", ids[::-1])
    assert [tuple(trace.prompt) for trace in turned] == ids[::-1], "in the order asked for"
    for trace in traces:
        assert trace.model_accepted is not None
        assert len(trace.model_accepted) == len(trace.output) > 1


def test_two_that_record_do_not_write_over_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with lock(recording.folder_of()), pytest.raises(TraceError, match="another hvd replay"):
        recording.record({}, lambda *_: None)
    assert recording.record({}, lambda *_: None) == recording.folder_of()
