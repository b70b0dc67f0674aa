"""What the learner knows of one scope, and the verbs of one step on it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from decoder.contracts.bundle import Policy
from decoder.contracts.events import DraftEvent
from decoder.contracts.features import FloatArray
from decoder.policy.estimate import predict
from decoder.policy.probes import from_bytes, to_bytes
from learner import checkpoint, train
from learner.buffer import Buffer, Snapshot
from learner.costs import NOMINAL, measure
from learner.drift import Detector, residuals
from learner.gate import Verdict, judge
from learner.rows import COLUMNS, Rows, empty
from learner.settings import LearnerSettings
from learner.tune import Tuning, tune

log = logging.getLogger(__name__)

BLOCK: Final = 64
BATCH: Final = 128
RECENT_SHARE: Final = 0.5
"""Half of a minibatch comes from the newest drafts, half from all that are trusted: the first half
follows the traffic, the second keeps what is rare in it."""
RECENT_DRAFTS: Final = 1_500
UPDATES_PER_EVENT: Final = 0.25
"""With minibatches of 128 a draft is seen about as often as in twice the paper's twenty epochs,
spread over its stay in the buffer. Four times the work on synthetic traffic learned no faster."""
RATES: Final = (train.QUICK, train.CAREFUL)
"""Networks learn side by side, one at each rate, from the same drafts; held-out drafts say which of
them is the candidate. No one rate does for traffic as usual and for traffic that turned about."""
WARM_UP: Final = 150
"""Optimiser steps of a new network before its first candidate; it owes them whatever has come."""
OWED_UPDATES: Final = 400
"""Updates owed at most, so that a long backlog is not answered by a minute of training."""
HELD_OUT: Final = 1_200
"""Newest drafts of each held-out split that tune and judge; older traffic has no vote."""
COSTED_ROWS: Final = 4_000
BASELINE: Final = 500
"""Held-out drafts that tell the drift detector what a new champion's usual error is."""
SOON: Final = 200
"""Events until the next candidate, instead of the usual interval, after an alarm or a verdict that
lacked evidence."""
MAE_ROWS: Final = 500


@dataclass(frozen=True)
class Candidate:
    """A policy of version 0 with how it was tuned and what the gate said."""

    policy: Policy
    origin: str
    verdict: Verdict


