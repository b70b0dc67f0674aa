"""When to stop proposing: where no draft pays for what looking for it takes.

A router that looks up drafts, describes and judges them takes time in every step, drafts or none.
How far that time has run ahead of what its choices were worth is summed up from where they were
last even (Page's test, as in :mod:`decoder.core.guards.floor`); ``LOSS`` ahead, the router falls
asleep: nothing is proposed, and nothing of new text is indexed. Now and then a short **probe** of
some steps looks again. After one that finds nothing the wait is twice as long, up to where probing
costs ``SPENT`` of decoding. A change of batch, or of what a step costs, ends the sleep at once:
what pays hangs on both.
"""

from __future__ import annotations

from typing import Final

LOSS: Final = 8.0
"""Lead of what proposing took over what it brought that ends it, in steps that verify nothing. A
cheap router is so given hundreds of steps between two copied stretches, a dear one a few."""
PROBE: Final = 8
"""Steps of one probe."""
FIRST_WAIT: Final = 32
"""Steps slept before the first probe."""
LONGEST_WAIT: Final = 1024
"""Steps slept at most."""
SPENT: Final = 0.005
"""Share of decoding's time that probing may take, once the waits have grown."""
CHANGE: Final = 2.0
"""Ratio of requests, or of the time of a step, to those at falling asleep that ends the sleep."""


class SpeculationPause:
    """Whether one worker's router looks for drafts. Written and read by the engine's thread."""

    def __init__(self) -> None:
        self.awake = True
        self._lost = 0.0  # of own time over gain, in plain steps
        self._steps = 0  # asleep, or of the probe
        self._wait = 0  # steps between probes; 0 while awake for good
        self._dearest: float = FIRST_WAIT  # wait at which probing costs what it may
        self._at = (1.0, 1.0)  # requests and time of a plain step when it fell asleep

    def observe(self, own_us: float, gain_us: float, requests: int, plain_us: float) -> None:
        """Take in a step, and say by ``awake`` what the next one does. Mutates.

        Args:
            own_us: what proposing and deciding took of the step; without meaning asleep.
            gain_us: what the drafts of the step were worth beyond what they cost, by the costs in
                force; without meaning asleep.
            requests: in the step, at least one.
            plain_us: time of a step of as many requests that verifies nothing.
        """
        self._steps += 1
        if self.awake:
            # A machine that stood still for a second says nothing of the router.
            own = min(own_us / plain_us, LOSS / 2)
            self._lost += own - gain_us / plain_us
            if not self._wait:
                self._lost = max(self._lost, 0.0)
            share = min(own, 1.0)
            self._dearest += (PROBE * share / SPENT - self._dearest) / PROBE
            self._judge(float(requests), plain_us)
        elif _far(requests, self._at[0]) or _far(plain_us, self._at[1]):
            self._wake(0)
        elif self._steps >= self._wait:
            self._wake(self._wait)

    def _judge(self, requests: float, plain_us: float) -> None:
        if self._wait:
            if self._steps < PROBE:
                return
            if self._lost <= 0.0:
                self._wake(0)
                return
            longest = min(max(self._dearest, FIRST_WAIT), LONGEST_WAIT)
            self._sleep(min(2 * self._wait, round(longest)), requests, plain_us)
        elif self._lost > LOSS:
            self._sleep(FIRST_WAIT, requests, plain_us)

    def _sleep(self, wait: int, requests: float, plain_us: float) -> None:
        self.awake, self._steps, self._wait = False, 0, wait
        self._at = requests, plain_us

    def _wake(self, wait: int) -> None:
        self.awake, self._steps, self._wait, self._lost = True, 0, wait, 0.0


def _far(now: float, then: float) -> bool:
    return max(now, then) > CHANGE * min(now, then)
