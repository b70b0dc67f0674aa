"""A policy compared with the champion, by rounds that workers play, and what the figures say.

On trial is what won the gate; on watch is the former champion, against the one that took its place.
Both are paired by rounds: the workers' steps are divided by turns, so every worker counts alike,
and each round holds the same traffic for both. The interval is of the time at the costs in force,
which a pause of the machine does not touch. It is believed where wall time is on the same side: by
a cost table that is wrong about one of the two nothing is promoted, and nothing rolled back.
"""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from decoder.contracts.bundle import CHAMPION, FIRST, TRIAL
from decoder.contracts.trials import Block, Round
from decoder.trial.effect import UNKNOWN, Effect, effect
from learner.settings import LearnerSettings

SHARE: Final = 0.1
WIDER: Final = 0.5
"""Shares of a worker's steps: at first, and once enough pairs leave hope."""
ENOUGH: Final = 24
"""Pairs until a trial is widened, or found hopeless: twice what an interval needs."""
LIKELY: Final = 0.5
"""Level of the interval that tells hope: at even odds, since only its time is at stake."""
GAP_SECONDS: Final = 60.0
"""A pause between rounds counts as no more: a night without traffic decides nothing."""
STEP_SECONDS: Final = 10.0
"""The same between records of drafts."""
QUIET_SECONDS: Final = 180.0
"""Traffic without a pair after which nobody plays: a round takes seconds, ten times as long where
a side has a tenth of the steps."""
MOST: Final = 50_000
"""Pairs kept, two megabytes: where blocks of a few tokens differ by as much as they have, they tell
one per cent."""
POINTS: Final = 40
"""Of the picture of a comparison."""
WIDTH: Final = 6
"""Numbers of a pair."""

Kind = Literal["trial", "watch"]
Word = Literal["promote", "drop", "roll back", "keep", "give up"]


@dataclass(frozen=True)
class Outcome:
    """How a comparison ended, and why in a sentence.

    ``to_first``: what takes the champion's place is the first policy, not the one compared.
    """

    word: Word
    why: str
    to_first: bool = False


@dataclass(frozen=True)
class Figures:
    """Rate of the one compared over the champion's, at the costs in force and by wall time; and the
    first policy's, where workers play it."""

    cost: Effect = UNKNOWN
    wall: Effect = UNKNOWN
    first: Effect = UNKNOWN
    first_wall: Effect = UNKNOWN


