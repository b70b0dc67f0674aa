"""A policy applied to the requests of one step: which arm each verifies, and how long a draft.

The ``survival`` kind spends the verification budget of the step where it buys most, lets the model
drafter make as many tokens as pay, and runs it only if that pays for the whole batch. What a choice
costs and brings is ``policy.pricing``.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from decoder.contracts.bundle import BUCKET_OF, Policy
from decoder.contracts.features import FEATURES, FloatArray
from decoder.policy.estimate import Estimate, decide_each, estimate
from decoder.policy.loops import by_survival, yields_of_places
from decoder.policy.pricing import CostTable
from decoder.policy.rule import CACHE, MODEL, NONE, Arms, Lengths, Situation

_EVEN: Final = np.zeros(16)
_NOBODY: Final = np.zeros(0, np.int64)


class Chosen(NamedTuple):
    """What a policy wants of n requests, m of them with a cache draft, and what it expects.

    ``expected`` and ``model`` [n] are accepted lengths in tokens, of the cache draft (0 without
    one) and of a model draft. ``model_len`` is the length of every model draft of the step, and
    ``worth`` the time that model drafts gain in it, if all requests can have one; infinite where
    the policy does not weigh them.
    """

    arms: Arms
    lengths: Lengths
    expected: FloatArray
    model: FloatArray
    model_len: int
    worth: float = np.inf


def choose(
    policy: Policy,
    features: FloatArray,
    owners: NDArray[np.int64],
    n: int,
    rows: int,
    costs: CostTable,
    rate: float,
    model_len: int,
    *,
    odds: NDArray[np.float64] = _EVEN,
    most: int | None = None,
    unread: NDArray[np.int64] = _NOBODY,
    beside: int = 0,
) -> Chosen:
    """What ``policy`` wants of the ``n`` requests of a step that may speculate.

    Args:
        features: float32 [m, features] of their cache drafts.
        owners: int64 [m], which of the n requests has each draft; ascending.
        rows: requests of the step, those without speculation included.
        rate: tokens a request commits in the time of a step that verifies no draft.
        model_len: tokens of a model draft at most; 0 without a model drafter. A survival policy
            asks for fewer where that pays.
        odds: float64 [at least model_len], log-odds that a model draft's token of each place is
            accepted, given those before it.
        most: draft tokens of all requests together; None for no bound.
        unread: int64, which of the n requests no model draft can be made for.
        beside: tokens of prompts that the step reads.
    """
    room = room_of(most)
    if policy.kind != "survival":
        chosen = _threshold(policy, features, owners, n, costs, model_len, odds, unread)
        if most is not None:
            _fit(chosen.arms, chosen.lengths, room)
        return chosen
    longest = model_len if policy.use_model else 0
    weights, widths = policy.flat
    found = by_survival(
        features, weights, widths, owners, _DRAFT_LEN, BUCKET_OF, n, rows, beside, longest,
        room, odds, rate, costs.dense, costs.prices, unread,
    )  # fmt: skip
    arms, lengths, expected, model, k, worth = found
    return Chosen(arms, lengths, expected, model, k or model_len, worth)


def room_of(most: int | None) -> int:
    """Draft tokens of all requests together that ``most`` allows; None is no bound."""
    return 1 << 40 if most is None else max(most, 0)


def _fit(arms: Arms, lengths: Lengths, room: int) -> None:
    """Cut the last cache draft that has room, and drop what has none. Mutates both."""
    left = room
    for i in range(len(arms)):
        if lengths[i] > left:
            lengths[i] = left if arms[i] == CACHE else 0
            arms[i] = arms[i] if lengths[i] else NONE
        left -= int(lengths[i])


def _threshold(
    policy: Policy,
    features: FloatArray,
    owners: NDArray[np.int64],
    n: int,
    costs: CostTable,
    model_len: int,
    odds: NDArray[np.float64],
    unread: NDArray[np.int64],
) -> Chosen:
    found = estimate(policy, features)
    k = model_len if policy.use_model else 0
    expected, lengths = np.zeros(n, np.float32), np.zeros(n, np.int32)
    expected[owners], lengths[owners] = found.expected, found.lengths
    model = np.full(n, yields_of_places(odds, k)[-1] if k else 0.0, np.float32)
    model[unread] = 0.0
    every = Estimate(expected, lengths)
    wanted = decide_each(policy, every, model, Situation(costs, model_len), unread, 0.0)
    without = unread[wanted.arms[unread] == MODEL]
    wanted.arms[without], wanted.lengths[without] = NONE, 0
    return Chosen(wanted.arms, wanted.lengths, expected, model, model_len)


_DRAFT_LEN: Final = FEATURES.index("draft_len")
