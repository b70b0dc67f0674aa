"""Lines of a trace file as text: what a model was shown, and what it wrote.

Three kinds of lines, each one JSON object:

``{"messages": [...]}``            every message of role ``assistant`` is a generation
``{"prompt": ..., "output": ""}``  one generation; the prompt is a list of messages, or text
``{"prompt": [ids], "output": [ids]}``   one generation in token ids, see ``traces``

``session`` (else ``id``) names what must not be parted between training and test.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

Message = dict[str, str]


@dataclass(frozen=True)
class Script:
    """Text in pieces, in order. Piece ``i`` in ``outputs`` was generated with all before it shown.

    ``whole`` says that the text begins a sequence as it is: the tokenizer's own beginning token,
    if it has one, is not in it yet.
    """

    pieces: list[str]
    outputs: list[int]
    whole: bool = False


def content_of(message: dict[str, Any]) -> Message:
    """Role and text of one message; text parts are joined, tool calls written as JSON.

    Raises:
        ValueError: no role, or contents that are not text.
    """
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise ValueError("a message has no role")
    if isinstance(content, list):
        content = "".join(str(part.get("text", "")) for part in content)
    if not isinstance(content or "", str):
        raise ValueError(f"a message of role {role} holds no text")
    calls = [call.get("function", call) for call in message.get("tool_calls") or ()]
    written = [f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls]
    return {"role": role, "content": "\n".join([*([content] if content else ()), *written])}


def conversation(record: dict[str, Any]) -> tuple[list[Message], list[int]]:
    """The messages of a line and the indexes of those that are generations.

    Raises:
        ValueError: the line is none of the kinds above.
    """
    if isinstance(record.get("messages"), list):
        messages = [content_of(m) for m in record["messages"]]
        return messages, [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    if not isinstance(record.get("prompt"), list) or not isinstance(record.get("output"), str):
        raise ValueError("neither messages nor a prompt with its output")
    messages = [content_of(m) for m in record["prompt"]]
    messages.append({"role": "assistant", "content": record["output"]})
    return messages, [len(messages) - 1]


def scripts(messages: list[Message], generations: list[int], tokenizer: Any) -> list[Script]:
    """The conversation as its chat template writes it: one script, or one for each generation.

    Rendering is repeated for every generation, tokenising is not.

    A template that changes earlier turns as a dialogue grows (dropping thoughts, say) gives one
    script a generation, which costs more to tokenise.

    Raises:
        ValueError: there is no template, or it refuses these roles.
    """
    from jinja2 import TemplateError

    def render(upto: int, prompt: bool) -> str:
        text = tokenizer.apply_chat_template(
            messages[:upto], tokenize=False, add_generation_prompt=prompt
        )
        return str(text)

    try:
        return _cut(messages, generations, render, tokenizer.eos_token or "")
    except TemplateError as error:
        raise ValueError(f"the chat template refuses it: {error}") from error


def _cut(messages: list[Message], generations: list[int], render: Any, end: str) -> list[Script]:
    prompts = [render(i, True) for i in generations]
    pieces: list[str] = []
    shown = ""
    followers = [*prompts[1:], render(generations[-1] + 1, False)] if generations else []
    for i, prompt, after in zip(generations, prompts, followers, strict=True):
        text = messages[i]["content"]
        if not after.startswith(prompt + text):
            text = text.strip()  # some templates do
        pieces += [prompt[len(shown) :], text]
        shown = prompt + text
        if not after.startswith(shown):
            return [
                Script([prompt, messages[i]["content"], end], [1])
                for i, prompt in zip(generations, prompts, strict=True)
            ]
    closing = followers[-1][len(shown) :] if followers else ""
    return [Script([*pieces, closing], list(range(1, len(pieces), 2)))]
