"""A policy compared with the champion by rounds that workers play, and with the first policy.

On trial is what won the gate; on watch is the former champion, against the one that took its place.
The labels of all traffic look for the gain: they know most of a difference, cycle by cycle, but
labels and prices may be biased. Live rounds look for harm: of the same sessions they are one pair,
in which both variants had the same traffic. The interval is of the time at the costs in force,
which a pause of the machine does not touch; it is believed where wall time is on the same side,
since a cost table may be wrong about one of the two.

An interval decides: what cannot be told leaves the champion where it is. The first policy is the
fixed anchor: whoever is promoted has excluded the same loss against it.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import MutableSequence
from dataclasses import dataclass, field
from typing import Annotated, Final, Literal

import numpy as np
from pydantic import PlainValidator

from decoder.contracts.bundle import CHAMPION, FIRST, TRIAL
from decoder.contracts.trials import Round
from learner.evaluation.effect import (
    COST,
    UNKNOWN,
    WALL,
    WIDTH,
    Effect,
    effect_in,
    pair_of,
    pairs_to_tell,
    unit_of,
)
from learner.settings import LearnerSettings

SHARE: Final = 0.2
WIDER: Final = 0.5
"""Shares of a worker's steps: at first, and once a loss of ``WIDER_MARGINS`` margins is excluded.
All of them are the promoted policy's. What a slower policy costs is share by time, and a trial at
half the share takes twice as long: with a tenth, one of two hundred requests waited for most of
what it brought."""
WIDER_MARGINS: Final = 2.0
GAP_SECONDS: Final = 60.0
"""A pause of the traffic counts as no more: a night without any decides nothing."""
MOST: Final = 50_000
"""Pairs kept, two megabytes."""
LIVES: Final = 4_096
"""Workers whose last unit is known, the ones heard of last."""

Kind = Literal["trial", "watch"]
Word = Literal["promote", "drop", "cannot tell", "roll back", "keep", "give up"]
Key = tuple[str, int]
Numbers = Annotated[MutableSequence[float], PlainValidator(lambda told: array("d", told.tolist()))]


@dataclass(frozen=True)
class Outcome:
    """How a comparison ended, and why in a sentence.

    ``to_first``: what takes the champion's place is the first policy, not the one compared.
    """

    word: Word
    why: str
    to_first: bool = False


@dataclass
class Table:
    """Pairs, WIDTH numbers each, as in ``learner.evaluation.effect``: the rounds of a worker's
    unit are added up in its row, ``last`` says which that is by worker."""

    numbers: Numbers = field(default_factory=lambda: array("d"))
    last: dict[str, list[int]] = field(default_factory=dict)  # unit and row

    def __len__(self) -> int:
        return len(self.numbers) // WIDTH

    def add(self, key: Key, numbers: tuple[float, ...]) -> None:
        """Take in a round of unit ``key``. Mutates."""
        life, unit = key
        known, row = self.last.pop(life, (None, 0))
        if known != unit:
            row = len(self)
            if row >= MOST:
                return
            self.numbers.extend([0.0] * WIDTH)
        self.last[life] = [unit, row]
        if len(self.last) > LIVES:
            del self.last[next(iter(self.last))]
        for place, number in enumerate(numbers, row * WIDTH):
            self.numbers[place] += number

    def effects(self) -> tuple[Effect, Effect]:
        """By the costs in force, and by wall time."""
        pairs = np.array(self.numbers, np.float64).reshape(-1, WIDTH)
        return effect_in(pairs, COST), effect_in(pairs, WALL)


@dataclass(frozen=True)
class Figures:
    """Rate of the one compared over the champion's, at the costs in force and by wall time; and,
    where workers play the first policy, that of the policy on trial over the first's, or on watch
    of the first over the champion's."""

    cost: Effect = UNKNOWN
    wall: Effect = UNKNOWN
    first: Effect = UNKNOWN
    first_wall: Effect = UNKNOWN


