"""Sessions: what an agent platform sends, turn by turn, and where the model answers.

A session is a prompt whose assistant messages mark where the server answers; what they hold is not
sent. The project's own are made of its held-out workloads: every other turn brings another file,
list of tools or page; the one after it asks for more of what was answered.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from decoder.contracts.errors import SettingsError
from pipelines import workloads
from pipelines.bench.serve.load import turns
from pipelines.prompts import Message, Prompt, PromptSet

ANSWERED: Final[Message] = {"role": "assistant", "content": ""}
FURTHER: Final = {
    "edits": (
        "Result of run_tests: 1 failed. Correct what you wrote last. Return the whole function.",
        "Result of run_tests: 3 passed. Add a comment above each statement of what you wrote last.",
    ),
    "tools": (
        "Result: ok. Write all calls so far as one JSON list, each with an 'id' that counts.",
        "Result: ok. Return all calls so far as a Markdown table, one row for each argument.",
    ),
    "qa": (
        "Which functions of all pages so far are alike? Compare them in a list, with quotes.",
        "Write a summary of all pages so far, then a question and answer on each function.",
    ),
    "code": (
        "Result of run_tests: no tests ran. Write unit tests for every function so far.",
        "Explain the code you wrote last to a reviewer, line by line. Quote each line.",
    ),
}
"""By workload: what goes on with the answer before."""


def own(count: int, count_turns: int, kinds: Sequence[str] = ()) -> list[PromptSet]:
    """``count`` sessions of each kind, or of those named; the same arguments give the same ones.

    Raises:
        SettingsError: an unknown kind.
    """
    if unknown := [kind for kind in kinds if kind not in FURTHER]:
        raise SettingsError(f"no sessions {', '.join(unknown)}: choose from {', '.join(FURTHER)}.")
    return [
        PromptSet(kind, "sessions", tuple(itertools.islice(_scripts(kind, count_turns), count)))
        for kind in kinds or FURTHER
    ]


def _scripts(kind: str, count_turns: int) -> Iterator[Prompt]:
    rng, news = random.Random(f"sessions/{kind}"), workloads.prompts(kind)
    for index in itertools.count():
        messages: list[Message] = []
        for turn in range(count_turns):
            if turn % 2:
                said: Sequence[Message] = [{"role": "user", "content": rng.choice(FURTHER[kind])}]
            else:
                said = next(news).messages
            messages += [*said, ANSWERED]
        yield Prompt(f"{kind}-{index}", kind, "sessions", tuple(messages[:-1]))


def cut(found: PromptSet, count_turns: int) -> PromptSet:
    """Anybody's conversations as sessions: up to the question of the last of ``count_turns``.

    Answers of others are emptied: they are not sent. What asks nothing is left out.
    """
    made = []
    for prompt in found.prompts:
        messages: list[Message] = []
        for said in turns(prompt)[:count_turns]:
            messages += [*said, ANSWERED]
        if messages:
            made.append(replace(prompt, messages=tuple(messages[:-1])))
    return replace(found, prompts=tuple(made))
