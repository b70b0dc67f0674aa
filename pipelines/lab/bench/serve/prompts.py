"""The prompts of a serving benchmark: the same mix for every concurrency, no prompt twice.

A server's caches, vLLM's prefix cache and any suffix cache, remember what they served. A prompt
sent again at the next concurrency would find its own earlier answer there, and drafts copied from
it would be accepted whole. So each concurrency gets prompts of its own, from the same datasets in
the same proportions.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from decoder.contracts.errors import SettingsError
from pipelines import workloads
from pipelines.lab.bench.serve.load import turns
from pipelines.prompts import Message, Prompt, PromptSet, fitting, read_folder

FURTHER: Final = (
    "Result of run_tests: 1 failed. Correct what you wrote last and return the whole of it.",
    "Result of run_tests: 3 passed. Explain what you wrote last, line by line. Quote each line.",
    "Compare all that you were shown so far in a list, with quotes.",
)
"""What goes on with the answer before: every other turn of the project's own sessions."""
ANSWER: Final = {"role": "assistant", "content": ""}
"""Marks where the server answers."""


@dataclass(frozen=True)
class Selection:
    """The prompts that are wanted, of ``room`` tokens at most; ``turns`` 0 are single requests."""

    folder: Path | None
    concurrency: Sequence[int]
    limit: int
    room: int
    turns: int


def from_workloads(
    count: int, names: Sequence[str] = workloads.WORKLOADS, most: int = 0
) -> list[PromptSet]:
    """``count`` held-out prompts of each of the project's own workloads.

    Or as many sessions of ``most`` turns, which are what an agent platform sends: every other turn
    brings another file, list of tools or page, the one after it goes on with the answer.
    """
    made = []
    for name in names:
        news, further = workloads.prompts(name), itertools.cycle(FURTHER)
        prompts = []
        for index in range(count):
            said = [
                [{"role": "user", "content": next(further)}] if turn % 2 else next(news).messages
                for turn in range(max(most, 1))
            ]
            prompts.append(Prompt(f"{name}-{index}", name, name, _scripted(said)))
        made.append(PromptSet(name, name, tuple(prompts)))
    return made


def cut(found: PromptSet, most: int) -> PromptSet:
    """Anybody's conversations as sessions of ``most`` turns at most; their answers are not sent.

    What asks nothing is left out.
    """
    kept = []
    for prompt in found.prompts:
        script = (ANSWER if m["role"] == "assistant" else m for m in prompt.messages)
        if said := turns(replace(prompt, messages=tuple(script)))[:most]:
            kept.append(replace(prompt, messages=_scripted(said)))
    return replace(found, prompts=tuple(kept))


def _scripted(said: Sequence[Sequence[Message]]) -> tuple[Message, ...]:
    return tuple(m for turn in said for m in (*turn, ANSWER))[:-1]


def levels(
    wanted: Selection, model: str, problems: list[str]
) -> tuple[tuple[int, tuple[Prompt, ...]], ...]:
    """Each concurrency with its prompts, as long as the tokenizer of ``model`` says.

    What is left out becomes a sentence in ``problems``.

    Raises:
        SettingsError: there are too few.
    """
    from transformers import AutoTokenizer

    # with fewer than two each a concurrency is never full for long: the last ones end alone
    least = 2 * max(wanted.concurrency) if wanted.turns else 1
    count, hands = max(wanted.limit, least), len(wanted.concurrency)
    if wanted.folder is not None:
        sets = list(read_folder(wanted.folder, (), problems))
        sets = [cut(s, wanted.turns) for s in sets] if wanted.turns else sets
    else:
        sets = from_workloads(count * hands, most=wanted.turns)
    tokenizer = AutoTokenizer.from_pretrained(model)

    def fits(found: PromptSet) -> Iterator[Prompt]:
        usable = fitting(found, tokenizer, wanted.room, "skip", problems.append)
        return (made.prompt for made in usable)

    dealt = deal([fits(found) for found in sets], hands, count)
    held = len(dealt[0]) if dealt else 0
    if held < least:
        raise SettingsError(
            f"{held} prompts for each concurrency are too few: it takes one, of sessions two for "
            f"each at a time. {' '.join(problems[:3])}"
        )
    if held < count:
        problems.append(f"only {held} of {count} prompts for each concurrency.")
    return tuple(zip(wanted.concurrency, dealt, strict=True))


def deal(sets: Sequence[Iterator[Prompt]], hands: int, count: int) -> list[tuple[Prompt, ...]]:
    """``count`` disjoint prompts, or what there are, for each of so many hands, datasets in turn.

    A dataset that runs out is passed over from then on.
    """
    rows = itertools.zip_longest(*(zip(*[found] * hands, strict=False) for found in sets))
    groups = (group for row in rows for group in row if group is not None)
    return list(zip(*itertools.islice(groups, count), strict=True))
