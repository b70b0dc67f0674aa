"""Whose turn it is: a worker's stretches of text are dealt out to sides by lot.

Most of the text is the champion's. Now and then there is a **round**: a block of each side that
takes part and one of the champion, one after the other in an order drawn by lot, so that what the
traffic and the machine are like at that time is the same for all. How long it is until the next one
is drawn in tokens of text, with no memory (exponentially): a round begins anywhere in the text with
the same chance, and not more often where decoding is slow.

Shares are of steps, since that is what a comparison costs. The sides that are compared for ever
have theirs together, and as many blocks each: the slowest would else be in the fewest pairs.
Whose share comes to more blocks takes part in every round, the others in some of them, by lot.
"""

from __future__ import annotations

import logging
import random
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from decoder.contracts.bundle import CHAMPION, FIRST, TRIAL, Policy
from decoder.trial.block import LEAD, LENGTH, Account, Made, Sums
from decoder.trial.sides import OUTSIDE, STOCK, Side

log = logging.getLogger(__name__)

WAITING: Final = 256
"""Rounds that wait to be sent; the newest is dropped when there are as many."""
ROUNDS: Final = 32
"""Of a unit, some six thousand tokens of a request at a share of 0.1: whoever sends all as one
session would else be one pair for ever, and no trial of his worker would tell anything."""
RECENT: Final = 1 / 16
"""Weight of a block in how many steps a side's blocks take, and of a step in the champion's pace:
both say how often a round is due."""
RAREST: Final = 1e-12
"""Blocks a step below which no round is ever due."""


class Played(NamedTuple):
    """A finished round: ``time`` in seconds since the epoch. ``unit`` is the number of the round
    that began the unit: as long as any of its sessions is there, ``ROUNDS`` at most are of it."""

    number: int
    time: float
    accounts: tuple[Account, ...]
    unit: int = 0


