"""The oracle: what would have been decoded with every draft's end known beforehand.

A cycle at position ``p`` that accepts ``a`` draft tokens leads to ``p + a + 1``. Nothing is learned
on the way, so no router is needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from decoder.drafting.drafts import common_prefix
from decoder.drafting.suffix import SuffixCache
from decoder.policy.pricing import CostTable, Floats, part_of
from decoder.policy.rule import CACHE, MODEL, NONE
from decoder.settings import WorkerSettings
from pipelines.lab.replay.cycles import Cycle
from pipelines.lab.replay.dialogue import UNLIMITED, turns
from pipelines.lab.replay.model_arm import model_acceptance
from pipelines.lab.replay.traces import Trace


class Prices:
    """Time of a cycle by what it verifies: ``cache`` [tokens + 1], ``model`` [tokens + 1]."""

    def __init__(self, costs: CostTable, settings: WorkerSettings) -> None:
        lengths = np.arange(settings.suffix_max_draft + 1)
        drafting = [costs.drafting(k, 1) for k in range(settings.model_draft_tokens + 1)]
        few = lengths[: len(drafting)]
        self.cache: Floats = part_of(costs, 1, lengths, lengths)
        self.model: Floats = part_of(costs, 1, few, few, drafting, 1)

    def of(self, arm: int, verified: int) -> float:
        """Of one cycle."""
        return float((self.model if arm == MODEL else self.cache)[verified])


def foreseen(
    traces: Sequence[Trace],
    prices: Sequence[Prices],
    settings: WorkerSettings,
    mean: float | None = None,
    warm: int = 0,
) -> Iterator[tuple[Cycle, float]]:
    """Cycles and their times, by the arm and the length that commit most for their time in each.

    Args:
        prices: of each of ``traces``.
        mean: accepted length of model drafts where a recording does not hold it.
        warm: of the first so many traces the outputs are in the cache, and nothing is told.
    """
    cache = SuffixCache(settings)
    for turn in turns(traces, cache):
        output, price, done = turn.output, prices[turn.index], 1
        if turn.index < warm:
            cache.extend(turn.name, output)
            continue
        model = model_acceptance(turn.trace, mean).tolist()
        cache.extend(turn.name, output[:1])
        while done < len(output):
            room = min(turn.trace.allowed - done, UNLIMITED) - 1
            longest = min(room, len(price.model) - 1)
            options = [(NONE, 0, 0)]
            options += [(MODEL, k, min(model[done], k)) for k in range(1, longest + 1)]
            context = turn.text[: len(turn.prompt) + done]
            draft = cache.propose(turn.name, context, room) if room > 0 else None
            if draft is not None:
                same = common_prefix(draft.tokens, output[done : done + len(draft.tokens)])
                options.append((CACHE if same else NONE, same, same))
            arm, verified, accepted = max(options, key=lambda o: (1 + o[2]) / price.of(o[0], o[1]))
            made = output[done : done + accepted + 1]
            cycle = Cycle(turn.index, done, arm, verified, min(accepted, len(made)), len(made))
            yield cycle, price.of(arm, verified)
            cache.extend(turn.name, made)
            done += len(made)
