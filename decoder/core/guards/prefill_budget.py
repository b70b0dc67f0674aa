"""Whether the model drafter prefills new requests.

To draft for a request, the drafter must prefill its whole text. That takes a share of the target's
prefill time, whether or not a draft is ever made. With many requests and short answers it costs
more than the drafts save. A running budget decides: every step adds the time that model drafts
could have saved, and subtracts the drafter's prefill time. While the budget is negative, new
requests are skipped, except one in ``SAMPLE``, which shows when drafting pays again. A request is
prefilled from its beginning or not at all.
"""

from __future__ import annotations

import math
from typing import Final

LIMIT: Final = 4.0
"""Bounds of the budget, in plain steps: a prompt is paid at once, and its drafts come later."""
SAMPLE: Final = 8
"""One of so many new requests is prefilled while the budget is negative."""
LAYER_COST: Final = 1.4
"""Cost of an EAGLE3 layer, with the projection of three hidden states, in layers of its target:
1.44 for SmolLM2-135M by its weights, 1.35 for Llama-3.1-8B by its shapes."""


class PrefillBudget:
    """The budget of one worker. For the engine's thread."""

    def __init__(self, layers: int, drafters: int) -> None:
        """Begin with a full budget, for a target of ``layers`` and a drafter of ``drafters``."""
        self._share = LAYER_COST * drafters / max(layers, 1)  # of the target's time a token
        self._balance = LIMIT

    @property
    def allows(self) -> bool:
        """Whether new requests are prefilled."""
        return self._balance >= 0.0

    def observe(self, tokens: int, token_us: float, model_gain_us: float, plain_us: float) -> None:
        """Update the budget by a step. Mutates.

        Args:
            tokens: tokens of the step, prompts included.
            token_us: marginal time of a token in a large step.
            model_gain_us: time that model drafts would have saved in it, before prefill; infinite
                where the policy does not price them.
            plain_us: time of a step that verifies nothing.
        """
        gained = (model_gain_us - self._share * tokens * token_us) / plain_us
        if not math.isnan(gained):
            self._balance = min(max(self._balance + gained, -LIMIT), LIMIT)
