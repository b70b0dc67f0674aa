"""What each configuration of the matrix is asked: requests of every kind, in one fixed order."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Final

from pipelines.embedded import SERVED_NAME
from pipelines.workloads import prompts

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
CONTEXT: Final = 512
"""Tokens of the servers' context."""
LONG_ID: Final = 8192
"""Characters."""
SHORT_PROMPT: Final = 700
"""Characters."""

SCHEMA: Final = {
    "type": "object", "required": ["name", "age", "tags"], "additionalProperties": False,
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
    },
}  # fmt: skip
_PATH: Final = {
    "type": "object", "required": ["path"], "additionalProperties": False,
    "properties": {"path": {"type": "string", "maxLength": 24}},
}  # fmt: skip
_READ: Final = {"name": "read_file", "description": "Reads a file.", "strict": True}
TOOL: Final = {"type": "function", "function": {**_READ, "parameters": _PATH}}


@dataclass(frozen=True)
class Ask:
    """One request.

    ``exact``: its tokens must be plain vLLM's. ``leaves_after``: pieces read before the client goes
    away. ``headers`` and ``body`` are sent as they are.
    """

    name: str
    body: dict[str, Any]
    path: str = CHAT
    exact: bool = True
    leaves_after: int | None = None
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """The part of the name before the number."""
        return self.name.rpartition("-")[0]


def everything() -> list[Ask]:
    """All asks, at least sixty, mixed in one order that never changes."""
    made = [a for make in KINDS for a in make()]
    random.Random(7).shuffle(made)
    return made


def without_speculation(ask: Ask) -> Ask:
    """The same, decoded by the target alone."""
    arguments = {**ask.body.get("vllm_xargs", {}), "hvd_speculate": "off"}
    return replace(ask, body={**ask.body, "vllm_xargs": arguments})


def without_seed(ask: Ask) -> Ask:
    """The same, drawn with the server's own numbers."""
    return replace(ask, body={name: value for name, value in ask.body.items() if name != "seed"})


def _talk(text: str, max_tokens: int, **further: Any) -> dict[str, Any]:
    return _chat([{"role": "user", "content": text}], max_tokens, **further)


def _chat(messages: list[dict[str, str]], max_tokens: int, **further: Any) -> dict[str, Any]:
    body = {"model": SERVED_NAME, "messages": messages, "max_tokens": max_tokens}
    return {**body, "temperature": 0, "return_token_ids": True, **further}


def _plain(prompt: str | list[str], max_tokens: int, **further: Any) -> dict[str, Any]:
    body = {"model": SERVED_NAME, "prompt": prompt, "max_tokens": max_tokens}
    return {**body, "temperature": 0, "return_token_ids": True, **further}


def _of(workload: str, count: int) -> list[list[dict[str, str]]]:
    """Messages of the first short prompts of a workload."""
    short = (
        list(p.messages)
        for p in prompts(workload)
        if sum(len(m["content"]) for m in p.messages) <= SHORT_PROMPT
    )
    return list(itertools.islice(short, count))


def _copies() -> Iterator[Ask]:
    """Rewrite a function: long cache drafts."""
    for i, messages in enumerate(_of("edits", 10)):
        yield Ask(f"copy-{i}", _chat(messages, 48, vllm_xargs={"hvd_workload": "edits"}))


def _free() -> Iterator[Ask]:
    """Talk: few cache drafts."""
    for i, messages in enumerate(_of("chat", 5)):
        yield Ask(f"free-{i}", _chat(messages, 32))


def _stops() -> Iterator[Ask]:
    edits, chats = _of("edits", 4), _of("chat", 3)
    further: list[dict[str, Any]] = [
        {"stop": ["return", "\n\n\n"]}, {"stop": [":"], "include_stop_str_in_output": True},
        {"stop": ["self", "("]}, {"stop": ["```"]}, {"stop": [".", "!"]}, {"stop": [" the"]},
        {"stop_token_ids": [30, 28]},
    ]  # fmt: skip
    for i, (messages, how) in enumerate(zip(edits + chats, further, strict=True)):
        yield Ask(f"stop-{i}", _chat(messages, 40, **how))


