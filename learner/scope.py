"""What the learner knows of one scope: a function of the drafts it was fed, in their order.

Rows queue up and are worked off in blocks of ``BLOCK``; what does not fill one waits, and is part
of the snapshot. So neither how they were read, nor how fast, nor a restart changes what is learned
or promoted. A block is first foreseen by all who are judged, then learned from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from decoder.contracts.bundle import CHAMPION, MAX_DRAFT, Policy
from decoder.contracts.features import FEATURES
from learner.checkpoint import Tree, made
from learner.evaluation.clusters import Clusters
from learner.evaluation.contest import AGES, COLUMNS, FIRST, RETUNED, Challenger, Contest
from learner.evaluation.drift import STREAMS, Alarm, Detector, beyond
from learner.evaluation.measured import NOMINAL, Costs, measure
from learner.evaluation.skill import WINDOW, Skill, curves, skill_of
from learner.evaluation.tune import tuned
from learner.settings import LearnerSettings
from learner.training import train
from learner.training.learners import FAST, NAMES, Learners
from learner.training.losses import labels_of
from learner.training.rows import HELD_OUT, Buffer, Rows, empty, joined

BLOCK: Final = 64
NUMBERS: Final = COLUMNS + len(STREAMS)
"""Numbers of a draft that are added up in its cluster: what each seat gains, and what tells of a
change."""
COSTED: Final = 4_000
PRICED: Final = 1_024
"""Drafts from one look at what steps cost to the next."""
LIKELY: Final = 1e4
"""Below this are all features of drafts that a bundle may bring as probes."""
OFFERED: Final = 8
"""Candidates that are known again when in force: while the registry is slow, another may win."""


class Scope:
    """One scope: buffer, learners, detector, and the contest about what is served.

    ``total`` counts rows ever fed, ``alarms`` those of each stream. ``skill`` is how well the
    champion predicts the newest drafts, ``served`` what a person calls target and drafter,
    ``predicted`` and ``accepted`` are the tokens that drafts were to bring and brought; no part of
    the snapshot.
    """

    def __init__(self, name: str, settings: LearnerSettings, first: Policy) -> None:
        """Begin with ``first`` in force: it stays a challenger whenever another is served."""
        self.name = name
        self.settings = settings
        self.served: Mapping[str, str] = {}
        self.predicted, self.accepted = 0.0, 0
        self.total = self.candidates = self.promotions = 0
        self.last_alarm_at = 0.0  # seconds since the epoch, by the clock of the rows
        self.skill = Skill(WINDOW)
        self.alarms = dict.fromkeys(STREAMS, 0)
        self.buffer = Buffer(settings.buffer_events)
        self.learners = Learners()
        self.contest = Contest(first, first)
        self.detector = Detector()
        self._clusters = Clusters(NUMBERS)
        self._waiting = empty()
        self._next_challenger = 0  # row of the buffer
        self._costs = NOMINAL
        self._won: Challenger | None = None
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

    def candidate(self) -> Challenger | None:
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
        self.contest.promote(policy, self.buffer.total)
        self._won = None
        self.skill = skill_of(policy, self.buffer.recent(WINDOW), WINDOW)
        if policy.digest in self._offered:
            self.promotions += newer  # else it was gone back to
        elif policy.kind == self.settings.kind and self.learners.trainer:
            self.learners.begin(policy.kind, policy, self.buffer)

    def _work(self, block: Rows) -> list[Alarm]:
        """Predict a block, compare who did best, store it, learn from it, and decide."""
        labels = labels_of(block)
        numbers = np.zeros((len(block), NUMBERS))
        if self.buffer.total % PRICED < BLOCK:
            self._costs = measure(self.buffer.recent(COSTED)) or NOMINAL
        numbers[:, :COLUMNS] = self.contest.advantages(block, self._costs)
        if self.learners.trainer:
            cache = self.learners.compare(block, labels)
            model = self.detector.drafter.update(labels)
            numbers[:, COLUMNS:] = beyond(cache, model, labels.model_tried)
        self.skill.update(self.champion, block)
        closed = self._clusters.add(block.session, numbers)
        self.contest.update(numbers, closed)
        row = self.buffer.total + len(block)
        alarms = self.detector.update([cluster.sums[COLUMNS:] for cluster in closed], row)
        self.buffer.add(block)
        kind = self.settings.kind
        if self.learners.trainer:
            self.learners.learn(self.buffer)
        elif self.champion.kind == kind or row >= self.settings.min_events:
            self.learners.begin(kind, self.champion, self.buffer)
        for alarm in alarms:
            self.alarms[alarm.stream] += 1
            self.last_alarm_at = float(block.time[-1])
        changed = any(alarm.stream == "cache" for alarm in alarms)
        if changed and self.learners.trainer:
            self.contest.clear()
            self._seat(0, self._network(FAST), NAMES[FAST])
        retunes = self.champion.kind == "payoff" and self._costs.measured
        if retunes and (changed or self.contest.free(RETUNED, AGES[0])):
            self._seat(RETUNED, self.champion, "retuned")
        self._renew()
        self._decide()
        return alarms

    def _renew(self) -> None:
        """Give a seat that is vacant to the learner that foresees best, where one is due."""
        if self.buffer.total < self._next_challenger or not self.learners.trainer:
            return
        self._next_challenger = self.buffer.total + self.settings.candidate_every
        seat = self.contest.vacant()
        if seat is not None:
            self.learners.follow()
            leader = self.learners.leader
            self._seat(seat, self._network(leader), NAMES[leader])

    def _network(self, learner: int) -> Policy:
        """A network as it is; nothing probes it yet."""
        assert self.learners.trainer is not None
        trainer, none = self.learners.trainer, self.buffer.recent(0).features
        return train.export(trainer, self.name, self.champion.threshold, none, learner)

    def _seat(self, seat: int, policy: Policy, origin: str) -> None:
        """Let ``policy``, tuned to the costs in force, be a challenger from now on."""
        recent = self.buffer.recent(COSTED)
        drafts = recent.features[:, _DRAFT_LEN]
        sound = (
            (np.abs(recent.features) < LIKELY).all(axis=1) & (drafts >= 0) & (drafts <= MAX_DRAFT)
        )
        likely = recent.features[sound]
        if not len(likely):
            return  # a bundle is refused without a probe that may exist
        policy = policy.with_probes(likely[-BLOCK:])
        learned = recent.take(sound & (recent.session % HELD_OUT != 0))
        policy = tuned(policy, self._costs, self.champion, learned)
        policy = replace(
            policy, version=0, publication=0, share=0.0, scope=self.name, role=CHAMPION,
            provenance={"origin": "learner"},
        )  # fmt: skip
        self.contest.seats[seat] = Challenger(policy, self.buffer.total, origin)

    def _decide(self) -> None:
        """Let a challenger win whose gain is certain, or the first policy come back."""
        seat = self.contest.passed(self.buffer.total)
        if seat is not None:
            self._won = self.contest.accept(seat, self.buffer.total)

    def give_way(self) -> None:
        """Have the first policy come back: workers found the champion slower than the one before.
        Mutates."""
        if self.contest.seats[FIRST] is not None:
            self._won = self.contest.accept(FIRST, self.buffer.total)

    def put_on_trial(self, policy: Policy | None) -> None:
        """``policy`` is what workers try; None if nothing. Mutates."""
        self.contest.put_on_trial(policy, self.buffer.total)

    def window(self) -> Mapping[str, int | float]:
        """What the networks may have learned from, for the registry."""
        return {
            "events": len(self.buffer),
            "events_total": self.total,
            "updates": self.learners.updates,
            "step_fixed_us": self._costs.fixed_us,
            "step_token_us": self._costs.token_us,
            **self.buffer.times(len(self.buffer)),
            **{f"alarms_{stream}": count for stream, count in self.alarms.items()},
        }

    def skill_since(self, policy: Policy, row: int) -> dict[str, Sequence[float]]:
        """Curves of ``policy`` and of the champion over the drafts held that came after ``row``."""
        rows = self.buffer.recent(self.buffer.total - row)
        return curves({"": policy, "champion_": self.champion}, rows)

    def status(self) -> dict[str, object]:
        """Fields of a learner's status."""
        decides = self.champion.parameter_name
        return {
            "scope": self.name,
            "drafts_consumed": self.total,
            "buffer": len(self.buffer),
            "updates": self.learners.updates,
            "drifts": sum(self.alarms.values()),
            "last_drift_at": self.last_alarm_at,
            **self.skill.figures(),
            "predicted_tokens": self.predicted,
            "accepted_tokens": self.accepted,
            "candidates": self.candidates,
            "promotions": self.promotions,
            "champion_version": self.version,
            "parameter": self.champion.threshold if decides == "threshold" else 0.0,
            "parameter_name": decides,
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
        scope.skill = skill_of(scope.champion, scope.buffer.recent(WINDOW), WINDOW)
        if scope.learners.trainer and scope.learners.trainer.kind != settings.kind:
            scope.learners = Learners()
        return scope


_KEPT: Final[dict[str, Any]] = {
    "total": int,
    "candidates": int,
    "promotions": int,
    "last_alarm_at": float,
    "alarms": dict[str, int],
    "learners": Learners,
    "contest": Contest,
    "detector": Detector,
    "_clusters": Clusters,
    "_waiting": Rows,
    "_costs": Costs,
    "_next_challenger": int,
    "_offered": list[str],
}
_DRAFT_LEN: Final = FEATURES.index("draft_len")