@dataclass
class Comparison:
    """Version ``version`` against champion ``over``.

    ``since`` is the number of its first publication and ``number`` that of the last, 0 before it
    is published. ``seconds`` counts time with rounds, ``quiet`` traffic since the last pair, and
    ``without`` the champion's rounds since then in which it took no part; ``playable`` says that
    workers play trials, whether this one or not;
    ``played_at`` and ``heard_at`` are when the last were read, in seconds since the epoch: workers'
    clocks may be wrong by any time, either way. A pair is WIDTH numbers on end:
    tokens, wall time and time at the costs in force (microseconds) of the one compared, then of the
    champion.
    """

    kind: Kind
    version: int
    over: int
    share: float = SHARE
    since: int = 0
    number: int = 0
    seconds: float = 0.0
    quiet: float = 0.0
    without: int = 0
    playable: bool = False
    played_at: float = 0.0
    heard_at: float = 0.0
    pairs: array[float] = field(default_factory=lambda: array("d"))
    firsts: array[float] = field(default_factory=lambda: array("d"))
    _figures: tuple[int, int, Figures] = field(
        default=(0, 0, Figures()), init=False, repr=False, compare=False
    )

    @property
    def played(self) -> int:
        """Pairs so far."""
        return len(self.pairs) // WIDTH

    def published(self, number: int, now: float) -> None:
        """It lies on the policy topic as publication ``number``. Mutates."""
        if not self.number:
            self.quiet, self.heard_at = 0.0, now
        self.since, self.number = self.since or number, number

    def take(self, played: Round, now: float) -> None:
        """Take in a round, each once, if it was played with these two. Mutates.

        Args:
            now: when it is read, in seconds since the epoch.
        """
        champion, mine = played.block(CHAMPION), played.block(TRIAL)
        if champion is None or champion.version != self.over or self.played >= MOST:
            return
        first = played.block(FIRST)
        if first is not None and self.kind == "watch" and len(self.firsts) < MOST * WIDTH:
            self.firsts.extend(_pair(first, champion))
        ours = mine is not None and mine.version == self.version
        if mine is None or not ours or not 0 < self.since <= mine.publication:
            self.without += 1
            return
        self.pairs.extend(_pair(mine, champion))
        if self.played_at:
            self.seconds += min(max(now - self.played_at, 0.0), GAP_SECONDS)
        self.played_at = now
        self.quiet, self.without = 0.0, 0

    def hear(self, now: float) -> None:
        """Drafts of the scope were read at ``now``, seconds since the epoch. Mutates."""
        self.quiet += min(max(now - self.heard_at, 0.0), STEP_SECONDS)
        self.heard_at = now

    def figures(self) -> Figures:
        """What the pairs say so far."""
        if self._figures[:2] != (len(self.pairs), len(self.firsts)):
            wall, cost = (_effect(self.pairs, time) for time in (1, 2))
            first_wall, first = (_effect(self.firsts, time) for time in (1, 2))
            found = Figures(cost, wall, first, first_wall)
            self._figures = (len(self.pairs), len(self.firsts), found)
        return self._figures[2]

    def points(self) -> list[tuple[float, float, float, float]]:
        """The comparison over time: seconds since the epoch, ratio, and the interval's ends. Pauses
        are left out, and pairs taken to have come evenly."""
        found = []
        for part in range(1, POINTS + 1):
            pairs = self.played * part // POINTS
            so_far = _effect(self.pairs[: pairs * WIDTH], 2)
            if math.isfinite(so_far.high):
                at = self.played_at - self.seconds * (1.0 - part / POINTS)
                found.append((at, so_far.ratio, so_far.low, so_far.high))
        return found

    def outcome(self, settings: LearnerSettings) -> Outcome | None:
        """How it ends, if it ends now."""
        if self.number == 0:
            late = self.quiet >= QUIET_SECONDS
            return Outcome("give up", "its bundle could not be published") if late else None
        return _of_trial(self, settings) if self.kind == "trial" else _of_watch(self, settings)

    def wider(self) -> float:
        """The share that is its due, while :meth:`outcome` says nothing."""
        enough = self.kind == "trial" and self.played >= ENOUGH
        return max(self.share, WIDER if enough else SHARE)

    def snapshot(self) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        """Everything :meth:`restored` needs."""
        arrays = {name: _table(getattr(self, name)) for name in _TABLES}
        return arrays, {name: getattr(self, name) for name in _NUMBERS}

    @classmethod
    def restored(cls, snapshot: tuple[dict[str, NDArray[Any]], dict[str, Any]]) -> Comparison:
        """The comparison as it was.

        Raises:
            KeyError, ValueError, TypeError: the snapshot is not of this version.
        """
        arrays, told = snapshot
        pairs, firsts = (array("d", arrays[name].ravel().tolist()) for name in _TABLES)
        return cls(**{name: told[name] for name in _NUMBERS}, pairs=pairs, firsts=firsts)


_TABLES: Final = ("pairs", "firsts")
_NUMBERS: Final = (
    "kind", "version", "over", "share", "since", "number", "seconds", "quiet", "without",
    "playable", "played_at", "heard_at",
)  # fmt: skip