class Turns:
    """Deals out one worker's steps. For the engine's thread; ``rounds`` is emptied by another.

    A round is given up when the champion or the policy on trial changes in it: what it had counts
    as outside.
    """

    def __init__(
        self,
        names: Sequence[str],
        holdout: float,
        held: Mapping[str, Policy],
        first: Policy,
        seed: int | str,
        anchored: bool = True,
    ) -> None:
        """Begin outside of a round.

        Args:
            names: of the sides that are compared for ever, and ``holdout`` their part of the steps.
            held: policies by role, as they come; ``first`` stands in where there is no such.
            seed: of the lots.
            anchored: let the first policy play wherever another is on trial over another.
        """
        self.rounds: deque[Played] = deque()
        self.made = self.dropped = 0
        self._sums: dict[str, Sums] = {OUTSIDE: Sums()}
        self.failed: Counter[str] = Counter()
        self.dealing = False
        """Whether anybody is compared with the champion."""
        self._names, self._holdout = tuple(names) if holdout else (), holdout
        self._held, self._first = held, first
        self._lots = random.Random(seed)
        self._spoilt: dict[str, Policy] = {}  # policies that failed, by side
        self._steps: dict[str, float] = {}  # that a block takes, by side
        self._pace = 1.0  # tokens of a request and step outside
        self._gap = -1.0  # tokens of each request until the next round; below 0: to be drawn
        self._chances: dict[str, float] = {}  # of taking part in it
        self._in_force: tuple[Policy | None, Policy | None] = (None, None)
        self._anchors = anchored
        self._left: list[Side] = []
        self._over: list[Account] = []
        self._now: Account | None = None
        self._late = 0.0  # of the round, what the drafter took to read what was left unread
        self._unit, self._met = 0, set[str]()  # and the sessions of its first round

    @property
    def sums(self) -> dict[str, Sums]:
        """What each side's rounds add up to, and all else as ``OUTSIDE``; blocks under way are in
        neither. Empty where nothing is compared."""
        return dict(self._sums) if self._sums[OUTSIDE].tokens else {}

    @property
    def playing(self) -> str:
        """The side that decides now; "" outside of a round."""
        now = self._now
        return now.side.name if now is not None else ""

    def next(self, champion: Policy) -> Side | None:
        """Who decides in the step to come; None for the champion, outside of a round."""
        trial = self._held.get(TRIAL)
        self.dealing = bool(self._names) or trial is not None
        if not self.dealing and self._now is None:
            return None
        if self._in_force[0] is not champion or self._in_force[1] is not trial:
            self._in_force = champion, trial
            self._give_up()
        if self._gap < 0.0:
            self._draw()
        if self._now is None and self._gap <= 0.0:
            self._begin()
        return self._now.side if self._now is not None else None

    def book(self, side: Side | None, made: Made, counts: bool) -> None:
        """Take in what a step came to that ``side`` decided.

        Args:
            counts: False where the step also read prompts, or its time is not known: its text is
                left behind, and booked outside.
        """
        now, outside = self._now, self._sums[OUTSIDE]
        ours = now is not None and side is now.side
        if not ours or not counts:
            outside.add(1, made.tokens, made.us, made.cost_us)
        if now is None and made.tokens:
            pace = made.tokens / len(made.requests)
            self._pace += (pace - self._pace) * RECENT
            self._gap = max(self._gap - pace, 0.0)
        if now is None or not ours:
            return
        if counts:
            self._take_in(now, made)
        else:
            now.pass_by(made)  # else a side would decide for as long as prompts come
        if now.full:
            self._end(now)

    def fail(self, side: Side) -> None:
        """Let ``side`` play no more until it has another policy."""
        self._spoilt[side.name] = side.policy
        self.failed[side.name] += 1
        self._give_up()

    def _take_in(self, now: Account, made: Made) -> None:
        """Book the step with the block, and what of it lies beyond with what is outside."""
        self._late += made.late_us
        made = made._replace(us=max(made.us - made.late_us, 0.0))
        rest = 1.0 - now.add(made)
        if rest:
            self._sums[OUTSIDE].add(0, *(rest * n for n in (made.tokens, made.us, made.cost_us)))

    def _sides(self) -> dict[str, tuple[Side, float]]:
        """Those that may take part, each with the share that a trial gives it."""
        champion, trial = self._in_force
        assert champion is not None, "asked before a step"
        found = {}
        for name in self._names:
            side = STOCK.get(name) or Side(FIRST, self._held.get(FIRST, self._first))
            found[name] = side, 0.0
        if trial is not None and trial.share > 0.0:
            found[TRIAL] = Side(TRIAL, trial), trial.share
            first = self._held.get(FIRST, self._first)
            plays = self._spoilt.get(TRIAL) is not trial
            if plays and self._anchors and (FIRST in found or champion.digest != first.digest):
                found[FIRST] = Side(FIRST, first), trial.share
        return {n: s for n, s in found.items() if self._spoilt.get(n) is not s[0].policy}

    def _draw(self) -> None:
        """How far it is to the next round, and with what chance each side will be in it."""
        sides = self._sides()
        steps = {name: self._steps.get(name, LEAD + LENGTH) for name in (*sides, CHAMPION)}
        compared = [name for name in self._names if name in sides]
        due = dict.fromkeys(compared, self._holdout / max(sum(steps[n] for n in compared), 1.0))
        for name, (_, share) in sides.items():
            due[name] = max(due.get(name, 0.0), share / steps[name])  # blocks a step
        most = max(due.values(), default=0.0)
        if most < RAREST:
            self._gap = float("inf")
            return
        self._chances = {name: blocks / most for name, blocks in due.items()}
        spent = steps[CHAMPION] + sum(c * steps[n] for n, c in self._chances.items())
        between = max(1.0 / most - spent, 0.0) * self._pace
        self._gap = self._lots.expovariate(1.0 / between) if between else 0.0

    def _begin(self) -> None:
        champion = self._in_force[0]
        assert champion is not None
        sides = [
            side for name, (side, _) in self._sides().items()
            if self._lots.random() < self._chances.get(name, 0.0)
        ]  # fmt: skip
        if not sides:
            self._gap = -1.0
            return
        sides.append(Side(CHAMPION, champion))
        self._lots.shuffle(sides)
        self._left, self._over, self._late = sides, [], 0.0
        self._now = Account(self._left.pop(0))

    def _end(self, now: Account) -> None:
        """Close a block, and the round with its last."""
        name = now.side.name
        known = self._steps.setdefault(name, float(now.steps))
        self._steps[name] = known + (now.steps - known) * RECENT
        self._over.append(now)
        self._now = Account(self._left.pop(0)) if self._left else None
        if self._now is not None:
            return
        # Blocks are as long as each other: who drafts pays for reading what it took in, and for the
        # text of no other, whoever decided when that was read.
        each = self._late / len(self._over) * LENGTH / (LEAD + LENGTH)
        for account in self._over:
            account.owe(each * account.side.drafts)
            self._late -= each * account.side.drafts
        here = set[str]().union(*(account.sessions for account in self._over))
        if here.isdisjoint(self._met) or self.made - self._unit >= ROUNDS:
            self._unit, self._met = self.made, here
        played = Played(self.made, time.time(), tuple(self._over), self._unit)
        self.made += 1
        if len(self.rounds) < WAITING:
            self.rounds.append(played)
        else:
            self.dropped += 1
        for account in self._over:
            self._sums.setdefault(account.side.name, Sums()).take(account)
        self._over = []
        self._give_up()

    def _give_up(self) -> None:
        """Go on outside, and book there what is open."""
        for account in (*self._over, *([self._now] if self._now is not None else [])):
            self._sums[OUTSIDE].take(account)
        self._sums[OUTSIDE].add(0, 0.0, self._late, self._late)
        self._now, self._left, self._over, self._gap, self._late = None, [], [], -1.0, 0.0
