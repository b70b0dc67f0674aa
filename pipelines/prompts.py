"""Prompts: reading them from JSON Lines, and tokenising them.

A folder has one file for each dataset, ``<dataset>.jsonl``. A line is an object with ``messages``
(a list of ``role`` and ``content``) and optional ``id`` and ``family``. Problems with a line, file
or name become sentences in ``problems``; the rest is read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from decoder.contracts.errors import SettingsError

Message = dict[str, str]
TooLong = Literal["skip", "truncate"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt. ``id`` is unique within its dataset."""

    id: str
    dataset: str
    family: str
    messages: tuple[Message, ...]

    @property
    def text(self) -> str:
        """All messages as plain text."""
        return "\n\n".join(m["content"] for m in self.messages)


@dataclass(frozen=True)
class PromptSet:
    """The prompts of one dataset, in order."""

    name: str
    family: str
    prompts: tuple[Prompt, ...]


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """A prompt as token ids of the target."""

    prompt: Prompt
    ids: tuple[int, ...]


def read_folder(folder: Path, names: Sequence[str], problems: list[str]) -> Iterator[PromptSet]:
    """The prompt sets of ``folder``, or those in ``names``.

    Raises:
        SettingsError: there is no such folder, or it has no ``.jsonl`` file.
    """
    files = {path.stem: path for path in sorted(folder.glob("*.jsonl"))}
    if not files:
        what = "holds no *.jsonl file" if folder.is_dir() else "is not a folder"
        raise SettingsError(f"prompts: {folder} {what}; give one with <dataset>.jsonl files.")
    for name in names:
        if name not in files:
            problems.append(f"dataset {name!r} left out: there is no {folder / name}.jsonl.")
    for name, path in files.items():
        if not names or name in names:
            prompts = read_file(path, problems)
            if prompts is not None:
                yield prompts


def read_file(path: Path, problems: list[str]) -> PromptSet | None:
    """The prompts of one file; None if none is usable."""
    prompts: dict[str, Prompt] = {}
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        problems.append(f"dataset {path.stem!r} left out: {path} cannot be read: {error}.")
        return None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            prompt = parse(json.loads(line), path.stem, number)
            if prompt.id in prompts:
                raise ValueError(f"the id {prompt.id!r} was there before")
        except ValueError as error:  # JSON and UTF-8 errors are ValueErrors
            problems.append(f"{path}:{number} skipped: {error}.")
            continue
        prompts[prompt.id] = prompt
    if not prompts:
        problems.append(f"dataset {path.stem!r} left out: {path} holds no usable prompt.")
        return None
    family = next(iter(prompts.values())).family
    return PromptSet(path.stem, family, tuple(prompts.values()))


def parse(record: Any, dataset: str, number: int) -> Prompt:
    """A prompt from one decoded line.

    Raises:
        ValueError: with what is missing or of the wrong type.
    """
    if not isinstance(record, dict):
        raise ValueError("not a JSON object")
    messages = record.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ValueError("it has no list of messages")
    for message in messages:
        sound = isinstance(message, dict) and all(
            isinstance(message.get(key), str) for key in ("role", "content")
        )
        if not sound:
            raise ValueError("a message is not an object with a role and a content of text")
    if not any(m["content"].strip() for m in messages):
        raise ValueError("the prompt is empty")
    return Prompt(
        id=str(record.get("id") or f"{dataset}/{number}"),
        dataset=dataset,
        family=str(record.get("family") or "other"),
        messages=tuple({"role": m["role"], "content": m["content"]} for m in messages),
    )


def tokenise(prompt: Prompt, tokenizer: Any) -> TokenPrompt:
    """``prompt`` as token ids, by the target's chat template, or as plain text without one.

    Raises:
        ValueError: the template refuses these messages, or the result is empty.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        ids = tokenizer(prompt.text)["input_ids"]
    else:
        try:
            ids = tokenizer.apply_chat_template(
                list(prompt.messages), add_generation_prompt=True, return_dict=False
            )
        except Exception as error:  # templates raise errors of many types
            raise ValueError(f"the chat template refuses it: {error}") from error
    if not ids:
        raise ValueError("the prompt is empty")
    return TokenPrompt(prompt, tuple(int(i) for i in ids))


def fit(prompt: TokenPrompt, budget: int, too_long: TooLong) -> TokenPrompt:
    """``prompt`` cut to ``budget`` tokens. Truncation removes the middle; the instruction and the
    end of the template stay, as LongBench does.

    Raises:
        ValueError: it is longer, and ``too_long`` is "skip".
    """
    length = len(prompt.ids)
    if length <= budget:
        return prompt
    if too_long == "skip" or budget < 2:
        raise ValueError(
            f"its {length} tokens are more than the {max(budget, 0)} there is budget for"
        )
    head = budget // 2
    ids = prompt.ids[:head] + prompt.ids[length - (budget - head) :]
    return replace(prompt, ids=ids)


def fitting(
    prompts: PromptSet,
    tokenizer: Any,
    budget: int,
    too_long: TooLong,
    problem: Callable[[str], None],
) -> Iterator[TokenPrompt]:
    """The prompts of a set that can be tokenised and fit into ``budget`` tokens, in order.

    Args:
        problem: called with a sentence for each unusable prompt, and at the end with the number of
            prompts that were too long.
    """
    longer = 0
    try:
        for prompt in prompts.prompts:
            try:
                read = tokenise(prompt, tokenizer)
            except ValueError as error:
                problem(f"{prompts.name}: prompt {prompt.id} skipped: {error}.")
                continue
            try:
                fitted = fit(read, budget, too_long)
            except ValueError:
                longer += 1
                continue
            yield fitted
    finally:
        if longer:
            problem(f"{prompts.name}: prompts of more than {budget} tokens, left out: {longer}.")
