"""The file of results: what is written comes back, and what was cut off costs one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from decoder.contracts.errors import SettingsError
from pipelines.bench.results import Cycle, Key, Labelled, Outcome, PromptFacts, Store

SETTINGS = {"methods": ["greedy", "suffix"], "templates": ["chat"], "max_tokens": 4}
KEY = Key("mbpp", "chat", "mbpp/1")
FACTS = PromptFacts(KEY, "code", "", 12, 3)


def outcome(method: str, tokens: tuple[int, ...] = (1, 2, 3)) -> Outcome:
    cycles = (Cycle("cache", 5, 5, 1, 10.5, 200.0), Cycle("none", 0, 0, 0, 1.0, 100.0))
    drafts = (Labelled(2.5, 1, False), Labelled(0.5, 0, True))
    return Outcome(KEY, method, tokens, cycles, "stop", 9.0, 311.5, drafts, drafts[:1])


def test_what_was_written_comes_back_and_the_last_version_counts(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "generations.jsonl"
    store = Store(path, SETTINGS)
    store.prompt(FACTS)
    for method, tokens in (("greedy", (9,)), ("greedy", (1, 2, 3)), ("suffix", (1, 2, 3))):
        store.outcome(outcome(method, tokens))
    store.problem("something was left out.")
    store.problem("something was left out.")
    found = Store(path, SETTINGS).results
    assert found.whole() == {KEY: {m: outcome(m) for m in ("greedy", "suffix")}}
    assert found == store.results
    assert found.problems == ["something was left out."]
    assert outcome("greedy").decoded == 2


def test_a_prompt_as_version_0_2_kept_it_is_read(tmp_path: Path) -> None:
    store = Store(path := tmp_path / "generations.jsonl", SETTINGS)
    store.prompt(FACTS)
    head, line = path.read_text().splitlines()
    old = {**json.loads(line), "structure": {"code": 1.5}}
    path.write_text(f"{head}\n{json.dumps(old)}\n")
    assert Store(path, SETTINGS).results.prompts == {KEY: FACTS}


def test_a_line_cut_off_costs_that_line_and_not_the_next(tmp_path: Path) -> None:
    path = tmp_path / "generations.jsonl"
    Store(path, SETTINGS).outcome(outcome("greedy"))
    path.write_bytes(path.read_bytes()[:-40])
    Store(path, SETTINGS).outcome(outcome("suffix"))
    found = Store(path, SETTINGS).results
    assert set(found.outcomes[KEY]) == {"suffix"}
    assert found.problems == [f"{path}:2 skipped: the line was not written whole."]


def test_other_settings_are_refused_by_name_unless_fresh(tmp_path: Path) -> None:
    path = tmp_path / "generations.jsonl"
    other = {**SETTINGS, "max_tokens": 8, "device": "cpu"}
    Store(path, SETTINGS)
    Store(path, other)  # nothing was measured yet
    Store(path, SETTINGS).outcome(outcome("greedy"))
    with pytest.raises(SettingsError, match=r"another device, max_tokens: .*--fresh"):
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