class Scope:
    """One scope: buffer, network, drift detector, and the champion to beat.

    ``champion_known`` is false until the registry has said, once, whether there is a champion.
    ``version`` is the champion's, 0 before the first promotion.
    """

    def __init__(self, name: str, settings: LearnerSettings, champion: Policy) -> None:
        self.name = name
        self.settings = settings
        self.buffer = Buffer(settings.buffer_events)
        self.trainers: list[train.Trainer] = []  # one for each of RATES, or none yet
        self.champion = champion
        self.alarms = {"drafts": 0}
        self.last_alarm_at = 0.0
        self._waiting = empty()
        self._won: Candidate | None = None
        self.detector = Detector()
        self.next_candidate_at = settings.min_events  # in events of the buffer's total
        self.updates = self.drifts = self.candidates = self.promotions = 0
        self.last_drift_at = 0.0
        self._owed = 0.0
        self._errors: FloatArray = np.zeros(0, np.float32)

    @property
    def total(self) -> int:
        """Drafts fed."""
        return self.buffer.total + len(self._waiting)

    def feed(self, rows: Rows) -> list[str]:
        """Learn from ``rows``, in blocks; the alarms."""
        waiting = joined(self._waiting, rows)
        while len(waiting) >= BLOCK:
            self._block(waiting.take(np.arange(BLOCK)))
            waiting = waiting.take(np.arange(BLOCK, len(waiting)))
        self._waiting = waiting
        return []

    def _block(self, rows: Rows) -> None:
        self.buffer.store(rows)
        self._owed = len(rows) / 2
        self.learn(len(rows) // 2, seed=self.buffer.total)
        if self.is_due():
            candidate = self.propose()
            self.candidates += candidate.verdict.decided
            self._won = candidate if candidate.verdict.promote else self._won

    def candidate(self) -> Candidate | None:
        """What won since the last call."""
        won, self._won = self._won, None
        return won

    def admit(self, events: Sequence[DraftEvent], life: str = "") -> Rows:
        """Store the drafts of the events of ``life`` that are new; their rows."""
        rows = self.buffer.admit(events, life)
        self._owed = min(self._owed + UPDATES_PER_EVENT * len(rows), OWED_UPDATES)
        return rows

    def watch(self, rows: Rows, now: float) -> bool:
        """Feed the champion's residuals on new ``rows``; True when the traffic changed for it.

        On a change only events since then are trusted, the normaliser follows them, and the next
        candidate is due soon.
        """
        if not len(rows):
            return False
        errors = residuals(predict(self.champion, rows.features), rows.accepted, rows.censored)
        self._errors = np.concatenate([self._errors, errors.astype(np.float32)])[-MAE_ROWS:]
        since = self.detector.update(errors)
        if since is None:
            return False
        self.drifts += 1
        self.last_drift_at = now
        self.buffer.trust_last(since)
        self.next_candidate_at = min(self.next_candidate_at, self.buffer.total + SOON)
        moved = train.normaliser(self.buffer.recent(RECENT_DRAFTS).features)
        for trainer in self.trainers:
            train.renormalise(trainer, *moved)
        return True

    def learn(self, updates: int, seed: int) -> int:
        """Up to ``updates`` steps of every optimiser, as far as owed to new events; how many."""
        steps = min(updates, int(self._owed))
        slots = self.buffer.slots("train")
        if steps <= 0 or self.buffer.total < self.settings.min_events or not len(slots):
            return 0
        if not self.trainers:
            self.trainers = [self._begin(slots, rate) for rate in RATES]
            self._owed = max(self._owed, WARM_UP)
            steps = min(updates, int(self._owed))
        draw = np.random.default_rng(seed)
        recent = slots[-RECENT_DRAFTS:]
        newest = int(BATCH * RECENT_SHARE)
        for _ in range(steps):
            picked = np.concatenate(
                [draw.choice(recent, newest), draw.choice(slots, BATCH - newest)]
            )
            rows = self.buffer.at(picked)
            for trainer in self.trainers:
                train.update(trainer, rows)
        self.updates += steps
        self._owed -= steps
        for index, trainer in enumerate(self.trainers):
            if not train.is_finite(trainer):
                log.error("scope %s: weights are no longer finite, starting over", self.name)
                self.trainers[index] = self._begin(slots, trainer.rate)
        return steps

    def is_due(self) -> bool:
        """Whether enough events came for the next candidate."""
        enough = self.buffer.total >= max(self.next_candidate_at, self.settings.min_events)
        warm = any(trainer.updates >= WARM_UP for trainer in self.trainers)
        return enough and warm

    def propose(self) -> Candidate:
        """Tune and judge the better network; the next candidate is then an interval away."""
        self.next_candidate_at = self.buffer.total + self.settings.candidate_every
        measured = measure(self.buffer.recent(COSTED_ROWS))
        held = self.buffer.rows("tune", HELD_OUT)
        judged = self.buffer.rows("gate", HELD_OUT)
        best = min(self.trainers, key=lambda t: train.held_out_loss(t, held))
        raw = train.export(best, self.name, self.champion.threshold, judged.features)
        tuning = tune(raw, held, measured, self.champion)
        policy = replace(
            raw,
            threshold=tuning.threshold,
            rate=tuning.rate,
            use_model=tuning.use_model,
            model_payoff=tuning.model_payoff,
        )
        verdict = judge(policy, self.champion, judged, measured or NOMINAL, self.buffer.total)
        if not verdict.decided:
            self.next_candidate_at = self.buffer.total + min(SOON, self.settings.candidate_every)
        return Candidate(
            replace(policy, provenance=self._provenance(best, tuning, verdict)), "careful", verdict
        )

    def crown(self, new: Policy) -> None:
        """Take over what the registry says is served."""
        if (new.version, new.kind) == (self.champion.version, self.champion.kind):
            return
        self.champion = new
        self.promotions += new.provenance.get("origin") == "learner"
        held = self.buffer.rows("gate", BASELINE)
        errors = residuals(predict(new, held.features), held.accepted, held.censored)
        self.detector.reset(errors)
        self._errors = errors.astype(np.float32)

    @property
    def mae(self) -> float:
        """The champion's mean absolute error in tokens on the newest events."""
        return float(self._errors.mean()) if len(self._errors) else 0.0

    @property
    def version(self) -> int:
        """Version of the champion."""
        return self.champion.version

    def window(self) -> dict[str, int]:
        """What the network may have learned from, for the registry."""
        return {
            "events": self.buffer.total - max(self.buffer.trusted_from, 0),
            "events_total": self.buffer.total,
            "train_drafts": len(self.buffer.slots("train")),
            "updates": self.updates,
            "drifts": self.drifts,
        }

    def _begin(self, slots: NDArray[np.int64], rate: float) -> train.Trainer:
        """From the champion's weights, or at random with the normaliser of what is there."""
        if self.champion.layers:
            return train.continue_from(self.champion, rate)
        seen = train.normaliser(self.buffer.at(slots).features)
        return train.start(self.settings.kind, *seen, rate=rate)

    def _provenance(
        self, trainer: train.Trainer, tuning: Tuning, verdict: Verdict
    ) -> dict[str, Any]:
        costs = tuning.costs
        return {
            "origin": "learner",
            "note": tuning.note,
            "verdict": verdict.reason,
            "window": self.window(),
            "learning_rate": trainer.rate,
            "costs": {
                "fixed_us": costs.fixed_us,
                "token_us": costs.token_us,
                "extra_us": list(costs.extra_us),
                "seen": list(costs.seen),
                "measured": costs.measured,
            },
        }

    def snapshot(self) -> Snapshot:
        """Everything :meth:`restored` needs, champion included: it must not need the registry."""
        arrays, numbers = self.buffer.snapshot()
        state = {
            "buffer": numbers,
            "trainers": [],
            "next_candidate_at": self.next_candidate_at,
            "last_drift_at": self.last_drift_at,
            "owed": self._owed,
            **{name: getattr(self, name) for name in _COUNTERS},
        }
        arrays = checkpoint.under("buffer.", arrays)
        arrays |= checkpoint.under("waiting.", {n: getattr(self._waiting, n) for n in COLUMNS})
        arrays["champion"] = np.frombuffer(to_bytes(self.champion), np.uint8)
        for index, trainer in enumerate(self.trainers):
            weights, numbers = train.snapshot(trainer)
            state["trainers"].append(numbers)
            arrays |= checkpoint.under(f"trainer.{index}.", weights)
        return arrays, state

    @classmethod
    def restored(cls, name: str, settings: LearnerSettings, snapshot: Snapshot) -> Scope:
        """The scope as it was; only the drift detector starts anew.

        Raises:
            KeyError, ValueError, PolicyRefused: the snapshot is not one of this version.
        """
        arrays, state = snapshot
        scope = cls(name, settings, from_bytes(arrays["champion"].tobytes(), name))
        scope._waiting = Rows(**checkpoint.within("waiting.", arrays))
        scope.buffer = Buffer.restored(
            (checkpoint.within("buffer.", arrays), state["buffer"]), settings.buffer_events
        )
        scope.trainers = [
            train.restored(checkpoint.within(f"trainer.{index}.", arrays), numbers)
            for index, numbers in enumerate(state["trainers"])
        ]
        scope.next_candidate_at = int(state["next_candidate_at"])
        scope.last_drift_at = float(state["last_drift_at"])
        scope._owed = float(state["owed"])
        for counter in _COUNTERS:
            setattr(scope, counter, int(state[counter]))
        return scope


def joined(one: Rows, other: Rows) -> Rows:
    """``one``, then ``other``."""
    return Rows(**{n: np.concatenate([getattr(one, n), getattr(other, n)]) for n in COLUMNS})


_COUNTERS: Final = ("updates", "drifts", "candidates", "promotions")
