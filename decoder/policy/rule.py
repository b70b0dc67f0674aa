"""The rate rule: what to verify so that the most tokens are committed a second.

What a choice costs and brings is defined in :mod:`decoder.policy.pricing`: a committed token is
worth ``value = plain / (rate * batch)``, where ``plain`` is the time of a step that verifies no
draft and ``rate`` the tokens a request gets done in such a time, the one decision parameter, which
a worker takes from what it commits (``decoder.core.rate``). A choice is worth
``value * (tokens committed) - (time of the step)``; maximising it maximises the long-run rate
(Dinkelbach's argument for ratios), and a threshold on the accepted length is the special case of
constant costs and a constant model draft.

:func:`choose_each` judges rows on their own, as the learner replays them. A worker's step, whose
requests share one budget and one drafter, is ``decoder.core.choice``; on a batch of one they agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from decoder.contracts.features import FloatArray
from decoder.policy.pricing import MAX_TOKENS, CostTable, part_of, value_of

NONE, MODEL, CACHE = range(3)
ARMS: Final = ("none", "model", "cache")
"""Names of the arms by number, as events carry them."""

Arms = NDArray[np.int8]
Lengths = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Choice:
    """Arm and draft tokens to verify of each row, [..., n]; for arm ``none`` those are 0."""

    arms: Arms
    lengths: Lengths


@dataclass(frozen=True, slots=True)
class Situation:
    """What a choice depends on beside the drafts.

    ``model_len`` is the length of a model draft, 0 without a model drafter.
    """

    costs: CostTable
    model_len: int = 0


def choose_each(
    curves: FloatArray,
    model: FloatArray,
    batch: NDArray[np.integer],
    rate: ArrayLike,
    situation: Situation,
) -> Choice:
    """The best choice of each of n independent rows, or of each by several policies.

    Args:
        curves: float32 [..., n, w] of ``survival``.
        model: float32 [n], expected accepted length of the model draft.
        batch: integers [n], requests that share the row's step, each as this one.
        rate: tokens a request commits in the time of a plain step, one or [n].
    """
    width = curves.shape[-1]
    costs, k = situation.costs, situation.model_len
    value = value_of(costs, batch, rate)
    lengths_of = _FROM_ONE[: max(width, k)]
    alone = part_of(costs, batch, 0, 0)
    extra = part_of(costs, batch[:, None], lengths_of, lengths_of) - alone[:, None]
    gains = np.cumsum(curves, axis=-1) * value[:, None] - extra[:, :width]
    best = np.zeros(curves.shape[:-1])
    lengths = np.zeros(best.shape, np.int32)
    if width:
        top = gains.argmax(axis=-1)
        best = np.maximum(gains.max(axis=-1), 0.0)
        lengths = np.where(best > 0.0, top + 1, 0).astype(np.int32)
    arms = np.where(lengths > 0, CACHE, NONE).astype(np.int8)
    if k:
        gain = model * value - extra[:, k - 1] - costs.drafting(k, batch.astype(float)) / batch
        chosen = gain > best
        arms[chosen], lengths[chosen] = MODEL, k
    return Choice(arms, lengths)


_FROM_ONE: Final = np.arange(1, MAX_TOKENS + 1)
