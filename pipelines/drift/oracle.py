"""What hindsight would have made of each request: the bound that rates are shares of.

At each cycle it takes the arm, and of a cache draft the length, that commits most for its time,
knowing what both drafts will have accepted, as ``pipelines.replay.walks`` does for position after
position. A request of several that run at a time pays its part of a step whose requests all choose
as it does.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from decoder.labels import common_prefix
from decoder.policy.pricing import Floats, part_of
from decoder.policy.rule import ARMS, CACHE, MODEL, NONE
from decoder.settings import WorkerSettings
from pipelines.drift.stream import Conditions, Decoded
from pipelines.drift.traffic import Request
from pipelines.replay.dialogue import DialogueCache, Turn, turns
from pipelines.replay.states import UNLIMITED


def foresee(
    requests: Sequence[Request], conditions: Sequence[Conditions], settings: WorkerSettings
) -> Decoded:
    """Each request decoded in hindsight, one after another."""
    prices = [_Prices(c, settings) for c in conditions]
    n = len(requests)
    made = Decoded(np.zeros(n, np.int64), np.zeros(n), np.zeros((n, len(ARMS)), np.int64))
    cache = DialogueCache(settings)
    for turn in turns([r.trace for r in requests], cache):
        made.tokens[turn.index] = len(turn.output) - 1
        made.us[turn.index] = _decoded(
            turn, cache, prices[requests[turn.index].segment], made.arms[turn.index]
        )
    return made


class _Prices:
    """Time of a cycle by what it verifies: ``cache`` [tokens + 1], ``model`` [tokens + 1]."""

    def __init__(self, conditions: Conditions, settings: WorkerSettings) -> None:
        costs, b = conditions.costs, conditions.concurrency
        lengths = np.arange(settings.suffix_max_draft + 1)
        drafting = [costs.drafting(k, b) for k in range(settings.model_draft_tokens + 1)]
        few = lengths[: len(drafting)]
        self.cache: Floats = part_of(costs, b, lengths, b * lengths)
        self.model: Floats = part_of(costs, b, few, b * few, drafting, b)


def _decoded(turn: Turn, cache: DialogueCache, prices: _Prices, arms: np.ndarray) -> float:
    """Time of all cycles of one output. Mutates the cache, and ``arms``, their counts."""
    output, trace = turn.output, turn.trace
    model = np.asarray(trace.model_accepted).tolist()
    done, us = 1, 0.0
    cache.extend(turn.name, output[:1])
    while done < len(output):
        room = min(trace.allowed - done, UNLIMITED) - 1
        end = len(turn.prompt) + done
        draft = cache.propose(turn.name, turn.text[:end], room) if room > 0 else None
        options = [(1.0 / prices.cache[0], NONE, 0, prices.cache[0])]
        most = min(len(prices.model) - 1, room)
        # A model draft that is cut where it breaks off is a shorter one.
        for k in range(1, most + 1):
            gain = min(model[done], k)
            options.append(((1 + gain) / prices.model[k], MODEL, gain, prices.model[k]))
        if draft is not None:
            gain = common_prefix(draft.tokens, output[done : done + len(draft.tokens)])
            options.append(((1 + gain) / prices.cache[gain], CACHE, gain, prices.cache[gain]))
        _, arm, gain, price = max(options)
        arms[arm] += 1
        us += price
        made = output[done : done + gain + 1]
        cache.extend(turn.name, made)
        done += len(made)
    return us
