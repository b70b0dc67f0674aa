"""The rate rule: what to verify so that the most tokens are committed a second.

What a choice costs and brings is defined in :mod:`decoder.policy.pricing`: a committed token is
worth ``value = plain / (rate * batch)``, where ``plain`` is the time of a step that verifies no
draft and ``rate`` the tokens a request gets done in such a time, the one decision parameter, which
a worker takes from what it commits (``decoder.core.rate``). A choice is worth
``value * (tokens committed) - (time of the step)``; maximising it maximises the long-run rate
(Dinkelbach's argument for ratios), and a threshold on the accepted length is the special case of
constant costs and a constant model draft.

``policy.estimate`` judges rows on their own, as the learner replays them; a worker's step, whose
requests share one budget and one drafter, is ``decoder.core.choice``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from decoder.policy.pricing import CostTable

NONE, MODEL, CACHE = range(3)
ARMS: Final = ("none", "model", "cache")
"""Names of the arms by number, as events carry them."""

CANDIDATE: Final = np.dtype(
    [
        ("place", "i8"),  # of the request in the step
        ("room", "i8"),  # draft tokens that it may have, of any arm
        ("draft", "i8"),  # which of the cache drafts is its own, -1 for none
        ("unable", "i1"),  # 1: no model draft can be made for it
        ("wanted", "i1"),  # the arm that the policy wants
        ("arm", "i1"),  # the arm that is taken
        ("length", "i4"),  # draft tokens that the policy wants
        ("expected", "f4"),  # accepted length of its cache draft, tokens; 0 without one
        ("model", "f4"),  # accepted length of a model draft, tokens
    ],
    align=True,
)
"""A request that may verify a draft: what it may have, what is expected of it, what is chosen."""

SITUATION: Final = np.dtype(
    [
        ("batch_size", "i8"),  # requests of the step
        ("prefill_tokens", "i8"),  # tokens of prompts that the step reads
        ("budget", "i8"),  # draft tokens of all requests together
        ("model_len", "i8"),  # tokens of a model draft at most, and then of each
        ("fallback", "i8"),  # whether the floor has a fixed arm in force
        ("serves", "i8"),  # whether the champion decides
        ("rate", "f8"),  # tokens a request commits in the time of a step that verifies no draft
        ("prices", "f8", (3,)),  # of drafting: decoder.policy.pricing.CostTable.prices
    ],
    align=True,
)
"""What a step's choice depends on beside the drafts."""

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
