"""The controller of one worker's speculation: fallback, pause, and the schedule of every probe.

The **fallback** replaces a policy that is slower than a fixed arm (``floor``). The **pause** stops
proposing where that takes more time than drafts gain. It is a CUSUM test, as the floor's, of the
router's own time minus the gain of the choices. While paused the router proposes nothing and
indexes no prompts. A change of batch size or step time ends the pause, because what pays depends on
both. **Probes** show what choices leave unseen:

===================  ===============================================================
probe of             when
===================  ===============================================================
proposing            after the wait of a pause, for a few steps
the model drafter    after ``PROBE_EVERY`` steps without a model draft
its later positions  after as many without one of full length
a plain step         every ``PLAIN_EVERY`` steps without one, if its cost is uncertain
===================  ===============================================================

A probe of proposing begins at the edge of the pause's test: if its steps gain nothing, it pauses
again, for twice as long.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from decoder.core.choice import Chosen, Step
from decoder.core.costs import LiveCosts
from decoder.core.guards.floor import Floor
from decoder.core.payoff.model_arm import ModelArm
from decoder.policy.rule import CACHE, MODEL, NONE

LOSS: Final = 8.0
"""Excess of proposing time over gain that starts a pause, in plain steps. A cheap router gets
hundreds of steps between two copied passages, an expensive one a few."""
PROBE: Final = 8
"""Steps per probe of a paused router."""
FIRST_WAIT: Final = 32  # paused steps before the first probe
LONGEST_WAIT: Final = 1024  # maximum paused steps before a probe
SPENT: Final = 0.005  # maximum share of decoding time for these probes, once the waits have grown
CHANGE: Final = 2.0
"""Change of batch size or plain step time, as a ratio since the pause began, that ends it."""
PROBE_EVERY: Final = 64
"""Steps without a model draft, or without one of full length, after which there is one."""
PLAIN_EVERY: Final = 16
"""Steps between two checks of a plain step's cost, counted from the last plain step."""
UNCERTAIN: Final = 0.07
"""Relative uncertainty of a step's cost against a plain step above which a plain step is probed:
draft costs are measured from it, and if it were overestimated it would never be run."""


class Controller:
    """For the engine's thread.

    Attributes:
        floor: compares the policy with fixed arms.
        pauses: whether proposing may be paused; false where time is simulated.
        proposes: false while it is paused.
        num_probes: of model drafter and plain step, so far.
        num_paused: steps for which nothing was proposed, so far.
    """

    def __init__(self, model_arm: ModelArm, enabled: bool = True) -> None:
        """Begin with the policy serving; without ``enabled`` it always does."""
        self.floor = Floor(enabled)
        self._enabled = enabled
        self.pauses, self.proposes = enabled, True
        self.num_probes = self.num_paused = 0
        self._model_arm = model_arm
        self._since_model = 0  # steps since one with model drafts
        self._since_longest = 0  # steps since model drafts of full length
        self._since_plain = 0  # steps since one that verified nothing
        self._excess = 0.0  # own time minus gain, in plain steps
        self._own = FIRST_WAIT * SPENT / PROBE  # mean own time of a step, in plain steps
        self._paused = self._wait = 0  # steps of the pause, and of its wait: 0 after a success
        self._paused_at = 1.0, 1.0  # batch size and plain step time when it began

    def observe(self, own: float, gain: float, requests: int, plain_us: float) -> None:
        """Update the pause with a step. Mutates.

        Args:
            own: time of proposing and deciding, in plain steps; ignored while paused.
            gain: net gain in time of the step's drafts, in plain steps; ignored while paused.
            requests: in the step, at least one.
            plain_us: time of a step of as many requests that verifies nothing.
        """
        load = float(requests), plain_us
        if not self.pauses:
            return
        if not self.proposes:
            self._paused += 1
            for now, then in zip(load, self._paused_at, strict=True):
                if max(now, then) > CHANGE * min(now, then):
                    self._wait = 0
            if self._paused >= self._wait:
                self.proposes = True
                self._excess = max(LOSS - PROBE * self._own, 0.0) if self._wait else 0.0
            return
        own = min(own, LOSS / 2)  # a stall of the machine says nothing about the router
        self._own += (min(own, 1.0) - self._own) / PROBE
        self._excess = max(self._excess + own - gain, 0.0)
        if self._excess > LOSS:
            longest = min(max(PROBE * self._own / SPENT, FIRST_WAIT), LONGEST_WAIT)
            self._wait = min(2 * self._wait or FIRST_WAIT, round(longest))
            self.proposes, self._paused, self._paused_at = False, 0, load
        elif self._excess == 0.0:
            self._wait = 0

    def override(self, step: Step, chosen: Chosen, serves: bool, costs: LiveCosts) -> Chosen:
        """Override the policy's arms by fallback and probes. Only the champion, if it ``serves``,
        can fall back. Mutates ``step``."""
        candidates = step.candidates
        self.num_paused += not self.proposes
        if not self._enabled or not len(candidates):
            return chosen
        if serves and self.floor.serving != "policy":
            step.inputs["fallback"] = 1
            self.floor.fall_back(candidates)
        if len(self._model_arm.odds):
            chosen = self._probe_drafter(candidates, chosen)
        self._probe_plain(candidates["arm"], costs)
        return chosen

    def _probe_drafter(self, candidates: NDArray[Any], chosen: Chosen) -> Chosen:
        """Have one model draft if a probe is due, for the request with the least drafter prefill.

        A probe has full length, and so now and then do shorter drafts of the policy: these say
        nothing about the positions after their end. A probe whose draft was not made is retried
        only after the usual interval.
        """
        arms, longest = candidates["arm"], len(self._model_arm.odds)
        self._model_arm.age()
        self._since_model += 1
        self._since_longest += 1
        unused = min(self._model_arm.unseen, self._since_model)
        if unused > PROBE_EVERY and MODEL not in arms.tobytes():
            able = np.flatnonzero(candidates["unable"] == 0)
            if len(able):
                arms[able[candidates["unread"][able].argmin()]] = MODEL
                self.num_probes += 1
        if MODEL not in arms.tobytes():
            return chosen
        self._since_model = 0
        if self._since_longest <= PROBE_EVERY and chosen.model_len < longest:
            return chosen
        self._since_longest = 0
        if chosen.model_len < longest:
            candidates["length"][candidates["policy_arm"] == MODEL] = longest
            candidates["model"][candidates["model"] > 0.0] = self._model_arm.payoff(longest)
        return chosen._replace(model_len=longest)

    def _probe_plain(self, arms: NDArray[np.int8], costs: LiveCosts) -> None:
        """Draft nothing for any request if the cost of a plain step is uncertain. Mutates."""
        self._since_plain += 1
        # For a single request with a cache draft, a probe would cost a whole copied passage.
        copying = len(arms) == 1 and arms[0] == CACHE
        if not any(arms.tobytes()):
            self._since_plain = 0
        elif (
            self._since_plain % PLAIN_EVERY == 0 and not copying and costs.uncertainty() > UNCERTAIN
        ):
            self._since_plain = 0
            self.num_probes += 1
            arms[:] = NONE
