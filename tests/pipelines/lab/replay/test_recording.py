"""Recordings of prompts: what is there is found again, whatever else is asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from decoder.contracts.errors import ModelError
from decoder.policy.pricing import CostTable
from pipelines.lab.replay import recording

PLAN = recording.Plan(prompt=20, answer=8)


def asked(*texts: str) -> list[list[int]]:
    return [[1, ord(text), 3] for text in texts]


def line(name: str, ids: list[int], output: list[int]) -> str:
    return json.dumps(
        {
            "session": f"{name}-{ids[1]}",
            "prompt": ids,
            "output": output,
            "max_tokens": PLAN.answer,
            "model_accepted": [0] * len(output),
        }
    )


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What was recorded of three prompts, the second without an answer."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = PLAN.folder()
    found.mkdir(parents=True)
    outputs = ([5, 6], [], [7, 8, 9])
    lines = [line("some", m, o) for m, o in zip(asked("a", "b", "c"), outputs, strict=True)]
    (found / "some.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return found


def no_step(*_: object) -> None:
    pytest.fail("a model was asked")


def test_what_was_recorded_is_not_recorded_again(folder: Path) -> None:
    sets = {"some": asked("c", "a", "b")}
    assert recording.record(sets, PLAN, no_step) == folder


def test_a_set_is_read_in_the_order_in_which_it_was_asked_for(folder: Path) -> None:
    found = recording.traces_of(folder, "some", asked("c", "b", "a"))
    assert [list(trace.output) for trace in found] == [[7, 8, 9], [5, 6]]
    assert [list(t.output) for t in recording.traces_of(folder, "some", asked("a"))] == [[5, 6]]


def test_other_lengths_are_other_recordings(folder: Path) -> None:
    assert recording.Plan(prompt=21, answer=8).folder() != folder


def test_costs_are_measured_once(folder: Path) -> None:
    table = CostTable("reference", (1, 64), (10.0, 30.0), draft_token_us=2.0)
    recording.keep(table, folder)
    assert recording.costs_of(folder, no_step) == table


def test_costs_of_a_machine_too_busy_for_large_steps_are_refused(folder: Path) -> None:
    with pytest.raises(ModelError, match="--nominal"):
        recording.keep(CostTable("reference", (1,), (10.0,)), folder)
    assert not list(folder.glob("costs*"))
