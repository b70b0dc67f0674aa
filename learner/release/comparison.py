"""Comparison of a policy with the champion, by rounds that workers play, and with the first policy.

On trial is a candidate; on watch is the former champion, against its successor. The labels of all
traffic measure the gain: they resolve small differences, but labels and costs may be biased. Live
rounds exclude harm: rounds of one session form a pair, in which both variants had the same traffic.
The interval is of time at measured costs, which pauses of the machine do not affect; it counts only
where wall time agrees, since the cost model may be wrong about a variant.

An interval decides; without a decision the champion stays. The first policy is the fixed anchor: a
promoted policy has excluded the same loss against it.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import MutableSequence
from dataclasses import dataclass, field
from typing import Annotated, Final, Literal

import numpy as np
from pydantic import Field, PlainValidator

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
"""Shares of a worker's steps: at first, and after excluding a loss of ``WIDER_MARGINS`` margins. A
loss costs its share times its duration, and a trial at half the share takes twice as long: with a
tenth, a trial of two hundred requests waited for most of its gain."""
WIDER_MARGINS: Final = 2.0
MAX_PAUSE_SECONDS: Final = 60.0
"""Longer pauses of traffic count as this: a night without traffic decides nothing."""
MAX_PAIRS: Final = 50_000  # two megabytes
MAX_INCARNATIONS: Final = 4_096  # workers whose last cluster is known, the most recent ones

Kind = Literal["trial", "watch"]
Verdict = Literal["promote", "drop", "cannot tell", "roll back", "keep", "give up"]
Key = tuple[str, int]
Numbers = Annotated[MutableSequence[float], PlainValidator(lambda tree: array("d", tree.tolist()))]


@dataclass(frozen=True)
class Outcome:
    """Result of a comparison, with the reason in a sentence.

    ``to_first``: the first policy replaces the champion, not the one compared.
    """

    verdict: Annotated[Verdict, Field(alias="word")]
    why: str
    to_first: bool = False


@dataclass
class PairTable:
    """Pairs of WIDTH numbers each, as in ``learner.evaluation.effect``. A worker's rounds in one
    cluster are summed in one row; ``last`` holds its cluster and row by worker."""

    numbers: Numbers = field(default_factory=lambda: array("d"))
    last: dict[str, list[int]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.numbers) // WIDTH

    def add(self, key: Key, numbers: tuple[float, ...]) -> None:
        """Add a round of cluster ``key``. Mutates."""
        life, cluster = key
        known, row = self.last.pop(life, (None, 0))
        if known != cluster:
            row = len(self)
            if row >= MAX_PAIRS:
                return
            self.numbers.extend([0.0] * WIDTH)
        self.last[life] = [cluster, row]
        if len(self.last) > MAX_INCARNATIONS:
            del self.last[next(iter(self.last))]
        for index, number in enumerate(numbers, row * WIDTH):
            self.numbers[index] += number

    def effects(self) -> tuple[Effect, Effect]:
        """Effects on time at measured costs, and on wall time."""
        pairs = np.array(self.numbers, np.float64).reshape(-1, WIDTH)
        return effect_in(pairs, COST), effect_in(pairs, WALL)


@dataclass(frozen=True)
class Figures:
    """Rate of the compared policy over the champion's, at measured costs and by wall time. The same
    against the first policy where workers play it: of a policy on trial over the first, or on watch
    of the first over the champion."""

    cost: Effect = UNKNOWN
    wall: Effect = UNKNOWN
    first: Effect = UNKNOWN
    first_wall: Effect = UNKNOWN


@dataclass
class Comparison:
    """Version ``version`` against champion ``over``.

    ``since`` and ``number`` are its first and last publication numbers, 0 before. ``seconds``
    counts time with traffic since then, rounds or drafts, and ``at`` is when the last was read, in
    seconds since the epoch by the local clock. ``labels`` is the rate of the policy on trial over
    the champion's by the labels of all traffic; where it is unknown, live rounds alone must show
    the gain.
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
    pairs: PairTable = field(default_factory=PairTable)
    firsts: PairTable = field(default_factory=PairTable)

    @property
    def subject(self) -> int:
        """The newer version of the two, which is tested."""
        return self.version if self.kind == "trial" else self.over

    @property
    def other(self) -> int:
        """The version that the subject is compared with."""
        return self.over if self.kind == "trial" else self.version

    def acknowledge(self, number: int, now: float) -> None:
        """Take in its publication number. Mutates."""
        if not self.number:
            self.seconds, self.at = 0.0, now
        self.since, self.number = self.since or number, number

    def update(self, played: Round, now: float) -> None:
        """Take in a round, read at ``now`` seconds since the epoch, if it played these two.
        Mutates."""
        champion, mine = played.block(CHAMPION), played.block(TRIAL)
        if champion is None or champion.version != self.over:
            return
        first, key = played.block(FIRST), unit_of(played)
        ours = mine is not None and mine.version == self.version
        if ours and mine is not None and 0 < self.since <= mine.publication:
            if numbers := pair_of(mine, champion):
                self.pairs.add(key, numbers)
            self.record_traffic(now)
        elif self.kind == "trial":
            return
        numbers = pair_of(mine, first) if self.kind == "trial" else pair_of(first, champion)
        if numbers:
            self.firsts.add(key, numbers)

    def record_traffic(self, now: float) -> None:
        """Record traffic of the scope at ``now``, seconds since the epoch. Mutates."""
        self.seconds += min(max(now - self.at, 0.0), MAX_PAUSE_SECONDS)
        self.at = now

    def figures(self) -> Figures:
        """Effects so far."""
        return Figures(*self.pairs.effects(), *self.firsts.effects())

    def outcome(self, settings: LearnerSettings) -> Outcome | None:
        """The outcome, if it is decided."""
        over = self.seconds >= 60.0 * settings.trial_minutes or len(self.pairs) >= MAX_PAIRS
        if self.number == 0:
            return Outcome("give up", "its bundle could not be published") if over else None
        return (_of_trial if self.kind == "trial" else _of_watch)(self, settings, over)

    def due_share(self, settings: LearnerSettings) -> float:
        """The share of steps to give it while undecided."""
        if self.kind == "watch" or self.share >= WIDER:
            return self.share
        harmless = self.figures().cost.low > 1.0 - WIDER_MARGINS * settings.trial_margin
        return WIDER if harmless else SHARE

    def forecast(self, settings: LearnerSettings) -> str:
        """How long a decision takes, in words; "" while unknown."""
        cost = self.figures().cost
        if not (math.isfinite(cost.high) and self.seconds):
            return ""
        minutes = self.seconds / 60.0 / cost.pairs * pairs_to_tell(cost, settings.trial_margin)
        return f"to tell {settings.trial_margin:.0%} takes {minutes:.0f} minutes of such rounds"


