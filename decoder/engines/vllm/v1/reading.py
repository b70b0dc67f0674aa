"""Whether the model drafter reads what a new request says.

To draft for a request, the drafter must have read it, prompt and all: a share of the time in which
the target reads, whether or not a draft is ever made. Where requests are many and answers short,
that is more than its drafts are worth. So an account is kept: every step adds what it could have
gained by model drafts, and takes off what reading its tokens takes. While the account is
overdrawn, requests that begin are not read, but for one in ``SAMPLE``, by which a drafter is known
that has become worth it. A request is read from its beginning or not at all.
"""

from __future__ import annotations

import math
from typing import Final

DEPTH: Final = 4.0
"""What the account holds, or is overdrawn by, at most, in steps that verify nothing: a prompt is
paid for at once, and its drafts come after it."""
SAMPLE: Final = 8
"""Of so many requests that begin meanwhile one is read."""
LAYER: Final = 1.4
"""An EAGLE3 layer in layers of its target, with what joins three of the target's states: 1.44 of
SmolLM2-135M, by its weights, and 1.35 of Llama-3.1-8B, by its shapes."""


class Reading:
    """The account of one worker; ``wanted`` says whether requests that begin now are read.

    For the engine's thread.
    """

    def __init__(self, layers: int, drafters: int) -> None:
        """Open the account of a target of so many layers, and a drafter of ``drafters``."""
        self._share = LAYER * drafters / max(layers, 1)  # of the time in which a token is read
        self._held = DEPTH

    @property
    def wanted(self) -> bool:
        """Whether the account is not overdrawn."""
        return self._held >= 0.0

    def observe(self, tokens: int, token_us: float, worth_us: float, plain_us: float) -> None:
        """Book a step. Mutates.

        Args:
            tokens: that it ran through the target, prompts' included.
            token_us: time that one more token takes in a large step.
            worth_us: time that model drafts would have been worth in it, reading left out;
                infinite where the policy does not weigh them.
            plain_us: time of a step that verifies nothing.
        """
        gained = (worth_us - self._share * tokens * token_us) / plain_us
        if not math.isnan(gained):
            self._held = min(max(self._held + gained, -DEPTH), DEPTH)