@dataclass
class Comparison:
    """Version ``version`` against champion ``over``.

    ``since`` is the number of its first publication and ``number`` that of the last, 0 before it
    is published. ``seconds`` counts time with traffic since then, rounds or drafts, and ``at`` is
    when the last were read, in seconds since the epoch: workers' clocks may be wrong either way.
    ``labels`` is the rate of the policy on trial over the champion's by the labels of all traffic;
    where nobody judges it by them, live rounds alone have to show that it is faster.
    """

    kind: Kind
    version: int
    over: int
    share: float = SHARE
    since: int = 0
    number: int = 0
    seconds: float = 0.0
    at: float = 0.0
    labels: Effect = UNKNOWN
    pairs: Table = field(default_factory=Table)
    firsts: Table = field(default_factory=Table)

    @property
    def subject(self) -> int:
        """The newer version of the two: what is put to the test."""
        return self.version if self.kind == "trial" else self.over

    @property
    def other(self) -> int:
        """The version that it is compared with."""
        return self.over if self.kind == "trial" else self.version

    @property
    def played(self) -> int:
        """Pairs so far."""
        return len(self.pairs)

    def published(self, number: int, now: float) -> None:
        """It lies on the policy topic as publication ``number``. Mutates."""
        if not self.number:
            self.seconds, self.at = 0.0, now
        self.since, self.number = self.since or number, number

    def take(self, played: Round, now: float) -> None:
        """Take in a round, each once, if it was played with these two. Mutates.

        Args:
            now: when it is read, in seconds since the epoch.
        """
        champion, mine = played.block(CHAMPION), played.block(TRIAL)
        if champion is None or champion.version != self.over:
            return
        first, key = played.block(FIRST), unit_of(played)
        ours = mine is not None and mine.version == self.version
        if ours and mine is not None and 0 < self.since <= mine.publication:
            if numbers := pair_of(mine, champion):
                self.pairs.add(key, numbers)
            self.hear(now)
        elif self.kind == "trial":
            return
        numbers = pair_of(mine, first) if self.kind == "trial" else pair_of(first, champion)
        if numbers:
            self.firsts.add(key, numbers)

    def hear(self, now: float) -> None:
        """Something of the scope was read at ``now``, seconds since the epoch. Mutates."""
        self.seconds += min(max(now - self.at, 0.0), GAP_SECONDS)
        self.at = now

    def figures(self) -> Figures:
        """What the pairs say so far."""
        return Figures(*self.pairs.effects(), *self.firsts.effects())

    def outcome(self, settings: LearnerSettings) -> Outcome | None:
        """How it ends, if it ends now."""
        over = self.seconds >= 60.0 * settings.trial_minutes or self.played >= MOST
        if self.number == 0:
            return Outcome("give up", "its bundle could not be published") if over else None
        return (_of_trial if self.kind == "trial" else _of_watch)(self, settings, over)

    def wider(self, settings: LearnerSettings) -> float:
        """The share that is its due, while :meth:`outcome` says nothing."""
        if self.kind == "watch" or self.share >= WIDER:
            return self.share
        harmless = self.figures().cost.low > 1.0 - WIDER_MARGINS * settings.trial_margin
        return WIDER if harmless else SHARE

    def reach(self, settings: LearnerSettings) -> str:
        """What it can tell in its time, in words; "" while that is not known."""
        found = self.figures().cost
        if not (math.isfinite(found.high) and self.seconds):
            return ""
        minutes = self.seconds / 60.0 / found.pairs * pairs_to_tell(found, settings.trial_margin)
        return f"to tell {settings.trial_margin:.0%} takes {minutes:.0f} minutes of such rounds"


def _of_trial(one: Comparison, settings: LearnerSettings, over: bool) -> Outcome | None:
    found, labels, floor = one.figures(), one.labels, 1.0 - settings.trial_margin
    why = f"{told(found)}, {_said(labels, CHAMPION, 'sessions')} by labels"
    if found.cost.high < 1.0 and found.wall.ratio < 1.0:
        return Outcome("drop", f"slower than the champion: {why}")
    if labels.high < 1.0:
        return Outcome("drop", f"slower than the champion by the labels of all traffic: {why}")
    harmless = found.cost.low > floor and found.wall.ratio > floor
    anchored = settings.start == "first" and found.first.pairs > 0
    if anchored:
        harmless &= found.first.low > floor and found.first_wall.ratio > floor
        why += f", {_said(found.first, FIRST)}"
    # a busy trial excludes the margin long before it sees that a policy is slower by less
    faster = labels.low if labels.pairs else found.cost.low
    if harmless and faster > 1.0 and found.cost.ratio > 1.0:
        margin = f"a loss of {settings.trial_margin:.0%} is excluded"
        return Outcome("promote", f"faster, and live {margin}: {why}")
    if not over:
        return None
    if not one.played:
        return Outcome("cannot tell", "no worker played it: the champion stays")
    return Outcome("cannot tell", f"cannot tell in its time: {why}; {one.reach(settings)}")


def _of_watch(one: Comparison, settings: LearnerSettings, over: bool) -> Outcome | None:
    found = one.figures()
    cost, wall = found.cost, found.wall
    former = f"version {one.version} before it, which had {told(found)}"
    if cost.low > 1.0 and wall.ratio > 1.0:
        return Outcome("roll back", f"slower than {former}")
    first = settings.start == "first" and found.first.low > 1.0
    if first and found.first_wall.ratio > 1.0:
        # the one before may be slower still: to go back to it would change one fault for another
        why = f"slower than the first policy, which had {_said(found.first, CHAMPION)}"
        return Outcome("roll back", why, True)
    ceiling = 1.0 / (1.0 - settings.trial_margin)
    if cost.high < ceiling and wall.ratio < ceiling:
        return Outcome("keep", f"no slower than {former}")
    return Outcome("keep", f"in its time not found slower than {former}") if over else None


def told(found: Figures) -> str:
    """The figures in words."""
    return f"{_said(found.cost, CHAMPION)}, {found.wall.ratio:.3f} by wall time"


def _said(one: Effect, of: str, unit: str = "pairs") -> str:
    if not one.pairs:
        return f"no {unit}"
    bounds = f" ({one.low:.3f} to {one.high:.3f})" if math.isfinite(one.high) else ""
    return f"rate {one.ratio:.3f}{bounds} of the {of}'s in {one.pairs} {unit}"
