"""The prompts of a serving benchmark: the same mix for every concurrency, no prompt twice.

A server's caches, vLLM's prefix cache and any suffix cache, remember what they served. A prompt
sent again at the next concurrency would find its own earlier answer there, and drafts copied from
it would be accepted whole. So each concurrency gets prompts of its own, from the same datasets in
the same proportions.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

from decoder.contracts.errors import SettingsError
from pipelines import workloads
from pipelines.prompts import Prompt, PromptSet

TokensOf = Callable[[Prompt], int]
"""Length of a prompt in the model's chat template; a ValueError says why there is none."""


def from_workloads(count: int, names: Sequence[str] = ()) -> list[PromptSet]:
    """``count`` held-out prompts of each of the project's own workloads, or of those named.

    Raises:
        SettingsError: an unknown workload.
    """
    if unknown := [name for name in names if name not in workloads.WORKLOADS]:
        known = ", ".join(workloads.WORKLOADS)
        raise SettingsError(f"no workload {', '.join(unknown)}: choose from {known}.")
    return [
        PromptSet(
            name,
            name,
            tuple(
                Prompt(p.id, name, name, p.messages)
                for p in itertools.islice(workloads.prompts(name), count)
            ),
        )
        for name in names or workloads.WORKLOADS
    ]


def dealt(
    sets: Iterable[PromptSet],
    levels: int,
    limit: int,
    tokens_of: TokensOf,
    max_tokens: int,
    problems: list[str],
) -> list[list[Prompt]]:
    """``levels`` disjoint lists of ``limit`` prompts each, datasets in turn, alike in every list.

    Prompts longer than ``max_tokens`` are left out; a dataset that runs out is passed over from
    then on. Both are said in ``problems``, which grows.

    Raises:
        SettingsError: too few prompts for one each.
    """
    long: dict[str, list[str]] = {}
    streams = {s.name: _fitting(s, tokens_of, max_tokens, problems, long) for s in sets}
    hands: list[list[Prompt]] = [[] for _ in range(levels)]
    while streams and len(hands[0]) < limit:
        for name in list(streams)[: limit - len(hands[0])]:
            group = list(itertools.islice(streams[name], levels))
            if len(group) < levels:
                del streams[name]
                continue
            for hand, prompt in zip(hands, group, strict=True):
                hand.append(prompt)
    problems += [
        f"dataset {name!r}: left out for more than --max-prompt-tokens {max_tokens}: {len(ids)}, "
        f"{ids[0]!r} the first."
        for name, ids in long.items()
    ]
    if not hands[0]:
        raise SettingsError(
            f"the prompts do not go round: {levels} concurrencies need at least one each of no "
            f"more than {max_tokens} tokens. Name more files, or raise --max-prompt-tokens."
        )
    if len(hands[0]) < limit:
        problems.append(f"only {len(hands[0])} of {limit} prompts for each concurrency.")
    return hands


def _fitting(
    of: PromptSet,
    tokens_of: TokensOf,
    max_tokens: int,
    problems: list[str],
    long: dict[str, list[str]],
) -> Iterator[Prompt]:
    for prompt in of.prompts:
        try:
            length = tokens_of(prompt)
        except ValueError as error:
            problems.append(f"dataset {of.name!r}, prompt {prompt.id!r} left out: {error}.")
            continue
        if length <= max_tokens:
            yield prompt
        else:
            long.setdefault(of.name, []).append(prompt.id)
