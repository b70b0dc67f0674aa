"""The file of results: what was cut off costs one line, and what is another's is left alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from decoder.contracts.errors import SettingsError
from pipelines.lab.bench.results import Key, Measured, Outcome, Results

SETTINGS = {"methods": ["greedy"], "templates": ["chat"], "max_tokens": 4}


def measured(name: str) -> Measured:
    outcome = Outcome("greedy", (1, 2, 3), (), 9.0, 311.5)
    return Measured(Key("mbpp", "chat", name), "code", "", 12, 3, {"greedy": outcome})


def test_a_line_cut_off_costs_that_line_and_not_the_next(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "generations.jsonl"
    Results(SETTINGS, path).add(measured("a"))
    path.write_bytes(path.read_bytes()[:-40])
    Results(SETTINGS, path).add(measured("b"))
    found = Results(SETTINGS, path)
    assert list(found.prompts.values()) == [measured("b")]
    assert found.problems == [f"{path}:2 skipped: the line was not written whole."]


def test_other_settings_are_refused_by_name_unless_fresh(tmp_path: Path) -> None:
    path = tmp_path / "generations.jsonl"
    other = {**SETTINGS, "max_tokens": 8, "device": "cpu"}
    Results(SETTINGS, path)
    Results(other, path)  # nothing was measured yet
    Results(SETTINGS, path).add(measured("a"))
    with pytest.raises(SettingsError, match=r"another device, max_tokens: .*--fresh"):
        Results(other, path)
    assert Results(other, path, fresh=True).prompts == {}


def test_a_file_of_something_else_is_left_alone_and_no_place_to_write_is_named(
    tmp_path: Path,
) -> None:
    path = tmp_path / "generations.jsonl"
    path.write_text('{"id": 1}\n')
    with pytest.raises(SettingsError, match="not a results file"):
        Results(SETTINGS, path)
    assert path.read_text() == '{"id": 1}\n'
    with pytest.raises(SettingsError, match="cannot be kept"):
        Results(SETTINGS, path / "generations.jsonl")
