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


def from_workloads(count: int, names: Sequence[str] = ()) -> list[PromptSet]:
    """``count`` held-out prompts of each of the project's own workloads, or of those named.

    Raises:
        SettingsError: an unknown workload.
    """
    if unknown := [name for name in names if name not in workloads.WORKLOADS]:
        known = ", ".join(workloads.WORKLOADS)
        raise SettingsError(f"no workload {', '.join(unknown)}: choose from {known}.")
    made = []
    for name in names or workloads.WORKLOADS:
        found = itertools.islice(workloads.prompts(name), count)
        prompts = tuple(Prompt(p.id, name, name, p.messages) for p in found)
        made.append(PromptSet(name, name, prompts))
    return made


def sessions(count: int, count_turns: int, names: Sequence[str] = ()) -> list[PromptSet]:
    """``count`` sessions of each workload: what an agent platform sends, turn by turn.

    Every other turn brings another file, list of tools or page, the one after it goes on with the
    answer. An assistant's message marks where the server answers; what it holds is not sent.

    Raises:
        SettingsError: an unknown workload.
    """
    made = []
    for found in from_workloads(count * -(-count_turns // 2), names):
        news, further = iter(found.prompts), itertools.cycle(FURTHER)
        prompts = []
        for index in range(count):
            asks = [
                [{"role": "user", "content": next(further)}] if turn % 2 else next(news).messages
                for turn in range(count_turns)
            ]
            messages = _scripted(asks)
            prompts.append(Prompt(f"{found.name}-{index}", found.name, "sessions", messages))
        made.append(replace(found, prompts=tuple(prompts)))
    return made


def cut(found: PromptSet, count_turns: int) -> PromptSet:
    """Anybody's conversations as sessions of ``count_turns`` at most; their answers are not sent.

    What asks nothing is left out.
    """
    kept = [(p, asks[:count_turns]) for p in found.prompts if (asks := turns(p))]
    return replace(found, prompts=tuple(replace(p, messages=_scripted(a)) for p, a in kept))


def _scripted(asks: Sequence[Sequence[Message]]) -> tuple[Message, ...]:
    messages = [m for said in asks for m in (*said, {"role": "assistant", "content": ""})]
    return tuple(messages[:-1])


@dataclass(frozen=True)
class Asked:
    """The prompts that are wanted, of ``room`` tokens at most; ``turns`` 0 are single requests."""

    folder: Path | None
    names: Sequence[str]
    concurrency: Sequence[int]
    limit: int
    room: int
    turns: int


def levels(
    asked: Asked, model: str, problems: list[str]
) -> tuple[tuple[int, tuple[Prompt, ...]], ...]:
    """Each concurrency with its prompts, as long as the tokenizer of ``model`` says.

    What is left out becomes a sentence in ``problems``.

    Raises:
        SettingsError: there are too few.
    """
    from transformers import AutoTokenizer

    # with fewer than two each a concurrency is never full for long: the last ones end alone
    wanted = [max(asked.limit, 2 * n if asked.turns else 0) for n in asked.concurrency]
    if asked.folder is not None:
        sets = list(read_folder(asked.folder, asked.names, problems))
        sets = [cut(s, asked.turns) for s in sets] if asked.turns else sets
    elif asked.turns:
        sets = sessions(sum(wanted), asked.turns, asked.names)
    else:
        sets = from_workloads(sum(wanted), asked.names)
    tokenizer = AutoTokenizer.from_pretrained(model)

    def fits(found: PromptSet) -> Iterator[Prompt]:
        usable = fitting(found, tokenizer, "chat", asked.room, "skip", problems.append)
        return (made.prompt for made in usable)

    hands = dealt([fits(found) for found in sets], wanted)
    for at_once, hand, count in zip(asked.concurrency, hands, wanted, strict=True):
        if len(hand) < count:
            problems.append(f"only {len(hand)} of {count} prompts for {at_once} at a time.")
        if len(hand) < max(1, 2 * at_once * bool(asked.turns)):
            raise SettingsError(
                f"{len(hand)} prompts for {at_once} at a time are too few: it takes one, of "
                f"sessions two for each at a time. {' '.join(problems[:3])}"
            )
    return tuple(zip(asked.concurrency, hands, strict=True))


def dealt(sets: Sequence[Iterator[Prompt]], wanted: Sequence[int]) -> list[tuple[Prompt, ...]]:
    """Disjoint prompts, as many as ``wanted`` for each concurrency, datasets in turn in each.

    A dataset that runs out is passed over from then on.
    """
    left, hands = list(sets), [list[Prompt]() for _ in wanted]
    while left:
        for found in list(left):
            open_to = [h for h, n in zip(hands, wanted, strict=True) if len(h) < n]
            if not open_to:
                return [tuple(hand) for hand in hands]
            group = list(itertools.islice(found, len(open_to)))
            if len(group) < len(open_to):
                left.remove(found)
                continue
            for hand, prompt in zip(open_to, group, strict=True):
                hand.append(prompt)
    return [tuple(hand) for hand in hands]
