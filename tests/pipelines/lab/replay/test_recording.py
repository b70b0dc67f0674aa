"""Recordings of prompts: what is there is found again, whatever else is asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from decoder.contracts.errors import ModelError
from decoder.policy.pricing import CostTable
from pipelines.lab.replay import recording

PLAN = recording.Plan(prompt=20, answer=8)
OUTPUTS: dict[str, list[int]] = {"a": [5, 6], "b": [], "c": [7, 8, 9]}


def asked(texts: str) -> list[list[int]]:
    return [[1, ord(text), 3] for text in texts]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What was recorded of three prompts, the second without an answer."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = PLAN.folder()
    found.mkdir(parents=True)
    lines = [
        {"session": text, "prompt": ids, "output": OUTPUTS[text], "max_tokens": PLAN.answer}
        for text, ids in zip(OUTPUTS, asked("abc"), strict=True)
    ]
    (found / "some.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return found


def no_step(*_: object) -> None:
    pytest.fail("a model was asked")


def test_what_was_recorded_is_not_recorded_again_and_read_in_the_order_asked_for(
    folder: Path,
) -> None:
    assert recording.record({"some": asked("cab")}, PLAN, no_step) == folder
    for texts, outputs in (("cba", [[7, 8, 9], [5, 6]]), ("a", [[5, 6]])):
        found = recording.traces_of(folder, "some", asked(texts))
        assert [list(trace.output) for trace in found] == outputs
    assert recording.Plan(prompt=21, answer=8).folder() != folder, "other lengths are others"


def test_costs_are_measured_once_and_those_of_a_machine_too_busy_for_large_steps_are_refused(
    folder: Path,
) -> None:
    with pytest.raises(ModelError, match="--nominal"):
        recording.keep(CostTable("reference", (1,), (10.0,)), folder)
    assert not list(folder.glob("costs*"))
    table = CostTable("reference", (1, 64), (10.0, 30.0), draft_token_us=2.0)
    recording.keep(table, folder)
    assert recording.costs_of(folder, no_step) == table
