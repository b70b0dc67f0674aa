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