def _of_trial(one: Comparison, settings: LearnerSettings) -> Outcome | None:
    found, floor = one.figures(), 1.0 - settings.trial_margin
    cost, wall = found.cost, found.wall
    if cost.high < 1.0 and wall.ratio < 1.0:
        return Outcome("drop", f"slower than the champion: {told(found)}")
    if cost.low > floor and wall.ratio > floor:
        return Outcome(
            "promote", f"a loss of {settings.trial_margin:.0%} is excluded: {told(found)}"
        )
    against = math.isfinite(cost.high) and min(cost.ratio, wall.ratio) < floor
    if _is_over(one, settings):
        return _undecided(one, against)
    if against and cost.pairs >= ENOUGH and _at_best(one, settings) < floor:
        return Outcome("drop", f"without hope: {told(found)}")
    return None


def _undecided(one: Comparison, against: bool) -> Outcome:
    if one.quiet >= QUIET_SECONDS and (one.without or one.playable):
        refused = "workers play trials and not this one: they refused it, or it failed there"
        return Outcome("drop", refused)
    if not one.pairs:
        said = "all rounds were of steps that also read prompts" if one.played_at else _NOBODY
        return Outcome("promote", f"{said}: the offline gate alone decides")
    says = "the estimate speaks against it" if against else "as the offline gate said"
    why = f"undecided when its time was over, {says}: {told(one.figures())}"
    return Outcome("drop" if against else "promote", why)


def _at_best(one: Comparison, settings: LearnerSettings) -> float:
    """What the estimate may still come to by the end of its time, at even odds."""
    likely = _effect(one.pairs, 2, LIKELY)
    left = max(1.0 - one.seconds / (60.0 * settings.trial_minutes), 0.0)
    return likely.ratio * math.pow(likely.high / likely.ratio, math.sqrt(left))


def _of_watch(one: Comparison, settings: LearnerSettings) -> Outcome | None:
    found = one.figures()
    cost, wall = found.cost, found.wall
    former = f"version {one.version} before it, which had {told(found)}"
    if cost.low > 1.0 and wall.ratio > 1.0:
        return Outcome("roll back", f"slower than {former}")
    # Only where the first policy is a version of the scope there is a way back to it.
    first = settings.start == "first" and found.first.low > 1.0
    if first and found.first_wall.ratio > 1.0:
        # the one before may be slower still: to go back to it would change one fault for another
        return Outcome("roll back", f"slower than the first policy: {_said(found.first)}", True)
    ceiling = 1.0 / (1.0 - settings.trial_margin)
    if cost.high < ceiling and wall.ratio < ceiling:
        return Outcome("keep", f"no slower than {former}")
    if _is_over(one, settings):
        return Outcome("keep", f"in its time not found slower than {former}")
    return None


def _is_over(one: Comparison, settings: LearnerSettings) -> bool:
    late = one.seconds >= 60.0 * settings.trial_minutes
    return late or one.quiet >= QUIET_SECONDS or one.played >= MOST


def told(found: Figures) -> str:
    """The figures in words."""
    return f"{_said(found.cost)}, {found.wall.ratio:.3f} by wall time"


def _said(one: Effect) -> str:
    if not one.pairs:
        return "no pairs"
    bounds = f" ({one.low:.3f} to {one.high:.3f})" if math.isfinite(one.high) else ""
    return f"rate {one.ratio:.3f}{bounds} of the champion's in {one.pairs} pairs"


_NOBODY: Final = "no worker plays trials"


def _pair(mine: Block, other: Block) -> tuple[float, ...]:
    """Nothing where one of them took in nothing: such a pair must not widen a trial."""
    if not (mine.tokens and other.tokens):
        return ()
    return mine.tokens, mine.us, mine.cost_us, other.tokens, other.us, other.cost_us


def _table(pairs: array[float]) -> NDArray[np.float64]:
    return np.array(pairs, np.float64).reshape(-1, WIDTH)


def _effect(pairs: array[float], time: int, alpha: float | None = None) -> Effect:
    """Of pairs, by the time of column ``time``."""
    table = _table(pairs)
    mine, other = table[:, [0, time]], table[:, [3, 3 + time]]
    return effect(mine, other) if alpha is None else effect(mine, other, alpha)