def _of_trial(trial: Comparison, settings: LearnerSettings, over: bool) -> Outcome | None:
    figures, labels, floor = trial.figures(), trial.labels, 1.0 - settings.trial_margin
    why = f"{describe(figures)}, {_describe(labels, CHAMPION, 'sessions')} by labels"
    if figures.cost.high < 1.0 and figures.wall.ratio < 1.0:
        return Outcome("drop", f"slower than the champion: {why}")
    if labels.high < 1.0:
        return Outcome("drop", f"slower than the champion by the labels of all traffic: {why}")
    harmless = figures.cost.low > floor and figures.wall.ratio > floor
    if settings.start == "first" and figures.first.pairs > 0:
        harmless &= figures.first.low > floor and figures.first_wall.ratio > floor
        why += f", {_describe(figures.first, FIRST)}"
    # a busy trial excludes the margin long before it shows a smaller loss
    faster = labels.low if labels.pairs else figures.cost.low
    if harmless and faster > 1.0 and figures.cost.ratio > 1.0:
        margin = f"a loss of {settings.trial_margin:.0%} is excluded"
        return Outcome("promote", f"faster, and live {margin}: {why}")
    if not over:
        return None
    if not len(trial.pairs):
        return Outcome("cannot tell", "no worker played it: the champion stays")
    return Outcome("cannot tell", f"cannot tell in its time: {why}; {trial.forecast(settings)}")


def _of_watch(watch: Comparison, settings: LearnerSettings, over: bool) -> Outcome | None:
    figures = watch.figures()
    cost, wall = figures.cost, figures.wall
    former = f"version {watch.version} before it, which had {describe(figures)}"
    if cost.low > 1.0 and wall.ratio > 1.0:
        return Outcome("roll back", f"slower than {former}")
    first = settings.start == "first" and figures.first.low > 1.0
    if first and figures.first_wall.ratio > 1.0:  # the former champion may be slower still
        why = f"slower than the first policy, which had {_describe(figures.first, CHAMPION)}"
        return Outcome("roll back", why, True)
    ceiling = 1.0 / (1.0 - settings.trial_margin)
    if cost.high < ceiling and wall.ratio < ceiling:
        return Outcome("keep", f"no slower than {former}")
    return Outcome("keep", f"in its time not found slower than {former}") if over else None


def describe(figures: Figures) -> str:
    """The figures in words."""
    return f"{_describe(figures.cost, CHAMPION)}, {figures.wall.ratio:.3f} by wall time"


def _describe(effect: Effect, of: str, unit: str = "pairs") -> str:
    if not effect.pairs:
        return f"no {unit}"
    bounds = f" ({effect.low:.3f} to {effect.high:.3f})" if math.isfinite(effect.high) else ""
    return f"rate {effect.ratio:.3f}{bounds} of the {of}'s in {effect.pairs} {unit}"
