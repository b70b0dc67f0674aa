"""Scripts of sessions: what an agent platform sends, turn by turn, and where the model answers.

A script is a prompt whose assistant messages mark where the server answers; what they hold is not
sent. The project's own, by kind:

========  ==========================================================================
kind      turns
========  ==========================================================================
edits     a file is shown, a whole file is wanted back; tests run, other files come
tools     a tool returns records, they are wanted in another form; more records come
docs      pages of documentation come, are quoted, compared and summarised
code      functions are described and to be written; tests run, then tests are wanted
========  ==========================================================================
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from decoder.contracts.errors import SettingsError
from pipelines.bench.serve import prompts as serve_prompts
from pipelines.bench.serve.load import turns
from pipelines.bench.serve.prompts import TokensOf
from pipelines.bench.sessions.kinds import KINDS, Talk
from pipelines.prompts import Message, Prompt, PromptSet, read_folder
from pipelines.workloads import standard_library_functions

ANSWERED: Final[Message] = {"role": "assistant", "content": ""}


def scripts(kind: str, count_turns: int, seed: int = 42) -> Iterator[Prompt]:
    """Endless stream of scripts of one kind; the same arguments give the same stream.

    Raises:
        SettingsError: ``kind`` is not one of :data:`KINDS`.
    """
    if kind not in KINDS:
        raise SettingsError(f"no sessions {kind!r}: choose from {', '.join(KINDS)}.")
    made, rng = KINDS[kind], random.Random(f"sessions/{kind}/{seed}")
    functions = standard_library_functions("heldout")
    for index in itertools.count():
        talk = Talk(rng, functions, [])
        # beyond what there is to ask, it is asked again, of other files and results
        further = itertools.cycle(rng.sample(made.further, len(made.further)))
        messages: list[Message] = [{"role": "system", "content": made.system}]
        for text in (made.opening, *itertools.islice(further, count_turns - 1)):
            messages += [{"role": "user", "content": text(talk)}, ANSWERED]
        yield Prompt(f"{kind}-{seed}-{index}", kind, "sessions", tuple(messages[:-1]))


def own(count: int, count_turns: int, kinds: Sequence[str] = ()) -> list[PromptSet]:
    """``count`` scripts of each kind, or of those named.

    Raises:
        SettingsError: an unknown kind.
    """
    return [
        PromptSet(kind, "sessions", tuple(itertools.islice(scripts(kind, count_turns), count)))
        for kind in kinds or KINDS
    ]


def cut(prompt: Prompt, count_turns: int) -> Prompt:
    """``prompt`` up to the question of its last turn, and with ``count_turns`` at most.

    Answers of others are emptied: they are not sent.
    """
    messages: list[Message] = []
    for said in turns(prompt)[:count_turns]:
        messages += [*said, ANSWERED]
    return replace(prompt, messages=tuple(messages[:-1]))


def read(
    folder: Path, count_turns: int, names: Sequence[str], problems: list[str]
) -> list[PromptSet]:
    """Anybody's scripts, recorded conversations for instance, cut to ``count_turns``.

    Raises:
        SettingsError: see :func:`pipelines.prompts.read_folder`.
    """
    return [
        replace(found, prompts=tuple(cut(p, count_turns) for p in found.prompts if turns(p)))
        for found in read_folder(folder, names, problems)
    ]


def dealt(
    sets: Sequence[PromptSet],
    levels: Sequence[int],
    limit: int,
    tokens_of: TokensOf,
    max_tokens: int,
    problems: list[str],
) -> tuple[tuple[Prompt, ...], ...]:
    """Disjoint scripts for each of ``levels``: ``limit``, or two for each session under way.

    With fewer than that a concurrency is never full for long: the last sessions end alone.

    Raises:
        SettingsError: there are not as many.
    """
    wanted = [max(limit, 2 * level) for level in levels]
    (hand,) = serve_prompts.dealt(sets, 1, sum(wanted), tokens_of, max_tokens, problems)
    if len(hand) < sum(wanted):
        raise SettingsError(
            f"{sum(wanted)} sessions are wanted, two at least for each at a time, and there are "
            f"{len(hand)}: give more scripts, or a lower --concurrency or --limit."
        )
    rest = iter(hand)
    return tuple(tuple(itertools.islice(rest, size)) for size in wanted)
