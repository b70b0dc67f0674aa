"""The results file: what is written comes back, and what was cut off costs one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from decoder.contracts.errors import SettingsError
from pipelines.bench.results import Cycle, Labelled, Outcome, PromptFacts, Store, read

SETTINGS = {"methods": ["greedy", "suffix"], "templates": ["chat"], "max_tokens": 4}
FACTS = PromptFacts("mbpp", "chat", "mbpp/1", "code", "", 12, 3, {"code": 1.5})


def outcome(method: str, tokens: tuple[int, ...] = (1, 2, 3)) -> Outcome:
    cycles = (Cycle("cache", 5, 5, 1, 10.5, 200.0), Cycle("none", 0, 0, 0, 1.0, 100.0))
    drafts = (Labelled(2.5, 1, False), Labelled(0.5, 0, True))
    named = "mbpp", "chat", "mbpp/1", method
    return Outcome(*named, tokens, cycles, "stop", 9.0, 311.5, drafts, drafts[:1])


def test_what_was_written_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "generations.jsonl"
    store = Store(path, SETTINGS, "2026-01-01T00:00:00+00:00")
    store.prompt(FACTS)
    store.outcome(outcome("greedy"))
    store.outcome(outcome("suffix"))
    store.problem("something was left out.")
    store.problem("something was left out.")
    found = read(path)
    assert found.settings == SETTINGS
    assert found.began == "2026-01-01T00:00:00+00:00"
    assert found.prompts == {FACTS.key: FACTS}
    assert found.whole() == {FACTS.key: {m: outcome(m) for m in ("greedy", "suffix")}}
    assert found.problems == ["something was left out."]
    assert outcome("greedy").decoded == 2


def test_a_second_run_goes_on_and_the_last_version_counts(tmp_path: Path) -> None:
    path = tmp_path / "generations.jsonl"
    Store(path, SETTINGS).outcome(outcome("greedy"))
    again = Store(path, SETTINGS)
    assert set(again.results.outcomes[FACTS.key]) == {"greedy"}
    again.outcome(outcome("greedy", (1, 2, 9)))
    assert read(path).outcomes[FACTS.key]["greedy"].tokens == (1, 2, 9)


def test_a_line_cut_off_costs_that_line_and_not_the_next(tmp_path: Path) -> None:
    path = tmp_path / "generations.jsonl"
    store = Store(path, SETTINGS)
    store.outcome(outcome("greedy"))
    path.write_bytes(path.read_bytes()[:-40])
    again = Store(path, SETTINGS)
    again.outcome(outcome("suffix"))
    found = read(path)
    assert set(found.outcomes[FACTS.key]) == {"suffix"}
    assert found.problems == [f"{path}:2 skipped: the line was not written whole."]


def test_other_settings_are_refused_by_name_unless_fresh(tmp_path: Path) -> None:
    path = tmp_path / "generations.jsonl"
    Store(path, SETTINGS).outcome(outcome("greedy"))
    other = {**SETTINGS, "max_tokens": 8, "device": "cpu"}
    with pytest.raises(SettingsError, match=r"another device, max_tokens: .*--out.*--fresh"):
        Store(path, other)
    assert Store(path, other, fresh=True).results.outcomes == {}


def test_a_file_of_something_else_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "generations.jsonl"
    path.write_text('{"id": 1}\n')
    with pytest.raises(SettingsError, match="not a results file"):
        Store(path, SETTINGS)
    assert path.read_text() == '{"id": 1}\n'


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match="cannot be kept"):
        Store(tmp_path / "file" / "generations.jsonl", SETTINGS)
