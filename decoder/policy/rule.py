"""The rate rule: choose the drafts that maximise committed tokens per second.

:mod:`decoder.policy.pricing` defines cost and gain. A committed token is worth
``value = plain / (rate * batch)``: ``plain`` is the time of a step that verifies no draft, ``rate``
the tokens a request commits in that time. The rate is the only decision parameter; a worker
measures it (``decoder.core.rate``). A choice is worth
``value * (tokens committed) - (time of the step)``. Maximising that maximises the long-run rate
(Dinkelbach's argument for ratios). A threshold on the accepted length is the special case of
constant costs and a constant model draft.

``decoder.core.choice`` decides a worker's step, whose requests share one budget and one drafter;
the learner decides recorded rows independently.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

NONE, MODEL, CACHE = range(3)
ARMS: Final = ("none", "model", "cache")  # arm names by number, as in events

CANDIDATE: Final = np.dtype(
    [
        ("place", "i8"),  # index of the request in the step
        ("room", "i8"),  # maximum draft tokens, for any arm
        ("draft", "i8"),  # row of its cache draft, -1 for none
        ("unread", "i8"),  # tokens since its last model draft
        ("unable", "i1"),  # 1: no model draft can be made for it
        ("policy_arm", "i1"),  # the arm the policy prefers
        ("arm", "i1"),  # the arm after the guards
        ("length", "i4"),  # draft tokens the policy prefers
        ("expected", "f4"),  # expected accepted length of its cache draft, tokens; 0 without one
        ("model", "f4"),  # expected accepted length of a model draft, tokens
    ],
    align=True,
)
"""A request that may verify a draft: its limits, predictions and choice."""

STEP_INPUTS: Final = np.dtype(
    [
        ("batch_size", "i8"),  # requests in the step
        ("prefill_tokens", "i8"),  # prompt tokens in the step
        ("budget", "i8"),  # draft tokens of all requests together
        ("model_len", "i8"),  # maximum length of a model draft; once chosen, the length of each
        ("fallback", "i8"),  # whether the floor's fallback arm is active
        ("serves", "i8"),  # whether the champion decides
        ("rate", "f8"),  # tokens a request commits per plain step
        ("prices", "f8", (3,)),  # drafting coefficients: decoder.policy.pricing.CostTable.prices
    ],
    align=True,
)
"""Inputs of a step's choice other than the drafts."""

Arms = NDArray[np.int8]
Lengths = NDArray[np.int32]
