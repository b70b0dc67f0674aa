"""The no-regret floor: never slower, for long, than the best fixed arm.

Every cycle tells what each option would have done in it: a cache draft's accepted length is known
whether or not it was verified, drafting nothing commits one token, the model draft's accepted
length is observed or estimated, and times come from the cost table in force. Options are compared
by the time they need for the tokens that were really committed, stretch by stretch: a cheap option
gets no credit for the luck of a stretch it did not make.

What decides is how far the option in force has fallen behind another one since it was last ahead of
it (a cumulative sum that starts anew at zero: Page, Biometrika 1954). So a long good past hides no
change, and a short bad stretch is no change yet. A policy that is ``EVIDENCE`` behind a fixed arm
is relieved by it at once; it is still asked in the shadow, and is back when it is as far ahead.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

Option = Literal["policy", "none", "model", "cache"]
OPTIONS: Final[tuple[Option, ...]] = ("policy", "none", "model", "cache")

STRETCH: Final = 8
"""Cycles of a request taken as one stretch, as the learner takes them."""
DECAY: Final = 0.9
"""Weight of the past at each new stretch in what is reported: about eighty cycles."""
EVIDENCE: Final = 8.0
"""Lead that changes the option in force, in steps of the whole batch that verify nothing: what its
requests suffer together (a wrong price, a kind of text) is seen as often as there are requests."""
TOLERANCE: Final = 0.01
"""Relative loss against a fixed arm that is allowed."""
PROBE_EVERY: Final = 64
"""Steps without a model draft after which one is made, so that a recovered drafter is noticed."""
DOUBT: Final = 0.07
"""Doubt about the cost of a step beside one that verifies nothing, as a share, above which one of
those is made: what drafts cost is counted from it, and believed too dear it would never be made."""
PLAIN_EVERY: Final = 16
"""Steps since the last of these after which the doubt is looked at, and again after as many."""

Outcome = tuple[float, float]
"""Tokens committed and microseconds of one request's cycle."""


@dataclass(slots=True)
class Stretch:
    """Consecutive cycles of one request, summed by option."""

    cycles: int = 0
    requests: int = 0  # that shared its steps
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
        self._ahead = [0.0] * len(OPTIONS)  # of the one in force, in steps that verify nothing

    @property
    def advantage(self) -> float:
        """Time of the best fixed arm over the policy's on recent stretches; above 1 is ahead."""
        best = min(self._needed[i] for i in self._fixed)
        return best / self._needed[0] if self._needed[0] > 0 else 1.0

    def add(
        self, stretch: Stretch, committed: float, outcomes: tuple[Outcome, ...], batch: int = 1
    ) -> None:
        """Add one cycle to ``stretch`` and judge when that is full. Mutates both.

        Args:
            committed: tokens the cycle really committed.
            outcomes: what each of ``OPTIONS`` would have done, in that order.
            batch: requests that shared the step.
        """
        stretch.cycles += 1
        stretch.requests += batch
        stretch.tokens += committed
        for index, (tokens, us) in enumerate(outcomes):
            stretch.committed[index] += tokens
            stretch.time[index] += us
        if stretch.cycles >= STRETCH:
            self._close(stretch)

    def _close(self, stretch: Stretch) -> None:
        plain = stretch.time[_NONE] / stretch.cycles * (stretch.requests / stretch.cycles)
        needed = [
            stretch.tokens * time / (committed * plain)
            for time, committed in zip(stretch.time, stretch.committed, strict=True)
        ]
        for index, steps in enumerate(needed):
            self._needed[index] = DECAY * self._needed[index] + steps
            stretch.committed[index] = stretch.time[index] = 0.0
        stretch.cycles, stretch.requests, stretch.tokens = 0, 0, 0.0
        self._judge(needed)

    def _judge(self, needed: list[float]) -> None:
        mine = needed[OPTIONS.index(self.in_force)]
        for index in (_POLICY, *self._fixed):
            theirs = needed[index] if index == _POLICY else needed[index] * (1.0 + TOLERANCE)
            self._ahead[index] = max(self._ahead[index] + mine - theirs, 0.0)
        best = max(self._fixed, key=self._ahead.__getitem__)
        if self.in_force != "policy" and self._ahead[_POLICY] > EVIDENCE:
            best = _POLICY
        if self._ahead[best] > EVIDENCE:
            self.falls += self.in_force == "policy"
            self.in_force = OPTIONS[best]
            self._ahead = [0.0] * len(OPTIONS)


_POLICY: Final = OPTIONS.index("policy")
_NONE: Final = OPTIONS.index("none")
