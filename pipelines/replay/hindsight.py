"""What a rule that looks at the draft alone makes of a recording, and what hindsight would have.

A cycle at position ``p`` that accepts ``a`` draft tokens leads to ``p + a + 1``: a way of choosing
is a walk through the output. Nothing is learned on the way, so no router is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from decoder.drafting.drafts import CacheDraft
from decoder.labels import common_prefix
from decoder.policy.pricing import CostTable, Floats, part_of
from decoder.policy.rule import CACHE, MODEL, NONE
from decoder.settings import WorkerSettings
from pipelines.replay.cycles import Cycle, Cycles, Tally
from pipelines.replay.dialogue import UNLIMITED, DialogueCache, Turn, turns
from pipelines.replay.model_arm import model_acceptance
from pipelines.replay.traces import Trace

GRID: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 7.0, 8.0, 10.0, 12.0, 16.0,
               20.0, 24.0, 32.0, 48.0, float("inf"))  # fmt: skip
"""Thresholds tried, in tokens: from always to never."""
NEVER: Final = float("inf")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a cycle begins: ``look`` finds the cache draft and what of it will be accepted,
    ``model`` is that of a full model draft, ``room`` what there is room for."""

    look: Callable[[], tuple[CacheDraft, int] | None]
    model: int
    room: int


Choose = Callable[[Place], tuple[int, int, int]]
"""The arm of a cycle, and the draft tokens that are verified and accepted."""


def above(
    threshold: float, model_len: int, value: Callable[[CacheDraft], float] = lambda d: d.score
) -> Choose:
    """The cache draft where its ``value`` reaches ``threshold``, else a model draft of so many
    tokens."""

    def choose(at: Place) -> tuple[int, int, int]:
        found = at.look() if threshold < NEVER else None
        if found is not None and np.float32(value(found[0])) >= threshold:
            return CACHE, len(found[0].tokens), found[1]
        k = min(at.room, model_len)
        return (MODEL, k, min(at.model, k)) if k > 0 else (NONE, 0, 0)

    return choose


class Prices:
    """A request's part of a step by what it verifies, where ``rows`` requests all choose alike:
    ``cache`` [tokens + 1], ``model`` [tokens + 1]."""

    def __init__(self, costs: CostTable, settings: WorkerSettings, rows: int = 1) -> None:
        lengths = np.arange(settings.suffix_max_draft + 1)
        drafting = [costs.drafting(k, rows) for k in range(settings.model_draft_tokens + 1)]
        few = lengths[: len(drafting)]
        self.cache: Floats = part_of(costs, rows, lengths, rows * lengths)
        self.model: Floats = part_of(costs, rows, few, rows * few, drafting, rows)

    def of(self, arm: int, verified: int) -> float:
        """Of one cycle."""
        return float((self.model if arm == MODEL else self.cache)[verified])


def oracle(prices: Prices, shorter: bool) -> Choose:
    """The arm, and of the cache draft the length, that commits most for its time in this cycle,
    knowing where a draft breaks off; with ``shorter`` of the model draft, too."""
    most = len(prices.model) - 1

    def choose(at: Place) -> tuple[int, int, int]:
        room = min(at.room, most)
        options = [(NONE, 0, 0)]
        for k in range(1 if shorter else max(room, 1), room + 1):
            options.append((MODEL, k, min(at.model, k)))
        if (found := at.look()) is not None:
            options.append((CACHE, found[1], found[1]))
        return max(options, key=lambda o: (1 + o[2]) / prices.of(o[0], o[1]))

    return choose


def walk(turn: Turn, cache: DialogueCache, choose: Choose, mean: float | None) -> Iterator[Cycle]:
    """The cycles of one recording, whose request has begun in ``cache``. Mutates that.

    Args:
        mean: accepted length of model drafts where the recording does not hold it.
    """
    output, model = turn.output, model_acceptance(turn.trace, mean).tolist()
    cache.extend(turn.name, output[:1])
    done = 1
    while done < len(output):
        room = min(turn.trace.allowed - done, UNLIMITED) - 1

        def look(done: int = done, room: int = room) -> tuple[CacheDraft, int] | None:
            context = turn.text[: len(turn.prompt) + done]
            draft = cache.propose(turn.name, context, room) if room > 0 else None
            if draft is None:
                return None
            return draft, common_prefix(draft.tokens, output[done : done + len(draft.tokens)])

        arm, verified, accepted = choose(Place(look, model[done], room))
        made = output[done : done + accepted + 1]
        arm = arm if verified else NONE
        yield Cycle(turn.index, done, arm, verified, min(accepted, len(made)), len(made))
        cache.extend(turn.name, made)
        done += len(made)


@dataclass(frozen=True)
class Walker:
    """Walks through recordings one after the other, from a cache that holds ``warm_up``."""

    traces: Sequence[Trace]
    warm_up: Sequence[Trace]
    settings: WorkerSettings
    mean: float | None

    def by(self, choose: Choose) -> Tally:
        """What choosing so comes to."""
        cache, cycles = DialogueCache(self.settings), list[Cycle]()
        for turn in turns([*self.warm_up, *self.traces], cache):
            if turn.index < len(self.warm_up):
                cache.extend(turn.name, turn.output)
            else:
                cycles += walk(turn, cache, choose, self.mean)
        return Cycles.of(cycles).tally()

    def tuned(self, model_len: int) -> float:
        """The threshold of :data:`GRID` with the highest rate; among equals the highest."""
        return max(GRID, key=lambda t: (self.by(above(t, model_len)).rate, t))