def _penalties() -> Iterator[Ask]:
    further: list[dict[str, Any]] = [
        {"repetition_penalty": 1.2}, {"presence_penalty": 0.5, "frequency_penalty": 0.5},
        {"bad_words": ["the", " a"]}, {"min_tokens": 20, "ignore_eos": True},
    ]  # fmt: skip
    for i, (messages, how) in enumerate(zip(_of("edits", 4), further, strict=True)):
        yield Ask(f"penalty-{i}", _chat(messages, 32, **how))


def _edges() -> Iterator[Ask]:
    """Every one twice: the second has drafts of the first one's text.

    None has a budget for thinking: plain vLLM holds others to it that come into its place.
    """
    repeats = {"max_pattern_size": 8, "min_pattern_size": 1, "min_count": 2}
    further: list[dict[str, Any]] = [
        {"stop_token_ids": [198, 30, 28, 282], "min_tokens": 7},
        {"stop_token_ids": [198, 30, 28, 282], "min_tokens": 12},
        {"stop": [":", "\n", "."], "min_tokens": 9, "logprobs": True, "top_logprobs": 1},
        {"bad_words": ["def", "return self", " the same", "in a"]},
        {"allowed_token_ids": list(range(0, 6000))},
        {"repetition_detection": repeats},
        {"max_tokens": 1},
    ]
    found = _of("edits", 5) + _of("chat", 2)
    for i, (messages, how) in enumerate(zip(found * 2, further * 2, strict=True)):
        yield Ask(f"edge-{i}", _chat(messages, **{"max_tokens": 32, **how}))


def _certain() -> Iterator[Ask]:
    """Sampling that leaves one choice."""
    for i, messages in enumerate(_of("edits", 4)):
        one = {"temperature": 0.7, "top_k": 1, "n": 1 + 2 * (i % 2)}
        yield Ask(f"certain-{i}", _chat(messages, 24, **one))


def _samples() -> Iterator[Ask]:
    further: list[dict[str, Any]] = [
        {"temperature": 1.0},
        {"temperature": 0.8, "top_p": 0.9, "seed": 3},
        {"temperature": 0.8, "top_p": 0.9, "seed": 4, "n": 3},
        {"temperature": 1.3, "top_k": 4, "logprobs": True, "top_logprobs": 4},
        {"temperature": 0.6, "top_k": 4, "seed": 5, "logprobs": True, "top_logprobs": 4, "n": 2},
        {"temperature": 0.5, "repetition_penalty": 1.1},
        {"temperature": 2.0, "top_p": 0.5},
    ]
    for i, (messages, how) in enumerate(
        zip(_of("edits", 4) + _of("chat", 3), further, strict=True)
    ):
        yield Ask(f"sample-{i}", _chat(messages, 32, ignore_eos=True, **how), exact=False)


def _logprobs() -> Iterator[Ask]:
    for i, messages in enumerate(_of("edits", 3)):
        yield Ask(f"logprobs-{i}", _chat(messages, 32, logprobs=True, top_logprobs=3))
    text = "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return"
    yield Ask("logprobs-3", _plain(text, 32, logprobs=2), COMPLETIONS)
    yield Ask("logprobs-4", _plain(text, 16, prompt_logprobs=1, echo=True), COMPLETIONS)


