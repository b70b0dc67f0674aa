"""What the learner knows of one scope: a function of the drafts it was fed, in their order.

Rows queue up and are worked off in blocks of ``BLOCK``; what does not fill one waits, and is part
of the snapshot. So neither how they were read, nor how fast, nor a restart changes what is learned
or promoted. A block is first foreseen by all who are judged, then learned from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np

from decoder.contracts.bundle import MAX_DRAFT, Policy
from decoder.contracts.features import FEATURES
from learner.checkpoint import Tree, made
from learner.evaluation.clusters import Clusters
from learner.evaluation.contest import FIRST, SEATS, Contest, Contestant
from learner.evaluation.drift import STREAMS, Alarm, Detector, beyond
from learner.evaluation.measured import NOMINAL, Costs, measure
from learner.evaluation.tune import error_of, tuned
from learner.settings import LearnerSettings
from learner.training import train
from learner.training.learners import NAMES, QUICK, Learners
from learner.training.losses import faced
from learner.training.rows import Buffer, Rows, empty, joined

BLOCK: Final = 64
EVIDENCE: Final = 2 * SEATS
NUMBERS: Final = EVIDENCE + len(STREAMS)
"""Numbers of a draft that are added up in its cluster: what is for and against each seat, and what
tells of a change."""
COSTED: Final = 4_000
PRICED: Final = 1_024
"""Drafts from one look at what steps cost to the next."""
LIKELY: Final = 1e4
"""Below this are all features of drafts that a bundle may bring as probes."""
OFFERED: Final = 8
"""Candidates that are known again when in force: while the registry is slow, another may win."""
MAE_MEMORY: Final = 512.0
"""Drafts over which the champion's error is taken."""


