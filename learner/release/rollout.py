"""What is compared with a scope's champion: what alias ``trial`` names, and after the champion has
gone up the one before it.

A function of where the aliases stand and of the rounds that workers play, in their order; so every
learner of a scope knows the same. :mod:`learner.release.rollouts` publishes and moves what it says.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from decoder.contracts.bundle import CHAMPION, FIRST, TRIAL
from decoder.contracts.trials import Round
from learner.release.comparison import Comparison, Kind, Outcome
from learner.release.registry import Standing
from learner.settings import LearnerSettings

EARLY: Final = 256
"""Rounds kept until their trial is known, a kilobyte each at most: a learner looks at aliases and
policies every few seconds. Of a fleet that plays more meanwhile the newest count."""


@dataclass
class Rollout:
    """One scope: its champion as last seen, the comparison that is on, and its outcome while that
    is being carried out.

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

    def begin(self, kind: Kind, version: int, over: int, now: float) -> None:
        """Compare ``version`` with champion ``over`` from now on. Mutates."""
        self.one, self.outcome = Comparison(kind, version, over, at=now), None
        what = "on trial against" if kind == "trial" else "watched in comparison with"
        self.said = f"version {self.one.subject} is {what} version {self.one.other}"

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
        if one is not None and known and self.outcome is None:
            one.take(played, now)
        if mine is not None and not (one is not None and known and mine.version == one.version):
            sides = (played.block(side) for side in (CHAMPION, TRIAL, FIRST))
            blocks = tuple(b.model_copy(update={"groups": ()}) for b in sides if b is not None)
            kept = played.model_copy(update={"blocks": blocks})
            self.early = [*self.early, kept][-EARLY:]

    def end(self, outcome: Outcome) -> None:
        """Stop comparing, if anything is compared. Mutates."""
        if self.one is not None:
            self.said = f"version {self.one.subject}: {outcome.why}"
        self.one = self.outcome = None

    def decide(self, settings: LearnerSettings) -> Outcome | None:
        """The outcome, where the figures have just come to one. Mutates."""
        if self.one is None or self.outcome is not None:
            return None
        self.outcome = self.one.outcome(settings)
        if self.outcome is None:
            self.one.share = self.one.wider()
        else:
            self.said = f"version {self.one.subject}: {self.outcome.why}"
        return self.outcome

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
            self.end(ended[1])
        was, self.pinned = self.pinned, standing.pinned or 0
        if self.pinned != was:
            pinned = f"version {self.pinned} is pinned"
            self.said = pinned if self.pinned else f"version {was} is no longer pinned"
        if standing.pinned is None and self.champion:
            if self.champion > before > 0:
                self.begin("watch", before, self.champion, now)
            on = 0 if self.one is None else self.one.version
            if asked not in (0, self.asked, self.champion, on):
                self.begin("trial", asked, self.champion, now)
            self.asked = asked
        return ended

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