def _structured() -> Iterator[Ask]:
    person = "Return JSON for a person named Ada, 36 years old, with the tags red and blue."
    schema = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
    yield Ask("structured-0", _talk(person, 64, response_format=schema))
    yield Ask("structured-1", _talk(person + " Again.", 64, response_format=schema))
    yield Ask("structured-2", _talk("Any JSON.", 32, response_format={"type": "json_object"}))
    regex = r"\d{4}-\d{2}-\d{2}( \d{4}-\d{2}-\d{2}){3}"
    yield Ask("structured-3", _talk("Four dates.", 64, structured_outputs={"regex": regex}))
    choice = ["certainly not", "certainly so"]
    yield Ask("structured-4", _talk("Yes or no?", 16, structured_outputs={"choice": choice}))
    tags = {
        "type": "structural_tag",
        "structures": [{"begin": "{", "schema": SCHEMA, "end": "."}],
        "triggers": ["{"],
    }
    yield Ask("structured-6", _talk(person, 48, response_format=tags))
    drawn = _talk(person, 64, response_format=schema, temperature=0.9, seed=1)
    yield Ask("structured-5", drawn, exact=False)


def _tools() -> Iterator[Ask]:
    named = {"type": "function", "function": {"name": "read_file"}}
    for i, choice in enumerate(("auto", "required", named, "required")):
        text = f"Read the file notes-{i}.txt, please."
        asked = _talk(text, 64, tools=[TOOL], tool_choice=choice)
        yield Ask(f"tools-{i}", asked)
        yield Ask(f"tools-{i + 4}", {**asked, "stream": True})


def _streams() -> Iterator[Ask]:
    for i, messages in enumerate(_of("edits", 2) + _of("chat", 1)):
        yield Ask(f"stream-{i}", _chat(messages, 32, stream=True))


def _leaves() -> Iterator[Ask]:
    """Readers who go away in the middle."""
    for i, messages in enumerate(_of("edits", 3) + _of("chat", 3)):
        body = _chat(messages, 160, stream=True, ignore_eos=True)
        yield Ask(f"leave-{i}", body, exact=False, leaves_after=2 + 2 * i)


def _ends() -> Iterator[Ask]:
    """Prompts of one-token words; the answer has no limit but the context."""
    for i, room in enumerate((5, 17, 40, 66, 90)):
        words = " one two three four" * (CONTEXT // 4)
        text = " ".join(words.split()[: CONTEXT - room])
        yield Ask(f"end-{i}", _plain(text, CONTEXT, ignore_eos=True), COMPLETIONS)


def _prefixes() -> Iterator[Ask]:
    page = _of("qa", 1)[0][0]["content"]
    ends = ("Quote the first line.", "Quote the last line.", "Repeat the page.", "Repeat the page.")
    for i, end in enumerate(ends):
        yield Ask(f"prefix-{i}", _talk(f"{page}\n\n{end}", 32))


def _batches() -> Iterator[Ask]:
    three = ["def first(a, b, c):\n", "one, two, three, one, two, three, one,", "The moon is"]
    yield Ask("batch-0", _plain(three, 24), COMPLETIONS)
    yield Ask("batch-1", _plain(three[1], 1), COMPLETIONS)


def _ids() -> Iterator[Ask]:
    copies, name = _of("edits", 5), "n" * LONG_ID
    named = {"hvd_tenant": name, "hvd_workload": name}
    yield Ask("ids-0", _chat(copies[0], 32, user=name), headers={"X-Request-Id": name})
    yield Ask("ids-1", _chat(copies[1], 32, vllm_xargs=named))
    yield Ask("ids-2", _chat(copies[2], 32, request_id=name, user=name))
    for i in (3, 4):
        yield Ask(f"ids-{i}", _chat(copies[i], 32), headers={"X-Request-Id": "the same"})


def _off() -> Iterator[Ask]:
    for i, messages in enumerate(_of("edits", 2)):
        yield without_speculation(Ask(f"off-{i}", _chat(messages, 32)))


def _refused() -> Iterator[Ask]:
    yield Ask("refused-0", _talk("too long " * CONTEXT, 8))
    schema = {"type": "json_schema", "json_schema": {"name": "bad", "schema": {"type": "nothing"}}}
    yield Ask("refused-1", _talk("Hello.", 8, response_format=schema))


KINDS: Final = (
    _copies, _free, _stops, _penalties, _edges, _certain, _samples, _logprobs, _structured, _tools,
    _streams, _leaves, _ends, _prefixes, _batches, _ids, _off, _refused,
)  # fmt: skip
