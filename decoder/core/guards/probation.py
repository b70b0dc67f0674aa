"""Probation of a new champion: would the policy that it replaced have been faster?

The former policy's choice is one more option of the floor. A CUSUM test decides: once the champion
is behind by more than chance explains, the former policy serves until there is another champion.
Its bound is Brownian: a champion that gains nothing falls so far behind with chance
``exp(-2 RISK)``. Requests are the clusters, for what is special about one is in all its cycles.
"""

from __future__ import annotations

import logging
import time
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from decoder.compiled import compiled
from decoder.contracts.bundle import Policy
from decoder.core.choice import Step, choose
from decoder.core.guards.floor import FORMER, POLICY, WINDOW_CYCLES

log = logging.getLogger(__name__)

PROBATION: Final = np.dtype(
    [
        ("left", "f8"),  # cycles until it ends; 0: none, RETURNED: the former policy serves
        ("behind", "f8"),  # plain steps lost since the champion was last ahead
        ("requests", "f8"),  # ended
        ("steps", "f8"),  # mean plain steps of one
        ("saved", "f8"),  # mean plain steps that the champion saves in one
        ("variance", "f8"),  # of the same
    ],
    align=True,
)
COMPARED: Final = np.dtype([("steps", "f8"), ("saved", "f8")], align=True)
"""A request's plain steps by the champion's choices, and those that they save."""
RETURNED: Final = -1
CYCLES: Final = 1 << 18
"""Cycles of a probation, in which losses of one request in a hundred show."""
MARGIN: Final = 0.05
"""Allowed relative loss: the learner, which sees all workers' drafts, finds smaller ones."""
BOUND: Final = 32.0
"""Least bound, in plain steps of the whole batch."""
RISK: Final = 4.0
MEMORY: Final = 64.0
"""Window of a request's mean and variance, in requests."""
UNSAMPLED: Final = 4
"""Requests up to which each step is evaluated, which takes microseconds a request: of larger
batches as many requests a step in the mean, in runs of as many steps as a window has."""


@compiled
def count_request(probation: Any, compared: Any) -> None:
    """Update mean and variance with a request that ended. Mutates."""
    if probation["left"] > 0 and compared["steps"] > 0.0:
        probation["requests"] += 1.0
        weight = 1.0 / min(probation["requests"], MEMORY)
        above = compared["saved"] - probation["saved"]
        probation["steps"] += weight * (compared["steps"] - probation["steps"])
        probation["saved"] += weight * above
        probation["variance"] = (1.0 - weight) * (probation["variance"] + weight * above * above)


@compiled
def weight_of(batch_size: int) -> int:
    """Steps that an evaluated one stands for."""
    return max(batch_size // UNSAMPLED, 1)


@compiled
def update_probation(probation: Any, compared: Any, window: Any, batch: int) -> None:
    """Update the test with a full window of a request in a batch of so many. Mutates all three."""
    weight, steps = window["weight"], window["steps"]
    champion = steps[POLICY] * weight / WINDOW_CYCLES
    saved = (steps[FORMER] - steps[POLICY]) * weight_of(batch)
    window["weight"] = 0.0
    compared["steps"] += champion
    compared["saved"] += saved
    behind = max(probation["behind"] - saved - MARGIN * champion, 0.0)
    bound, left = BOUND, max(probation["left"] - weight, 0)
    if probation["requests"] > 0.0:
        bound = max(RISK * probation["variance"] / (MARGIN * probation["steps"]), bound)
    probation["behind"], probation["left"] = behind, RETURNED if behind > bound else left


class Probation:
    """The policy before one router's champion; ``state`` is :data:`PROBATION` [1]."""

    def __init__(self, state: NDArray[Any], champion: Policy, enabled: bool) -> None:
        """Begin with a ``champion`` that replaced none; ``enabled`` allows probations."""
        self.state, self.champion = state, champion
        self.returned_at = 0.0  # when the former policy was taken again, in s since the epoch
        self._former, self._enabled, self._steps = champion, enabled, 0

    def serving(self, champion: Policy) -> Policy:
        """What decides where ``champion`` was published last. Any thread may ask."""
        return self._former if self.returned_at and champion is self.champion else champion

    def begin(self, champion: Policy) -> bool:
        """Take in what was published last; whether it is another policy. Mutates.

        An older version was gone back to, by whom it concerns, and is not compared.
        """
        before, serving = self.champion, self.serving(self.champion)
        self.champion = champion
        if before.digest == champion.digest:
            return False
        newer = champion.version > serving.version and champion.digest != serving.digest
        self._former, self.returned_at, self.state[:] = serving, 0.0, np.zeros((), PROBATION)
        self.state["left"] = CYCLES * (newer and self._enabled)
        return True

    def samples(self, batch_size: int) -> bool:
        """Whether the next step is evaluated. Mutates."""
        self._steps += 1
        run = self._steps // WINDOW_CYCLES
        return bool(self.state["left"][0] > 0 and run % weight_of(batch_size) == 0)

    def choose(self, step: Step, model_len: int) -> NDArray[Any]:
        """The former policy's choice in a step that the champion decided: candidates [n]."""
        candidates, inputs = step.candidates.copy(), step.inputs.copy()
        inputs["model_len"] = model_len
        choose(self._former, step._replace(candidates=candidates, inputs=inputs))
        return candidates

    def settle(self) -> bool:
        """Whether the former policy serves from now on. Mutates."""
        if self.returned_at or self.state["left"][0] != RETURNED:
            return False
        self.returned_at = time.time()
        log.warning(
            "policy version %d serves again: version %d fell %.0f plain steps behind it",
            self._former.version, self.champion.version, self.state["behind"][0],
        )  # fmt: skip
        return True
