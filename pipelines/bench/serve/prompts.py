"""The prompts of a serving benchmark: the same mix for every concurrency, no prompt twice.

A server's caches, vLLM's prefix cache and any suffix cache, remember what they served. A prompt
sent again at the next concurrency would find its own earlier answer there, and drafts copied from
it would be accepted whole. So each concurrency gets prompts of its own, from the same datasets in
the same proportions.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from decoder.contracts.errors import SettingsError
from pipelines import workloads
from pipelines.prompts import Prompt, PromptSet


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


def dealt(
    streams: Mapping[str, Iterator[Prompt]], wanted: Sequence[int]
) -> list[tuple[Prompt, ...]]:
    """Disjoint prompts, as many as ``wanted`` for each concurrency, datasets in turn in each.

    A dataset that runs out is passed over from then on.
    """
    left = dict(streams)
    hands: list[list[Prompt]] = [[] for _ in wanted]
    while left:
        for name in list(left):
            open_to = [h for h, n in zip(hands, wanted, strict=True) if len(h) < n]
            if not open_to:
                return [tuple(hand) for hand in hands]
            group = list(itertools.islice(left[name], len(open_to)))
            if len(group) < len(open_to):
                del left[name]
                continue
            for hand, prompt in zip(open_to, group, strict=True):
                hand.append(prompt)
    return [tuple(hand) for hand in hands]
