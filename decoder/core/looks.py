"""Which arms a step takes, where the policy does not have its way.

The floor may have relieved the policy. A drafter that nobody used must be looked at now and then,
or its recovery would go unnoticed; and so must a step that verifies nothing, from which every
other is priced.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from decoder.core.costs import LiveCosts
from decoder.core.floor import DOUBT, PLAIN_EVERY, PROBE_EVERY, Floor
from decoder.core.payoff.model_arm import ModelArm
from decoder.policy.rule import CACHE, MODEL, NONE, Arms


class Looks:
    """Arms in force of one worker's steps; ``taken`` counts looks. For the engine's thread."""

    def __init__(self, floor: Floor | None, model_arm: ModelArm, has_model: bool) -> None:
        self.taken = 0
        self._floor, self._model_arm, self._has_model = floor, model_arm, has_model
        self._since_asked = 0  # steps since one that asked for a model draft
        self._since_plain = 0  # steps since one that verified nothing

    def arms(
        self,
        wanted: Arms,
        proposed: Sequence[bool],
        behind: Sequence[int],
        costs: LiveCosts,
        last: tuple[int, int],
        relieved: bool = True,
        unable: Sequence[int] = (),
    ) -> Arms:
        """The policy's arms [n], unless the floor has relieved it or a look is due.

        Args:
            proposed: whether each request has a cache draft.
            behind: tokens of each that the drafter has not drafted from.
            last: tokens that the last step ran through the target, and tokens drafted in it.
            relieved: whether the floor has a say: it judges the champion, and nobody on trial.
            unable: requests that no model draft can be made for.
        """
        floor, n = self._floor, len(wanted)
        if floor is None or not n:
            return wanted
        arms = wanted
        if not relieved:
            pass
        elif floor.in_force == "cache":
            arms = np.where(proposed, CACHE, NONE).astype(np.int8)
        elif floor.in_force == "model":
            arms = np.full(n, MODEL, np.int8)
            arms[list(unable)] = wanted[list(unable)]
        elif floor.in_force == "none":
            arms = np.full(n, NONE, np.int8)
        if self._has_model:
            arms = self._at_the_drafter(arms, behind, unable)
        self._since_plain += 1
        # In place of a lone request's cache draft it would cost a whole copied stretch.
        copying = n == 1 and arms[0] == CACHE
        if not (arms != NONE).any():
            self._since_plain = 0
        elif (
            not copying
            and self._since_plain % PLAIN_EVERY == 0
            and costs.doubt(last[0], n, last[1]) > DOUBT
        ):
            self._since_plain = 0
            self.taken += 1
            return np.full(n, NONE, np.int8)
        return arms

    def _at_the_drafter(self, arms: Arms, behind: Sequence[int], unable: Sequence[int]) -> Arms:
        # A look that came to nothing waits for its next turn like any other.
        self._model_arm.unseen += 1
        self._since_asked += 1
        asks = bool((arms == MODEL).any())
        due = not asks and min(self._model_arm.unseen, self._since_asked) > PROBE_EVERY
        able = [row for row in range(len(arms)) if row not in unable] if due else []
        if able:
            # Where the drafter has least to read before it can draft.
            arms = arms.copy()
            arms[min(able, key=behind.__getitem__)] = MODEL
            self.taken += 1
            asks = True
        if asks:
            self._since_asked = 0
        return arms
