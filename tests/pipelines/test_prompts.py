"""Benchmark prompts: what is read, what is left out and in which words, and what fits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipelines.prompts import Prompt, TokenPrompt, fit, read_folder, tokenise

MESSAGE = {"role": "user", "content": "Name three rivers."}


def folder_of(tmp_path: Path, **files: list[Any]) -> Path:
    """``tmp_path`` with one file a dataset; text goes in as it is, anything else as JSON."""
    for name, lines in files.items():
        text = "\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines)
        (tmp_path / f"{name}.jsonl").write_text(text + "\n", encoding="utf-8")
    return tmp_path


def prompt(text: str = "Name three rivers.") -> Prompt:
    return Prompt("p", "set", "code", ({"role": "user", "content": text},))


class LetterTokenizer:
    """One token a letter; the template puts 1 in front and 2 behind."""

    chat_template: str | None = "a template"

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) for c in text]}

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> list[int]:
        if messages[0]["role"] not in ("system", "user"):
            raise RuntimeError("Conversations begin with the user")
        return [1, *(ord(c) for m in messages for c in m["content"]), 2]


GOOD = {"id": "a", "messages": [MESSAGE]}
BAD = [
    ("{not json", "Expecting"),
    ([1, 2], "not a JSON object"),
    ({"id": "b"}, "no list of messages"),
    ({"id": "c", "messages": [{"role": "user", "content": 7}]}, "role and a content"),
    ({"id": "d", "messages": [{"role": "user", "content": "  "}]}, "prompt is empty"),
    (GOOD, "was there before"),
]


def test_each_bad_line_is_one_sentence_with_file_and_line(tmp_path: Path) -> None:
    lines = [GOOD, *(line for line, _ in BAD), "", {**GOOD, "id": "e"}]
    folder = folder_of(tmp_path, mixed=lines)
    with (folder / "mixed.jsonl").open("ab") as file:
        file.write(b"\xff\xfe\n")  # bytes that are no text
    problems: list[str] = []
    (found,) = read_folder(folder, (), problems)
    assert [p.id for p in found.prompts] == ["a", "e"]
    expected = [*((n, words) for n, (_, words) in enumerate(BAD, 2)), (10, "skipped")]
    for problem, (number, words) in zip(problems, expected, strict=True):
        assert problem.startswith(f"{folder}/mixed.jsonl:{number} ") and problem.endswith(".")
        assert words in problem


def test_a_template_says_what_it_refuses_and_without_one_text_is_plain() -> None:
    tokenizer = LetterTokenizer()
    assert tokenise(prompt("ab"), tokenizer).ids == (1, 97, 98, 2)
    odd = Prompt("p", "set", "code", ({"role": "tool", "content": "x"},))
    with pytest.raises(ValueError, match="template refuses it: Conversations"):
        tokenise(odd, tokenizer)
    tokenizer.chat_template = None
    assert tokenise(prompt("ab"), tokenizer).ids == (97, 98)


def test_a_prompt_too_long_is_skipped_or_cut_in_its_middle_and_never_to_nothing() -> None:
    given = TokenPrompt(prompt(), tuple(range(10)))
    assert fit(given, 10, "skip") is given
    with pytest.raises(ValueError, match="10 tokens are more than the 5"):
        fit(given, 5, "skip")
    assert fit(given, 5, "truncate").ids == (0, 1, 7, 8, 9)
    with pytest.raises(ValueError, match="more than the 0"):
        fit(given, -4, "truncate")
