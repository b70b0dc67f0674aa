"""What sessions are made of: the project's own scripts, and anybody's."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from decoder.contracts.errors import SettingsError
from pipelines.bench.serve.load import turns
from pipelines.bench.sessions.kinds import KINDS
from pipelines.bench.sessions.scripts import cut, dealt, own, read, scripts
from pipelines.prompts import Prompt, PromptSet
from pipelines.workloads import standard_library_functions
from tests.pipelines.bench.serve.served import asked


def said(*words: str) -> tuple[dict[str, str], ...]:
    """Messages: a word is a user's, ``>word`` an assistant's."""
    roles = {True: "assistant", False: "user"}
    return tuple({"role": roles[w.startswith(">")], "content": w.lstrip(">")} for w in words)


def script(name: str, *words: str) -> Prompt:
    return Prompt(name, "d", "f", said(*words))


def words(prompt: Prompt) -> list[list[str]]:
    return [[m["content"] for m in turn] for turn in turns(prompt)]


def test_a_turn_is_what_is_said_between_two_answers() -> None:
    talk = script("a", ">hello", "one", "two", ">yes", ">and more", "three", ">no")
    assert words(talk) == [["one", "two"], ["three"]]
    assert words(script("b", "one")) == [["one"]]
    assert words(script("c", ">one")) == []


def test_a_script_is_cut_to_its_first_turns_and_brings_no_answers_along() -> None:
    talk = script("a", "one", ">yes", "two", ">no", "three")
    assert words(cut(talk, 2)) == [["one"], ["two"]]
    assert cut(talk, 2).messages == said("one", ">", "two")
    assert words(cut(talk, 9)) == words(talk)


@pytest.mark.parametrize("kind", KINDS)
def test_own_scripts_are_reproducible_and_each_is_another(kind: str) -> None:
    made = list(itertools.islice(scripts(kind, 4), 12))
    assert made == list(itertools.islice(scripts(kind, 4), 12))
    assert len({m.text for m in made}) == 12
    assert made[0].messages != next(scripts(kind, 4, seed=1)).messages
    for one in made:
        assert [len(turn) for turn in turns(one)] == [2, 1, 1, 1], "the first brings the system's"
        assert one.messages[0]["role"] == "system"
        assert not any(m["content"] for m in one.messages if m["role"] == "assistant")


def test_a_session_can_be_longer_than_there_are_things_to_ask() -> None:
    assert len(turns(next(scripts("edits", 9)))) == 9


def test_own_scripts_show_what_the_drafter_was_not_trained_on() -> None:
    (edits,) = own(20, 3, ["edits"])
    text = "\n".join(m["content"] for p in edits.prompts for m in p.messages)
    trained = {f.source for f in standard_library_functions("train")}
    trained -= {f.source for f in standard_library_functions("heldout")}
    assert any(f.source in text for f in standard_library_functions("heldout"))
    assert not any(source in text for source in trained)


def test_failed_tests_are_of_what_was_shown() -> None:
    for prompt in itertools.islice(scripts("code", 4), 8):
        first, *further = (turn[-1]["content"] for turn in turns(prompt))
        (failed,) = [text for text in further if "1 failed" in text]
        name = failed.partition(", in test_")[2].partition("\n")[0]
        assert f"- {name}(" in first


def test_an_unknown_kind_is_named_with_those_there_are() -> None:
    with pytest.raises(SettingsError, match=r"no sessions 'edit': choose from edits, tools"):
        own(1, 1, ["edit"])


def test_recorded_conversations_are_scripts_as_they_are(tmp_path: Path) -> None:
    lines = [
        {"id": "x", "messages": said("one", ">yes", "two")},
        {"id": "y", "messages": said(">only an answer")},
        {"id": "z", "messages": [{"role": "tool", "content": "a result"}]},
        {"id": "broken"},
    ]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, lines)))
    problems: list[str] = []
    (found,) = read(tmp_path, 5, [], problems)
    assert [(p.id, words(p)) for p in found.prompts] == [
        ("x", [["one"], ["two"]]), ("z", [["a result"]]),
    ]  # fmt: skip
    assert len(problems) == 1 and "chats.jsonl:4" in problems[0]


def test_every_concurrency_gets_sessions_of_its_own_and_two_for_each_under_way() -> None:
    sets = [
        PromptSet(name, "f", tuple(asked(f"{name}{i}", name) for i in range(14))) for name in "ab"
    ]
    hands = dealt(sets, (1, 4, 8), 3, lambda p: 1, 10, [])
    assert [len(hand) for hand in hands] == [3, 8, 16]
    names = [p.id for hand in hands for p in hand]
    assert len(set(names)) == len(names)
    assert {p.dataset for p in hands[0]} == {"a", "b"}
    with pytest.raises(SettingsError, match=r"29 sessions are wanted.*there are 28"):
        dealt(sets, (1, 4, 8), 5, lambda p: 1, 10, [])
