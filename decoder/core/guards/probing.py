"""Periodic probes of unused arms: a drafter that may have recovered, and a plain step, the baseline
of every cost."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from decoder.core.costs import LiveCosts
from decoder.core.guards.floor import DOUBT, PLAIN_EVERY, PROBE_EVERY
from decoder.core.payoff.model_arm import ModelArm
from decoder.policy.rule import CACHE, MODEL, NONE, Arms

Who = NDArray[np.int64]


class Probing:
    """Schedules probes. ``taken`` counts them; ``whole``: the next step needs model drafts of full
    length. For the engine's thread."""

    def __init__(self, model_arm: ModelArm) -> None:
        self.taken, self.whole = 0, False
        self._model_arm, self._longest = model_arm, len(model_arm.odds)
        self._since_model = 0  # steps since one with model drafts
        self._since_whole = 0  # steps since model drafts of full length
        self._since_plain = 0  # steps since one that verified nothing

    def at_the_drafter(
        self, arms: Arms, length: int, behind: Callable[[], NDArray[np.int64]], unable: Who
    ) -> Arms:
        """``arms``, with one model draft if a probe of the drafter is due, for the request with the
        least drafter prefill.

        A probe has full length. Shorter drafts of the policy are sometimes lengthened too: they
        say nothing about the positions after their end.

        Args:
            length: of the policy's model drafts.
            behind: returns int64 [n], tokens of each request that the drafter has yet to prefill.
        """
        if not self._longest:
            return arms
        # A probe whose draft was not made is retried only after the usual interval.
        self._model_arm.passed()
        self._since_model += 1
        self._since_whole += 1
        asks = MODEL in arms.tobytes()
        if not asks and min(self._model_arm.unseen, self._since_model) > PROBE_EVERY:
            able = np.delete(np.arange(len(arms)), unable)
            if len(able):
                arms = arms.copy()
                arms[able[behind()[able].argmin()]] = MODEL
                self.taken += 1
                asks = True
        self.whole = asks and (self._since_whole > PROBE_EVERY or length >= self._longest)
        if self.whole:
            self._since_whole = 0
        if asks:
            self._since_model = 0
        return arms

    def at_nothing(self, arms: Arms, costs: LiveCosts, last: tuple[int, int]) -> Arms:
        """``arms``, or no draft for any request if the cost of a plain step is uncertain.

        Args:
            last: tokens that the last step ran through the target, and tokens drafted in it.
        """
        self._since_plain += 1
        # For a single request with a cache draft, a probe would cost a whole copied passage.
        copying = len(arms) == 1 and arms[0] == CACHE
        if not any(arms.tobytes()):
            self._since_plain = 0
        elif (
            not copying
            and self._since_plain % PLAIN_EVERY == 0
            and costs.doubt(last[0], len(arms), last[1]) > DOUBT
        ):
            self._since_plain = 0
            self.taken += 1
            return np.full(len(arms), NONE, np.int8)
        return arms
