"""State machine of what is compared with a scope's champion: alias ``trial``'s version, and after a
promotion the champion before it.

Its state is a function of where the aliases stand and of the rounds that workers play, in their
order, so every learner of a scope comes to the same. :mod:`.rollouts` publishes and moves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from decoder.contracts.bundle import CHAMPION, FIRST, TRIAL
from decoder.contracts.trials import Round
from learner.release.comparison import Comparison, Kind, Outcome
from learner.release.registry import Standing
from learner.settings import LearnerSettings

EARLY: Final = 256
"""Rounds kept until their trial is known, a kilobyte each at most: a learner looks at aliases and
policies every few seconds. Of a fleet that plays more meanwhile the newest count."""
State = Enum("State", "IDLE COMPARING ENDING")
Event = Enum("Event", "BEGUN DECIDED FAILED OVERRULED CARRIED_OUT GONE RESUMED")
TRANSITIONS: Final[Mapping[tuple[State, Event], State]] = {
    (State.IDLE, Event.BEGUN): State.COMPARING,  # an alias names what is to be compared
    (State.COMPARING, Event.BEGUN): State.COMPARING,  # and another comparison is over by that
    (State.COMPARING, Event.DECIDED): State.ENDING,  # the figures come to an outcome
    (State.COMPARING, Event.FAILED): State.ENDING,  # the figures cannot be computed
    (State.ENDING, Event.FAILED): State.ENDING,
    (State.COMPARING, Event.OVERRULED): State.IDLE,  # somebody has moved an alias
    (State.ENDING, Event.OVERRULED): State.IDLE,
    (State.ENDING, Event.CARRIED_OUT): State.IDLE,  # or refused for a person's sake
    (State.COMPARING, Event.GONE): State.IDLE,  # rollouts are off, or another holder has ended it
    (State.ENDING, Event.GONE): State.IDLE,
    (State.COMPARING, Event.RESUMED): State.COMPARING,  # by a process that starts
    (State.ENDING, Event.RESUMED): State.COMPARING,  # another learner may have been at it since
}
"""Where a scope goes. Comparing is left for ending while its holder has the registry carry out the
outcome; a lease that is lost meanwhile leaves it there, for the next holder."""
FAULT: Final = Outcome("give up", "its figures could not be told, which is a fault of the learner")


@dataclass
class Rollout:
    """One scope: its champion as last seen, the comparison that is on, and its outcome while that
    is being carried out. ``one`` and ``outcome`` change in :meth:`step` alone.

    ``asked`` and ``pinned`` are what aliases trial and pinned named last, 0 for nothing; ``said``
    is the last move in a sentence. ``verdicts`` counts how comparisons that were ours ended.
    ``early`` holds the newest rounds that were read before alias or publication of what they tried.
    """

    champion: int = 0
    asked: int = 0
    pinned: int = 0
    said: str = ""
    one: Comparison | None = None
    outcome: Outcome | None = None
    verdicts: Counter[str] = field(default_factory=Counter)
    early: list[Round] = field(default_factory=list)

    @property
    def state(self) -> State:
        """One of :data:`TRANSITIONS`."""
        if self.one is None:
            return State.IDLE
        return State.COMPARING if self.outcome is None else State.ENDING

    def step(
        self, event: Event, outcome: Outcome | None = None, one: Comparison | None = None
    ) -> None:
        """Go where ``event`` leads. Mutates.

        Args:
            outcome: how the comparison ends, of the events that end it.
            one: what is compared from now on.

        Raises:
            KeyError: nothing leads anywhere by that from here.
        """
        state = TRANSITIONS[self.state, event]
        if event is Event.BEGUN and one is not None:
            what = "on trial against" if one.kind == "trial" else "watched in comparison with"
            self.said = f"version {one.subject} is {what} version {one.other}"
        elif outcome is not None and self.one is not None:
            self.said = f"version {self.one.subject}: {outcome.why}"
        self.one = None if state is State.IDLE else one or self.one
        self.outcome = outcome if state is State.ENDING else None

    def published(self, number: int, now: float, since: int = 0) -> None:
        """What is compared lies on the policy topic as publication ``number``, and has since
        ``since``, where that is known; rounds of it that were read before are taken in. Mutates."""
        if self.one is None:
            return
        self.one.published(since or number, now)
        self.one.published(number, now)
        early, self.early = self.early, []
        for each in early:
            self.one.take(each, now)

    def take(self, played: Round, now: float) -> None:
        """Take in a round read at ``now``, seconds since the epoch. One whose trial is not known
        yet waits until it is: aliases and publications are read apart from rounds. Mutates."""
        one, mine = self.one, played.block(TRIAL)
        known = one is not None and one.since > 0
        if one is not None and known and self.state is State.COMPARING:
            one.take(played, now)
        if mine is not None and not (one is not None and known and mine.version == one.version):
            sides = (played.block(side) for side in (CHAMPION, TRIAL, FIRST))
            blocks = tuple(b.model_copy(update={"groups": ()}) for b in sides if b is not None)
            kept = played.model_copy(update={"blocks": blocks})
            self.early = [*self.early, kept][-EARLY:]

    def decide(self, settings: LearnerSettings) -> bool:
        """Whether the figures have just come to an outcome. Mutates."""
        if self.one is None or self.state is not State.COMPARING:
            return False
        outcome = self.one.outcome(settings)
        if outcome is None:
            self.one.share = self.one.wider(settings)
            return False
        self.step(Event.DECIDED, outcome)
        return True

    def fail(self) -> None:
        """End a comparison whose figures cannot be computed. Mutates."""
        one = self.one
        if one is not None:
            bare = Comparison(one.kind, one.version, one.over, one.share, one.since, one.number)
            self.step(Event.FAILED, FAULT, bare)  # without its pairs, which may be what failed

    def follow(self, standing: Standing, now: float) -> tuple[Comparison, Outcome] | None:
        """Take in where the aliases stand; what has ended by that, and how. Mutates.

        Whoever moved it: a champion newer than the one before is watched, and one that is older was
        gone back to, which settles the matter. A version under alias ``trial`` is tried once.
        """
        before, self.champion = self.champion, standing.champion or 0
        one, asked, ended = self.one, standing.trial or 0, None
        why = self._moved(standing)
        if why and one is not None:
            done = self.outcome if self.champion == one.version else None
            ended = one, done or Outcome("give up", why)
            self.step(Event.OVERRULED, ended[1])
        was, self.pinned = self.pinned, standing.pinned or 0
        if self.pinned != was:
            pinned = f"version {self.pinned} is pinned"
            self.said = pinned if self.pinned else f"version {was} is no longer pinned"
        if standing.pinned is None and self.champion:
            if self.champion > before > 0:
                self._begin("watch", before, now)
            on = 0 if self.one is None else self.one.version
            if asked not in (0, self.asked, self.champion, on):
                self._begin("trial", asked, now)
            self.asked = asked
        return ended

    def _begin(self, kind: Kind, version: int, now: float) -> None:
        self.step(Event.BEGUN, one=Comparison(kind, version, self.champion, at=now))

    def _moved(self, standing: Standing) -> str:
        """Why the comparison that is on is over, by what became of the aliases."""
        one, asked = self.one, standing.trial or 0
        if one is None:
            return ""
        if standing.pinned is not None:
            return f"version {standing.pinned} is pinned"
        if self.champion != one.over:
            return f"version {self.champion} was made champion"
        if asked not in (0, self.asked, self.champion, one.version):
            return f"version {asked} was put on trial"
        return "alias trial was taken away" if not asked and one.version == self.asked else ""
