"""Reading traces: every kind of line, any tokenizer, and one sentence for what cannot be used."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from decoder.contracts.errors import TraceError
from pipelines.lab.replay.traces import Trace, conversation, read, split
from tests.pipelines.lab.replay.samples import word_tokenizer

TOKENIZER = word_tokenizer()
Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def written(*lines: Any, name: str = "t.jsonl") -> Path:
        texts = (line if isinstance(line, str) else json.dumps(line) for line in lines)
        (tmp_path / name).write_text("\n".join(texts) + "\n", encoding="utf-8")
        return tmp_path / name

    return written


def words(ids: Any, tokenizer: Any = TOKENIZER) -> str:
    return " ".join(tokenizer.convert_ids_to_tokens([int(i) for i in ids]))


def say(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def test_every_assistant_message_is_a_generation_after_all_before_it(write: Write) -> None:
    messages = [
        say("system", "a"), say("user", "b c"), say("assistant", "d e"), say("tool", "f"),
        say("assistant", "g"), say("user", "h"), say("assistant", "i j k"),
    ]  # fmt: skip
    found = read(write({"session": "talk", "messages": messages}), TOKENIZER)
    assert [words(t.output) for t in found.traces] == [
        "d e <|end|>", "g <|end|>", "i j k <|end|>",
    ]  # fmt: skip
    begun = "<|system|> a <|end|> <|user|> b c <|end|> <|assistant|>"
    assert words(found.traces[0].prompt) == begun
    assert words(found.traces[1].prompt) == f"{begun} d e <|end|> <|tool|> f <|end|> <|assistant|>"
    assert ({t.session for t in found.traces}, found.notices) == ({"talk"}, [])
    template = TOKENIZER.apply_chat_template(
        messages[:2], tokenize=False, add_generation_prompt=True
    )
    assert (
        found.traces[0].prompt.tolist()
        == TOKENIZER(template, add_special_tokens=False)["input_ids"]
    )


def test_a_prompt_with_its_output_and_token_ids(write: Write) -> None:
    path = write(
        {"id": "x", "prompt": [say("user", "a")], "output": "b c"},
        {"prompt": "red green", "output": "blue"},
        {"prompt": [5, 6], "output": [7, 8], "model_accepted": [0, 2], "max_tokens": 64},
    )
    one, two, three = read(path, TOKENIZER).traces
    assert (one.session, words(one.prompt)) == ("x", "<|user|> a <|end|> <|assistant|>")
    assert (words(one.output), one.model_accepted) == ("b c <|end|>", None)
    assert (words(two.prompt), words(two.output)) == ("red green", "blue <|end|>")
    assert (three.prompt.tolist(), three.output.tolist()) == ([5, 6], [7, 8])
    assert three.model_accepted is not None and list(three.model_accepted) == [0, 2]
    assert (two.session, three.session, three.allowed) == ("2", "3", 64)
    (only_ids,) = read(path, None).traces
    assert list(only_ids.output) == [7, 8], "it needs no tokenizer"
    # what a request may make does not tell how much it made
    path = write(*({"prompt": [5], "output": [6] * n} for n in (3, 1023, 1024, 1025, 3000)))
    assert [t.allowed for t in read(path, TOKENIZER).traces] == [1024, 1024, 2048, 2048, 4096]


def test_parts_of_text_and_tool_calls_are_text() -> None:
    call = {"type": "function", "function": {"name": "a", "arguments": "b"}}
    parts = [{"type": "text", "text": text} for text in ("a", " b")]
    asked = {"role": "user", "content": parts}
    answer = {"role": "assistant", "content": None, "tool_calls": [call]}
    made, generations = conversation({"messages": [asked, answer]})
    assert made[0]["content"] == "a b" and generations == [1]
    assert json.loads(made[1]["content"].split("\n")[1]) == call["function"]


TALK = {
    "messages": [say("user", "a"), say("assistant", "b"), say("user", "c"), say("assistant", "d")]
}


def test_a_template_that_rewrites_earlier_turns_is_followed(write: Write) -> None:
    template = (
        "{% for m in messages %}<|{{ m['role'] }}|>"
        "{% if m['role'] == 'assistant' and not loop.last %}?{% else %}{{ m['content'] }}"
        "{% endif %}"
        "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    tokenizer = word_tokenizer(template)
    found = read(write(TALK), tokenizer).traces
    assert [words(t.output) for t in found] == ["b <|end|>", "d <|end|>"]
    assert words(found[1].prompt).split()[3:6] == ["<|assistant|>", "?", "<|end|>"]


UNUSABLE = (
    "{not json", "[1, 2]", {"prompt": [5], "output": []}, {"messages": [say("user", "a")]},
    {"messages": [say("user", "a"), say("assistant", " ")]}, {"messages": [{"content": "a"}]},
    {"answer": 1}, {"prompt": [5], "output": [99999]},
    {"prompt": [5], "output": [6, 7], "model_accepted": [1]},
)  # fmt: skip


def test_what_cannot_be_used_is_one_sentence_with_file_and_line(write: Write) -> None:
    usable = {"prompt": [5], "output": [6]}
    path = write(usable, *UNUSABLE, "", usable)
    with path.open("ab") as file:
        file.write(b'{"prompt": "\xff\xfe", "output": "a"}\n')
    found = read(path, TOKENIZER)
    last = len(UNUSABLE) + 3
    assert [t.session for t in found.traces] == ["1", str(last)]
    left = [n.removeprefix(f"{path}:") for n in found.notices]
    assert [int(text.split(":")[0]) for text in left] == [*range(2, last - 1), last + 1]
    assert all(text.endswith(".") and "\n" not in text for text in left) and "UTF-8" in left[-1]
    with pytest.raises(TraceError, match="No such file"):
        read(path.with_name("none.jsonl"), TOKENIZER)


def test_generations_longer_than_the_context_are_counted_by_line(write: Write) -> None:
    messages = [say("user", "a")]
    for _ in range(5):
        messages += [say("assistant", "b c d"), say("user", "e")]
    path = write({"messages": messages[:-1]}, {"prompt": [5] * 30, "output": [6]})
    found = read(path, TOKENIZER, context=20)
    assert len(found.traces) == 2
    assert found.too_long == [
        f"{path}:1: 3 prompts with their outputs are longer than the context, 20.",
        f"{path}:2: prompt and output are longer than the context, 20.",
    ]
    assert len(read(path, TOKENIZER, context=1000).traces) == 6


def sessions(count: int, turns: int = 2) -> list[Trace]:
    return [Trace(f"s{i}", [1], [2]) for i in range(count) for _ in range(turns)]


def test_a_session_is_on_one_side_whatever_else_is_there_and_a_limit_takes_whole_ones() -> None:
    names = [{t.session for t in part} for part in split(sessions(400))]
    assert sum(map(len, names)) == 400
    assert [round(len(n) / 400, 1) for n in names] == [0.6, 0.1, 0.3]
    assert {t.session for t in split(sessions(10)).train} <= names[0]
    whole, some, more = (split(sessions(100), limit=n) for n in (None, 30, 60))
    assert list(map(len, some)) == [18, 4, 10]
    held = {t.session for t in some.train}
    assert some.train == [t for t in whole.train if t.session in held]
    assert held < {t.session for t in more.train}
