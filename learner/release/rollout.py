"""State machine of a scope's comparison with its champion: of alias ``trial``'s version, and after
a promotion of the former champion.

Its state is a function of the aliases and of the rounds that workers play, in order, so that all
learners reach the same state. :mod:`.rollouts` publishes and moves aliases.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Final

from pydantic import Field

from decoder.contracts.bundle import CHAMPION, FIRST, TRIAL
from decoder.contracts.trials import Round
from learner.release.comparison import Comparison, Kind, Outcome
from learner.release.registry import AliasState
from learner.settings import LearnerSettings

MAX_EARLY: Final = 256
"""Rounds kept until their trial is known, a kilobyte each: a learner reads aliases and policies
every few seconds."""
State = Enum("State", "IDLE COMPARING ENDING")
Event = Enum("Event", "BEGUN DECIDED FAILED OVERRULED CARRIED_OUT GONE RESUMED")
TRANSITIONS: Final[Mapping[tuple[State, Event], State]] = {
    (State.IDLE, Event.BEGUN): State.COMPARING,  # an alias names what is to be compared
    (State.COMPARING, Event.BEGUN): State.COMPARING,  # which ends another comparison
    (State.COMPARING, Event.DECIDED): State.ENDING,
    (State.COMPARING, Event.FAILED): State.ENDING,  # the figures cannot be computed
    (State.ENDING, Event.FAILED): State.ENDING,
    (State.COMPARING, Event.OVERRULED): State.IDLE,  # somebody has moved an alias
    (State.ENDING, Event.OVERRULED): State.IDLE,
    (State.ENDING, Event.CARRIED_OUT): State.IDLE,  # or refused: a person overrides it
    (State.COMPARING, Event.GONE): State.IDLE,  # rollouts are off, or another holder has ended it
    (State.ENDING, Event.GONE): State.IDLE,
    (State.COMPARING, Event.RESUMED): State.COMPARING,  # by a starting process
    (State.ENDING, Event.RESUMED): State.COMPARING,  # another learner may have acted since
}
"""ENDING lasts while the lease's holder has the registry carry out the outcome, and until the next
holder does if the lease is lost."""
FAULT: Final = Outcome(
    "give up", "its figures could not be computed, which is a fault of the learner"
)


@dataclass
class Rollout:
    """A scope's last seen champion, its current comparison, and the outcome while it is carried
    out; the latter two change in :meth:`step` only.

    ``asked`` and ``pinned`` are the last versions of aliases trial and pinned, 0 for none;
    ``summary`` describes the last step. ``verdicts`` counts ends of our comparisons. ``early``
    holds the newest rounds read before the alias or publication of their trial.
    """

    champion: int = 0
    asked: int = 0
    pinned: int = 0
    summary: Annotated[str, Field(alias="said")] = ""
    comparison: Annotated[Comparison | None, Field(alias="one")] = None
    outcome: Outcome | None = None
    verdicts: Counter[str] = field(default_factory=Counter)
    early: list[Round] = field(default_factory=list)

    @property
    def state(self) -> State:
        """One of :data:`TRANSITIONS`."""
        if self.comparison is None:
            return State.IDLE
        return State.COMPARING if self.outcome is None else State.ENDING

    def step(
        self, event: Event, outcome: Outcome | None = None, comparison: Comparison | None = None
    ) -> None:
        """Apply ``event``. Mutates.

        Args:
            outcome: of the comparison, for events that end it.
            comparison: the new comparison.

        Raises:
            KeyError: the event is invalid in this state.
        """
        state = TRANSITIONS[self.state, event]
        if event is Event.BEGUN and comparison is not None:
            what = (
                "on trial against" if comparison.kind == "trial" else "watched in comparison with"
            )
            self.summary = f"version {comparison.subject} is {what} version {comparison.other}"
        elif outcome is not None and self.comparison is not None:
            self.summary = f"version {self.comparison.subject}: {outcome.why}"
        self.comparison = None if state is State.IDLE else comparison or self.comparison
        self.outcome = outcome if state is State.ENDING else None

    def acknowledge(self, number: int, now: float, since: int = 0) -> None:
        """Take in that the compared policy is published with ``number``, and since the publication
        ``since``, if known; early rounds are applied. Mutates."""
        if self.comparison is None:
            return
        self.comparison.acknowledge(since or number, now)
        self.comparison.acknowledge(number, now)
        early, self.early = self.early, []
        for each in early:
            self.comparison.update(each, now)

    def update(self, played: Round, now: float) -> None:
        """Take in a round, read at ``now`` seconds since the epoch. A round of an unknown trial is
        kept: aliases, publications and rounds are read independently. Mutates."""
        current, mine = self.comparison, played.block(TRIAL)
        known = current is not None and current.since > 0
        if current is not None and known and self.state is State.COMPARING:
            current.update(played, now)
        if mine is not None and not (
            current is not None and known and mine.version == current.version
        ):
            variants = (played.block(role) for role in (CHAMPION, TRIAL, FIRST))
            blocks = tuple(b.model_copy(update={"groups": ()}) for b in variants if b is not None)
            kept = played.model_copy(update={"blocks": blocks})
            self.early = [*self.early, kept][-MAX_EARLY:]

    def decide(self, settings: LearnerSettings) -> bool:
        """Whether the comparison has just been decided. Mutates."""
        if self.comparison is None or self.state is not State.COMPARING:
            return False
        outcome = self.comparison.outcome(settings)
        if outcome is None:
            self.comparison.share = self.comparison.due_share(settings)
            return False
        self.step(Event.DECIDED, outcome)
        return True

    def fail(self) -> None:
        """End a comparison whose figures cannot be computed. Mutates."""
        if (c := self.comparison) is not None:  # without its pairs, which may be the cause
            bare = Comparison(c.kind, c.version, c.over, c.share, c.since, c.number)
            self.step(Event.FAILED, FAULT, bare)

    def follow(self, aliases: AliasState, now: float) -> tuple[Comparison, Outcome] | None:
        """Take in the aliases; the comparison that they end, and its outcome. Mutates.

        Whoever moved it, a newer champion is watched; an older one is a roll-back, which is final.
        A version under alias ``trial`` is tried once.
        """
        before, self.champion = self.champion, aliases.champion or 0
        current, asked, ended = self.comparison, aliases.trial or 0, None
        why = self._overruled_by(aliases)
        if why and current is not None:
            done = self.outcome if self.champion == current.version else None
            ended = current, done or Outcome("give up", why)
            self.step(Event.OVERRULED, ended[1])
        was, self.pinned = self.pinned, aliases.pinned or 0
        if self.pinned != was:
            pinned = f"version {self.pinned} is pinned"
            self.summary = pinned if self.pinned else f"version {was} is no longer pinned"
        if aliases.pinned is None and self.champion:
            if self.champion > before > 0:
                self._begin("watch", before, now)
            running = 0 if self.comparison is None else self.comparison.version
            if asked not in (0, self.asked, self.champion, running):
                self._begin("trial", asked, now)
            self.asked = asked
        return ended

    def _begin(self, kind: Kind, version: int, now: float) -> None:
        self.step(Event.BEGUN, comparison=Comparison(kind, version, self.champion, at=now))

    def _overruled_by(self, aliases: AliasState) -> str:
        """Why the aliases end the comparison, or ""."""
        current, asked = self.comparison, aliases.trial or 0
        if current is None:
            return ""
        if aliases.pinned is not None:
            return f"version {aliases.pinned} is pinned"
        if self.champion != current.over:
            return f"version {self.champion} was made champion"
        if asked not in (0, self.asked, self.champion, current.version):
            return f"version {asked} was put on trial"
        removed = not asked and current.version == self.asked
        return "alias trial was taken away" if removed else ""
