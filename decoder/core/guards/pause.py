"""Speculation pause: stop proposing while drafts do not pay for the router's own time.

Looking up drafts, computing features and deciding takes time in every step. A CUSUM test (as in
:mod:`decoder.core.guards.floor`) accumulates that time minus the gain of the choices. At ``LOSS``
the router pauses: it proposes nothing and indexes no prompts. A short **probe** of some steps ends
each wait. After an unsuccessful probe the wait doubles, until probing costs ``SPENT`` of decoding.
A change of batch size or step time ends the pause at once, because what pays depends on both.
"""

from __future__ import annotations

from typing import Final

LOSS: Final = 8.0
"""Excess of proposing time over gain that starts a pause, in plain steps. A cheap router gets
hundreds of steps between two copied passages, an expensive one a few."""
PROBE: Final = 8
"""Steps per probe."""
FIRST_WAIT: Final = 32
"""Paused steps before the first probe."""
LONGEST_WAIT: Final = 1024
"""Maximum paused steps before a probe."""
SPENT: Final = 0.005
"""Maximum share of decoding time for probes, once the waits have grown."""
CHANGE: Final = 2.0
"""Change of batch size or plain step time, as a ratio since the pause began, that ends it."""


class SpeculationPause:
    """Whether one worker's router proposes drafts. For the engine's thread."""

    def __init__(self) -> None:
        self.awake = True
        self._excess = 0.0  # excess of own time over gain, in plain steps
        self._steps = 0  # since the pause or the probe began
        self._wait = 0  # steps between probes; 0 if neither pausing nor probing
        self._max_wait: float = FIRST_WAIT  # wait at which probing costs SPENT
        self._paused_at = (1.0, 1.0)  # batch size and plain step time when the pause began

    def observe(self, own_us: float, gain_us: float, requests: int, plain_us: float) -> None:
        """Update with a step, and set ``awake`` for the next one. Mutates.

        Args:
            own_us: time of proposing and deciding in the step; ignored while paused.
            gain_us: net gain in time of the step's drafts, by the current costs; ignored while
                paused.
            requests: in the step, at least one.
            plain_us: time of a step of as many requests that verifies nothing.
        """
        self._steps += 1
        if self.awake:
            # Clipped: a stall of the machine says nothing about the router.
            own = min(own_us / plain_us, LOSS / 2)
            self._excess += own - gain_us / plain_us
            if not self._wait:
                self._excess = max(self._excess, 0.0)
            share = min(own, 1.0)
            self._max_wait += (PROBE * share / SPENT - self._max_wait) / PROBE
            self._judge(float(requests), plain_us)
        elif _changed(requests, self._paused_at[0]) or _changed(plain_us, self._paused_at[1]):
            self._resume(0)
        elif self._steps >= self._wait:
            self._resume(self._wait)

    def _judge(self, requests: float, plain_us: float) -> None:
        if self._wait:
            if self._steps < PROBE:
                return
            if self._excess <= 0.0:
                self._resume(0)
                return
            longest = min(max(self._max_wait, FIRST_WAIT), LONGEST_WAIT)
            self._pause(min(2 * self._wait, round(longest)), requests, plain_us)
        elif self._excess > LOSS:
            self._pause(FIRST_WAIT, requests, plain_us)

    def _pause(self, wait: int, requests: float, plain_us: float) -> None:
        self.awake, self._steps, self._wait = False, 0, wait
        self._paused_at = requests, plain_us

    def _resume(self, wait: int) -> None:
        self.awake, self._steps, self._wait, self._excess = True, 0, wait, 0.0


def _changed(now: float, then: float) -> bool:
    return max(now, then) > CHANGE * min(now, then)