class Scope:
    """One scope: buffer, learners, detector, and the contest about what is served.

    ``total`` counts rows ever fed, ``mae`` is the champion's mean absolute error in tokens on the
    newest, ``alarms`` those of each stream. ``served`` is what a person calls target and drafter,
    ``predicted`` and ``accepted`` are the tokens that drafts were to bring and brought; no part of
    the snapshot.
    """

    def __init__(self, name: str, settings: LearnerSettings, first: Policy) -> None:
        """Begin with ``first`` in force: it stays a contestant whenever another is served."""
        self.name = name
        self.settings = settings
        self.served: Mapping[str, str] = {}
        self.predicted, self.accepted = 0.0, 0
        self.total = self.candidates = self.promotions = 0
        self.last_alarm_at = 0.0  # seconds since the epoch, by the clock of the rows
        self.mae = 0.0
        self.alarms = dict.fromkeys(STREAMS, 0)
        self.buffer = Buffer(settings.buffer_events)
        self.learners = Learners()
        self.contest = Contest(first, first)
        self.detector = Detector()
        self._clusters = Clusters(NUMBERS)
        self._waiting = empty()
        self._next_contestant = 0  # row of the buffer
        self._costs = NOMINAL
        self._won: Contestant | None = None
        self._offered: list[str] = []  # digests of the candidates that were handed out last

    @property
    def champion(self) -> Policy:
        """What is served."""
        return self.contest.champion

    @property
    def version(self) -> int:
        """Of the champion."""
        return self.champion.version

    def feed(self, rows: Rows, came: int | None = None) -> list[Alarm]:
        """Take in ``rows``, each once, in their order; the alarms that they raised. Mutates.

        Args:
            came: drafts that came, where ``rows`` are a part of them.
        """
        self.total += len(rows) if came is None else came
        rows = joined([self._waiting, rows])
        alarms: list[Alarm] = []
        whole = len(rows) - len(rows) % BLOCK
        for first in range(0, whole, BLOCK):
            alarms += self._work(rows.part(first, first + BLOCK))
        self._waiting = rows.part(whole, len(rows))
        return alarms

    def candidate(self) -> Contestant | None:
        """Who has won since the last call and is not registered yet; the newest. Mutates."""
        won, self._won = self._won, None
        if won is not None:
            self.candidates += 1
            self._offered = [*self._offered[1 - OFFERED :], won.policy.digest]
        return won

    def crown(self, policy: Policy) -> None:
        """``policy`` is what is served from now on, whoever decided so. Mutates.

        The learners go on if it is a candidate that was handed out lately, else from its weights.
        """
        if policy.digest == self.champion.digest:
            self.contest.champion = policy  # the same under another version
            return
        newer = policy.version > self.version
        self.contest.crown(policy, self.buffer.total)
        self._won = None
        self.mae = error_of(policy, self.buffer.recent(int(MAE_MEMORY)))
        if policy.digest in self._offered:
            self.promotions += newer  # else it was gone back to
        elif policy.kind == "survival" and self.learners.begun:
            self.learners.begin(policy, self.buffer)

    def _work(self, block: Rows) -> list[Alarm]:
        """Foresee a block, weigh who foresaw it best, store it, learn from it, and decide."""
        found = faced(block)
        numbers = np.zeros((len(block), NUMBERS))
        if self.buffer.total % PRICED < BLOCK:
            self._costs = measure(self.buffer.recent(COSTED)) or NOMINAL
        numbers[:, :EVIDENCE] = self.contest.advantages(block, self._costs)
        if self.learners.begun:
            cache, model = self.learners.weigh(block, found), self.detector.drafter.weigh(found)
            numbers[:, EVIDENCE:] = beyond(cache, model, found.tried)
        self._follow_error(block)
        closed = self._clusters.add(block.session, numbers)
        self.contest.take(closed)
        row = self.buffer.total + len(block)
        alarms = self.detector.take([cluster.sums[EVIDENCE:] for cluster in closed], row)
        self.buffer.add(block)
        if self.learners.begun:
            self.learners.learn(self.buffer)
        elif self.champion.kind == "survival" or row >= self.settings.min_events:
            self.learners.begin(self.champion, self.buffer)
        for alarm in alarms:
            self.alarms[alarm.stream] += 1
            self.last_alarm_at = float(block.time[-1])
        if any(alarm.stream == "cache" for alarm in alarms):
            self._seat(0, QUICK)
        self._renew()
        self._decide()
        return alarms

    def _follow_error(self, block: Rows) -> None:
        weight = len(block) / min(self.buffer.total + len(block), MAE_MEMORY)
        self.mae += weight * (error_of(self.champion, block) - self.mae)

    def _renew(self) -> None:
        """Give a seat that is vacant to the learner that foresees best, where one is due."""
        if self.buffer.total < self._next_contestant or not self.learners.begun:
            return
        self._next_contestant = self.buffer.total + self.settings.candidate_every
        seat = self.contest.vacant()
        if seat is not None:
            self.learners.follow()
            self._seat(seat, self.learners.leader)

    def _seat(self, seat: int, learner: int) -> None:
        """Let the network of ``learner``, as it is, contend from now on."""
        trainer = self.learners.trainers[learner]
        recent = self.buffer.recent(COSTED)
        drafts = recent.features[:, _DRAFT_LEN]
        sound = (
            (np.abs(recent.features) < LIKELY).all(axis=1) & (drafts >= 0) & (drafts <= MAX_DRAFT)
        )
        likely = recent.features[sound]
        if not len(likely):
            return  # a bundle is refused without a probe that may exist
        raw = train.export(trainer, self.name, self.champion.threshold, likely[-BLOCK:])
        policy = tuned(raw, self._costs, self.champion)
        policy = replace(policy, provenance={"origin": "learner"})
        self.contest.seats[seat] = Contestant(policy, self.buffer.total, NAMES[learner])

    def _decide(self) -> None:
        """Let the strongest whose evidence suffices win."""
        for seat in self.contest.passed()[:1]:
            one = self.contest.seats[seat]
            assert one is not None
            if seat == FIRST:  # as it is: the registry has it
                self.contest.seat_first(self.buffer.total)
            else:
                self.contest.seats[seat] = None
            self._won = one

    def window(self) -> Mapping[str, int | float]:
        """What the networks may have learned from, for the registry."""
        return {
            "events": len(self.buffer),
            "events_total": self.total,
            "updates": self.learners.updates,
            "step_fixed_us": self._costs.fixed_us,
            "step_token_us": self._costs.token_us,
            **self.buffer.times(),
            **{f"alarms_{stream}": count for stream, count in self.alarms.items()},
        }

    def snapshot(self) -> Tree:
        """Everything :meth:`restored` needs beside the buffer, policies included: it must not need
        the registry."""
        return {"fed": self.buffer.total, **{name: getattr(self, name) for name in _KEPT}}

    @classmethod
    def restored(cls, name: str, settings: LearnerSettings, told: Tree, held: Rows) -> Scope:
        """The scope as it was, with the newest rows of its buffer; what it is fed next has the
        effect it would have had.

        Raises:
            KeyError, ValueError: the snapshot is not of this version.
        """
        kept = {attribute: made(kind, told[attribute]) for attribute, kind in _KEPT.items()}
        scope = cls(name, settings, kept["contest"].first)
        vars(scope).update(kept)
        scope.buffer = Buffer(settings.buffer_events, held, int(told["fed"]))
        return scope


_KEPT: Final[dict[str, Any]] = {
    "total": int,
    "candidates": int,
    "promotions": int,
    "last_alarm_at": float,
    "mae": float,
    "alarms": dict[str, int],
    "learners": Learners,
    "contest": Contest,
    "detector": Detector,
    "_clusters": Clusters,
    "_waiting": Rows,
    "_costs": Costs,
    "_next_contestant": int,
    "_offered": list[str],
}
_DRAFT_LEN: Final = FEATURES.index("draft_len")
