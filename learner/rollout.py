"""What becomes of a scope's winners: compared with the champion first, then promoted or dropped.

A function of what it is told, in its order: where the aliases stand, which candidates are
registered, the rounds that workers played. It moves nothing itself; :mod:`learner.rollouts` carries
out what it says.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import astuple, dataclass, field
from typing import Any, Final

from learner.checkpoint import Arrays, under, within
from learner.comparison import SHARE, Comparison, Kind, Outcome
from learner.published import Publication
from learner.registry import Standing
from learner.settings import LearnerSettings

AGAIN_SECONDS: Final = 3_600.0
"""A version that was on trial is not tried again sooner against the same champion: the offline
gate, which found it better once, may do so every minute."""
REST_SECONDS: Final = 3_600.0
"""After a champion was rolled back nothing is tried for a while: two that are nearly alike would
else go to and fro."""


@dataclass(frozen=True)
class Ended:
    """A comparison that is over, and how."""

    one: Comparison
    outcome: Outcome


@dataclass
class Rollout:
    """One scope: its champion as last seen, the comparison that is on, and its outcome while that
    is being carried out.

    ``asked`` is the version that alias ``trial`` named last, ``tried`` when a version's trial
    against a champion ended, in seconds since the epoch, ``said`` the last move in a sentence.
    Nothing is tried before ``rests_until``. ``closed`` is, while the scope is another learner's,
    the number of the publication that a move has ended. ``verdicts`` counts, since the process
    began, how comparisons ended.
    """

    champion: int = 0
    asked: int = 0
    closed: int = 0
    said: str = ""
    rests_until: float = 0.0
    tried: dict[tuple[int, int], float] = field(default_factory=dict)
    one: Comparison | None = None
    outcome: Outcome | None = None
    verdicts: Counter[str] = field(default_factory=Counter)

    def begin(self, kind: Kind, version: int, over: int, now: float) -> None:
        """Compare ``version`` with champion ``over`` from now on. Mutates."""
        self.one, self.outcome = Comparison(kind, version, over, heard_at=now), None
        what = "on trial against" if kind == "trial" else "watched in comparison with"
        mine, other = (version, over) if kind == "trial" else (over, version)
        self.said = f"version {mine} is {what} version {other}"

    def end(self, outcome: Outcome, now: float) -> Ended | None:
        """Stop comparing, if anything is compared. Mutates."""
        one, self.one, self.outcome = self.one, None, None
        if one is None:
            return None
        self.verdicts[outcome.word] += 1
        self.tried = {key: at for key, at in self.tried.items() if abs(now - at) < AGAIN_SECONDS}
        if one.kind == "trial":
            self.tried[one.version, one.over] = now
        elif outcome.word == "roll back":
            self.tried[one.over, one.version] = now
            self.rests_until = now + REST_SECONDS
        self.said = f"version {_subject(one)}: {outcome.why}"
        return Ended(one, outcome)

    def decide(self, settings: LearnerSettings) -> Outcome | None:
        """The outcome, where the figures have just come to one. Mutates."""
        if self.one is None or self.outcome is not None:
            return None
        self.outcome = self.one.outcome(settings)
        if self.outcome is None:
            self.one.share = self.one.wider()
        else:
            self.said = f"version {_subject(self.one)}: {self.outcome.why}"
        return self.outcome

    def follow(self, standing: Standing, now: float) -> Ended | None:
        """Take in where the aliases stand; what has ended by that. Mutates.

        Whoever moved it: a champion newer than the one before is watched, and one that is older was
        gone back to, which settles the matter.
        """
        before, self.champion = self.champion, standing.champion or 0
        why, ended = self._moved(standing), None
        if why and self.one is not None:
            done = self.outcome if self.champion == self.one.version else None
            ended = self.end(done or Outcome("give up", why), now)
        if standing.pinned is None and self.champion:
            if self.champion > before > 0:
                self.begin("watch", before, self.champion, now)
            self._heed(standing.trial or 0, now)
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
        if not asked and one.version == self.asked:
            return "alias trial was taken away"
        return ""

    def _heed(self, asked: int, now: float) -> None:
        """A person's alias ``trial`` puts its version on trial, once."""
        on = 0 if self.one is None else self.one.version
        if asked not in (0, self.asked, self.champion, on):
            self.begin("trial", asked, self.champion, now)
        self.asked = asked

    def trail(self, standing: Standing, last: Publication | None, now: float) -> None:
        """Do as the policy topic says: the scope is another learner's. Mutates."""
        self.champion = standing.champion or 0
        if self.one is not None and self.one.over != self.champion:
            self.closed, self.one = self.one.number, None
        over = last is None or last.number <= self.closed or last.version == self.champion
        if last is None or over or not self.champion:
            self.one = self.outcome = None
            return
        if self.one is None or self.one.version != last.version:
            # of an older version than the champion is, only a former one is watched
            asked = standing.trial == last.version
            kind: Kind = "trial" if asked or last.version > self.champion else "watch"
            self.begin(kind, last.version, self.champion, now)
        assert self.one is not None
        self.outcome, self.one.share = None, last.share or SHARE
        self.one.published(last.number, now)
        if standing.trial == last.version:
            self.asked = last.version

    def may_try(self, version: int, now: float) -> bool:
        """Whether ``version`` may go on trial now."""
        tried = self.tried.get((version, self.champion), -math.inf)
        return self.one is None and abs(now - tried) >= AGAIN_SECONDS and not self.rests(now)

    def rests(self, now: float) -> bool:
        """Whether nothing is tried for a while; what a clock said that was far ahead is no word."""
        return 0.0 < self.rests_until - now < 2.0 * REST_SECONDS

    def snapshot(self) -> tuple[Arrays, dict[str, Any]]:
        """Everything :meth:`restored` needs."""
        arrays, told = ({}, None) if self.one is None else self.one.snapshot()
        numbers = {name: getattr(self, name) for name in _PLAIN}
        outcome = None if self.outcome is None else list(astuple(self.outcome))
        tried = [[version, over, at] for (version, over), at in self.tried.items()]
        return under("one.", arrays), {**numbers, "one": told, "outcome": outcome, "tried": tried}

    @classmethod
    def restored(cls, snapshot: tuple[Arrays, dict[str, Any]]) -> Rollout:
        """The rollout as it was.

        Raises:
            KeyError, ValueError, TypeError: the snapshot is not of this version.
        """
        arrays, told = snapshot
        one, outcome = told["one"], told["outcome"]
        return cls(
            **{name: told[name] for name in _PLAIN},
            tried={(int(v), int(over)): float(at) for v, over, at in told["tried"]},
            one=None if one is None else Comparison.restored((within("one.", arrays), one)),
            outcome=None if outcome is None else Outcome(*outcome),
        )


_PLAIN: Final = ("champion", "asked", "closed", "said", "rests_until")


def _subject(one: Comparison) -> int:
    """The newer of the two: what was put to the test."""
    return one.version if one.kind == "trial" else one.over
