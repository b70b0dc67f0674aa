"""Learning state of one scope: a deterministic function of its drafts, in order.

Rows are processed in blocks of ``BLOCK``; an incomplete block waits, and is part of the snapshot.
So neither batching, nor speed, nor a restart changes what is learned or promoted. A block is
evaluated before it is learned from (test-then-train).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from decoder.contracts.bundle import CHAMPION, MAX_DRAFT, Policy
from decoder.contracts.features import FEATURES
from learner import checkpoint
from learner.evaluation.challengers import AGES, COLUMNS, FIRST, RETUNED, Challenger, Challengers
from learner.evaluation.clusters import Clusters
from learner.evaluation.costs import NOMINAL, Costs, measure
from learner.evaluation.drift import STREAMS, Alarm, Detector, excess
from learner.evaluation.skill import WINDOW, Skill, curves, skill_of
from learner.evaluation.tune import tune_policy
from learner.settings import LearnerSettings
from learner.training import train
from learner.training.learners import FAST, NAMES, Learners
from learner.training.losses import labels_of
from learner.training.rows import HELD_OUT, Buffer, Rows, empty, joined

BLOCK: Final = 64
NUMBERS: Final = COLUMNS + len(STREAMS)
"""Columns summed in a cluster: gains of challengers, and drift statistics."""
RECENT: Final = 4_000  # newest drafts, by which costs are measured and challengers tuned
MEASURE_EVERY: Final = 1_024  # drafts between measurements of the costs
MAX_PROBE: Final = 1e4  # bound of the features of a bundle's probes
OFFERED: Final = 8
"""Candidates recognised when promoted: another may win while the registry is slow."""
_DRAFT_LEN: Final = FEATURES.index("draft_len")


class Scope:
    """One scope: buffer, networks, drift detector, and challengers.

    ``total`` counts drafts, ``alarms`` those of each stream. Not part of the snapshot: ``skill`` is
    the champion's accuracy on the newest drafts, ``served`` holds the names ``target`` and
    ``drafter``, ``predicted`` and ``accepted`` sum tokens of drafts.
    """

    def __init__(self, name: str, settings: LearnerSettings, first: Policy) -> None:
        """``first``: the initial champion, and a challenger of every later one."""
        self.name = name
        self.settings = settings
        self.served: Mapping[str, str] = {}
        self.predicted, self.accepted = 0.0, 0
        self.total = self.candidates = self.promotions = 0
        self.last_alarm_at = 0.0  # seconds since the epoch, by the workers' clocks
        self.skill = Skill(WINDOW)
        self.alarms = dict.fromkeys(STREAMS, 0)
        self.buffer = Buffer(settings.buffer_events)
        self.learners = Learners()
        self.challengers = Challengers(first, first)
        self.detector = Detector()
        self._clusters = Clusters(NUMBERS)
        self._waiting = empty()
        self._next_challenger = 0  # row of the buffer
        self._costs = NOMINAL
        self._candidate: Challenger | None = None
        self._offered: list[str] = []  # digests of the last candidates

    @property
    def champion(self) -> Policy:
        """The served policy."""
        return self.challengers.champion

    @property
    def version(self) -> int:
        """Version of the champion."""
        return self.champion.version

    def update(self, rows: Rows, drafts: int | None = None) -> list[Alarm]:
        """Take in new ``rows`` in order; the drift alarms that they raise. Mutates.

        Args:
            drafts: number of drafts of which ``rows`` are a sample.
        """
        self.total += len(rows) if drafts is None else drafts
        rows = joined([self._waiting, rows])
        alarms: list[Alarm] = []
        complete = len(rows) - len(rows) % BLOCK
        for first in range(0, complete, BLOCK):
            alarms += self._update_block(rows.part(first, first + BLOCK))
        self._waiting = rows.part(complete, len(rows))
        return alarms

    def take_candidate(self) -> Challenger | None:
        """The newest challenger that passed since the last call. Mutates."""
        candidate, self._candidate = self._candidate, None
        if candidate is not None:
            self.candidates += 1
            self._offered = [*self._offered[1 - OFFERED :], candidate.policy.digest]
        return candidate

    def promote(self, policy: Policy) -> None:
        """Make ``policy`` the champion, whoever decided so. Mutates.

        Training continues if it is a recent candidate, else it restarts from its weights.
        """
        if policy.digest == self.champion.digest:
            self.challengers.champion = policy  # another version of the same policy
            return
        newer = policy.version > self.version
        self.challengers.promote(policy, self.buffer.total)
        self._candidate = None
        self.skill = skill_of(policy, self.buffer.recent(WINDOW), WINDOW)
        if policy.digest in self._offered:
            self.promotions += newer  # otherwise a roll-back
        elif policy.kind == self.settings.kind and self.learners.trainer:
            self.learners.begin(policy.kind, policy, self.buffer)

    def _update_block(self, block: Rows) -> list[Alarm]:
        """Evaluate a block, store it, learn from it, and update the challengers."""
        labels = labels_of(block)
        numbers = np.zeros((len(block), NUMBERS))
        if self.buffer.total % MEASURE_EVERY < BLOCK:
            self._costs = measure(self.buffer.recent(RECENT)) or NOMINAL
        numbers[:, :COLUMNS] = self.challengers.advantages(block, self._costs)
        if self.learners.trainer:
            cache = self.learners.compare(block, labels)
            model = self.detector.drafter.update(labels)
            numbers[:, COLUMNS:] = excess(cache, model, labels.model_tried)
        self.skill.update(self.champion, block)
        closed = self._clusters.add(block.session, numbers)
        self.challengers.update(numbers, closed)
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
            self.challengers.clear()
            self._add_challenger(0, self._export(FAST), NAMES[FAST])
        retunes = self.champion.kind == "payoff" and self._costs.measured
        if retunes and (changed or self.challengers.free(RETUNED, AGES[0])):
            self._add_challenger(RETUNED, self.champion, "retuned")
        self._add_due_challenger()
        slot = self.challengers.passed(self.buffer.total)
        if slot is not None:
            self._candidate = self.challengers.accept(slot, self.buffer.total)
        return alarms

    def _add_due_challenger(self) -> None:
        """Add the network that predicts best as a challenger, if due and there is a free slot."""
        if self.buffer.total < self._next_challenger or not self.learners.trainer:
            return
        self._next_challenger = self.buffer.total + self.settings.candidate_every
        slot = self.challengers.vacant()
        if slot is not None:
            self.learners.follow()
            leader = self.learners.leader
            self._add_challenger(slot, self._export(leader), NAMES[leader])

    def _export(self, network: int) -> Policy:
        """A network as a policy without probes."""
        assert self.learners.trainer is not None
        trainer, none = self.learners.trainer, self.buffer.recent(0).features
        return train.export(trainer, self.name, self.champion.threshold, none, network)

    def _add_challenger(self, slot: int, policy: Policy, origin: str) -> None:
        """Add ``policy``, tuned to the current costs, as a challenger."""
        recent = self.buffer.recent(RECENT)
        drafts = recent.features[:, _DRAFT_LEN]
        valid = (
            (np.abs(recent.features) < MAX_PROBE).all(axis=1)
            & (drafts >= 0) & (drafts <= MAX_DRAFT)
        )  # fmt: skip
        probes = recent.features[valid]
        if not len(probes):
            return  # a bundle needs a valid probe
        policy = policy.with_probes(probes[-BLOCK:])
        trainable = recent.take(valid & (recent.session % HELD_OUT != 0))
        policy = tune_policy(policy, self._costs, self.champion, trainable)
        policy = replace(
            policy, version=0, publication=0, share=0.0, scope=self.name, role=CHAMPION,
            provenance={"origin": "learner"},
        )  # fmt: skip
        self.challengers.slots[slot] = Challenger(policy, self.buffer.total, origin)

    def give_way(self) -> None:
        """Have the first policy come back: workers found the champion slower than the one before.
        Mutates."""
        if self.challengers.slots[FIRST] is not None:
            self._candidate = self.challengers.accept(FIRST, self.buffer.total)

    def put_on_trial(self, policy: Policy | None) -> None:
        """Evaluate ``policy``, which workers try; None ends that. Mutates."""
        self.challengers.put_on_trial(policy, self.buffer.total)

    def window(self) -> Mapping[str, int | float]:
        """Training data of the networks, for the registry."""
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
        """Accuracy curves of ``policy`` and the champion on buffered drafts after ``row``."""
        rows = self.buffer.recent(self.buffer.total - row)
        return curves({"": policy, "champion_": self.champion}, rows)

    def status(self) -> dict[str, object]:
        """Status fields."""
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

    def snapshot(self) -> checkpoint.Tree:
        """State for :meth:`restore` beside the buffer, with policies: it must not need the
        registry."""
        stored = {name: getattr(self, name) for name in _STORED}
        return {"fed": self.buffer.total, "contest": self.challengers, **stored}

    @classmethod
    def restore(
        cls, name: str, settings: LearnerSettings, snapshot: checkpoint.Tree, rows: Rows
    ) -> Scope:
        """The scope of a snapshot, with the newest rows of its buffer.

        Raises:
            KeyError, ValueError: the snapshot is of another version.
        """
        stored = {key: checkpoint.restore(kind, snapshot[key]) for key, kind in _STORED.items()}
        challengers = checkpoint.restore(Challengers, snapshot["contest"])
        scope = cls(name, settings, challengers.first)
        scope.challengers = challengers
        vars(scope).update(stored)
        scope.buffer = Buffer(settings.buffer_events, rows, int(snapshot["fed"]))
        scope.skill = skill_of(scope.champion, scope.buffer.recent(WINDOW), WINDOW)
        if scope.learners.trainer and scope.learners.trainer.kind != settings.kind:
            scope.learners = Learners()
        return scope


_STORED: Final[dict[str, Any]] = {
    "total": int,
    "candidates": int,
    "promotions": int,
    "last_alarm_at": float,
    "alarms": dict[str, int],
    "learners": Learners,
    "detector": Detector,
    "_clusters": Clusters,
    "_waiting": Rows,
    "_costs": Costs,
    "_next_challenger": int,
    "_offered": list[str],
}
