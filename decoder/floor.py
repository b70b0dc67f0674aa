"""The no-regret floor: never slower, for long, than the best fixed arm.

Every cycle tells what each option would have done in it: a cache draft's accepted length is known
whether or not it was verified, drafting nothing commits one token, the model draft's accepted
length is observed or estimated, and times come from the cost table in force. Options are compared
by the time they need for the tokens that were really committed, stretch by stretch: a cheap option
gets no credit for the luck of a stretch it did not make. When the policy falls behind the best
fixed arm, that arm is in force at once; the policy is still asked in the shadow, and is back as
soon as it would no longer lose.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

Option = Literal["policy", "none", "model", "cache"]
OPTIONS: Final[tuple[Option, ...]] = ("policy", "none", "model", "cache")

STRETCH: Final = 8
"""Cycles of a request taken as one stretch, as the learner takes them."""
DECAY: Final = 0.9
"""Weight of the past at each new stretch: about eighty cycles are remembered."""
WARM: Final = 6
"""Stretches before the floor speaks."""
TOLERANCE: Final = 0.01
"""Relative loss against the best fixed arm at which the policy is relieved."""
PROBE_EVERY: Final = 64
"""Cycles without a model draft after which one is made, so that a recovered drafter is noticed."""
PLAIN_EVERY: Final = 256
"""Cycles in steps that all ran the model drafter after which one step runs without it: only such a
step tells what verification alone costs now."""

Outcome = tuple[float, float]
"""Tokens committed and microseconds of one request's cycle."""


@dataclass(slots=True)
class Stretch:
    """Consecutive cycles of one request, summed by option."""

    cycles: int = 0
    tokens: float = 0.0
    committed: list[float] = field(default_factory=lambda: [0.0] * len(OPTIONS))
    time: list[float] = field(default_factory=lambda: [0.0] * len(OPTIONS))


class Floor:
    """Compares the policy with the fixed arms of one worker. Written by the engine's thread."""

    def __init__(self, has_model: bool) -> None:
        self.in_force: Option = "policy"
        self.falls = 0
        """Times the policy was relieved."""
        self._fixed = [i for i, o in enumerate(OPTIONS) if o != "policy"]
        if not has_model:
            self._fixed.remove(OPTIONS.index("model"))
        self._needed = [0.0] * len(OPTIONS)
        self._stretches = 0

    @property
    def advantage(self) -> float:
        """Time of the best fixed arm over the policy's on recent stretches; above 1 is ahead."""
        best = min(self._needed[i] for i in self._fixed)
        return best / self._needed[0] if self._needed[0] > 0 else 1.0

    def add(self, stretch: Stretch, committed: float, outcomes: tuple[Outcome, ...]) -> None:
        """Add one cycle to ``stretch`` and judge when that is full. Mutates both.

        Args:
            committed: tokens the cycle really committed.
            outcomes: what each of ``OPTIONS`` would have done, in that order.
        """
        stretch.cycles += 1
        stretch.tokens += committed
        for index, (tokens, us) in enumerate(outcomes):
            stretch.committed[index] += tokens
            stretch.time[index] += us
        if stretch.cycles >= STRETCH:
            self._close(stretch)

    def _close(self, stretch: Stretch) -> None:
        for index in range(len(OPTIONS)):
            needed = stretch.tokens * stretch.time[index] / stretch.committed[index]
            self._needed[index] = DECAY * self._needed[index] + needed
            stretch.committed[index] = stretch.time[index] = 0.0
        stretch.cycles, stretch.tokens = 0, 0.0
        self._stretches += 1
        if self._stretches >= WARM:
            self._judge()

    def _judge(self) -> None:
        best = min(self._fixed, key=lambda i: self._needed[i])
        mine, theirs = self._needed[0], self._needed[best]
        if self.in_force == "policy":
            if mine > theirs * (1.0 + TOLERANCE):
                self.in_force, self.falls = OPTIONS[best], self.falls + 1
        elif mine <= theirs:
            self.in_force = "policy"
        elif theirs < self._needed[OPTIONS.index(self.in_force)] * (1.0 - TOLERANCE):
            self.in_force = OPTIONS[best]
