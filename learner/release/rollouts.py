"""The rollouts of all scopes: rounds come in from the topic, trials go out to the workers, and what
a comparison comes to goes to the registry.

Only who holds a scope's lease publishes or moves anything. The others see the same aliases and read
the same rounds, so that they take over with evidence in hand.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Final

from decoder.contracts.bundle import TRIAL, Policy
from decoder.contracts.errors import BrokerError, ContractError
from decoder.contracts.trials import decode_round
from decoder.experiment.effect import UNKNOWN
from decoder.limited_log import LimitedLog
from learner.ingest.sequences import Sequences
from learner.ingest.source import EventSource
from learner.lease import MARGIN_SECONDS, Lease
from learner.release.comparison import SHARE, Comparison, Outcome
from learner.release.publish import PolicyPublisher
from learner.release.registrar import Registrar
from learner.release.registrations import LOST, ROLLED_BACK, Move, Moved
from learner.release.registry import Standing
from learner.release.rollout import Rollout
from learner.scopes import beginning
from learner.settings import LearnerSettings

log = logging.getLogger(__name__)

FAULT: Final = Outcome("give up", "its figures could not be told, which is a fault of the learner")


class Rollouts:
    """Rollouts by scope; ``refused`` counts records of the trials topic that are no rounds."""

    def __init__(
        self,
        settings: LearnerSettings,
        lease: Lease,
        publisher: PolicyPublisher,
        registrar: Registrar,
        source: EventSource,
        of: Mapping[str, Rollout],
        sequences: Sequences,
    ) -> None:
        """``source`` reads the trials topic; ``of`` and ``sequences`` are a checkpoint's."""
        self.settings = settings
        self.of = dict(of)
        self.sequences = sequences
        self.source = source
        self.refused = 0
        self._limited_log = LimitedLog()
        self._lease, self._publisher = lease, publisher
        self._registrar = registrar
        self._followed = False
        self._handed: dict[str, Move] = {}  # under way

    def busy(self, scope: str) -> bool:
        """Whether a policy of ``scope`` is compared with the champion. Any thread may ask."""
        rollout = self.of.get(scope)
        return rollout is not None and rollout.one is not None

    def open(self) -> set[str]:
        """Scopes in which something is compared, or lies on the topic as if it were."""
        last = self._publisher.published.last
        return {s for s, rollout in self.of.items() if rollout.one or last(s, TRIAL)}

    def close(self) -> None:
        """Leave the broker."""
        self.source.close()

    def hear(self, scope: str) -> None:
        """Drafts of ``scope`` have come."""
        rollout = self.of.get(scope)
        if rollout is not None and rollout.one is not None:
            rollout.one.hear(time.time())

    def read(self) -> None:
        """Take in the rounds that have come, once it is known what they are about."""
        if not self._followed:
            return
        records = self.source.poll(0.0)
        for record in records:
            try:
                played = decode_round(record.value)
            except ContractError as error:
                self.refused += 1
                self._limited_log.warning(
                    "record %d/%d: %s", record.partition, record.offset, error
                )
                continue
            if not self.sequences.admit(played.life, record.partition, played.number):
                continue
            rollout = self.of.get(played.scope)
            if rollout is not None:
                rollout.take(played, time.time())
        self.source.done(records)

    def follow(self, standings: Mapping[str, Standing]) -> None:
        """Take in where the aliases stand, decide what is ripe, and withdraw what is over.

        The policy topic has been read to its end.
        """
        self._followed = True
        for scope, standing in standings.items():
            rollout = self.of.setdefault(scope, Rollout())
            try:
                self._see_to(scope, rollout, standing)
            except Exception:  # noqa: BLE001 -- one scope's rounds must not end the learner of all
                self._give_up(scope, rollout)

    def due(self, scope: str) -> tuple[int, float] | None:
        """Version and share of what is to lie on the policy topic for trial."""
        rollout = self.of.get(scope, Rollout())
        one = rollout.one
        return None if one is None or rollout.outcome is not None else (one.version, one.share)

    def published(self, policy: Policy) -> None:
        """What was due lies there."""
        self.of[policy.scope].published(policy.publication, time.time())

    def moved(self, done: Moved) -> None:
        """What an outcome asked for is done, or was refused for a person's sake."""
        scope = done.move.scope
        if done.refusal:
            log.warning("scope %s: %s", scope, done.refusal)
        if self._handed.get(scope) is not done.move:
            return
        del self._handed[scope]
        rollout = self.of[scope]
        if rollout.outcome is not None and done.refusal != LOST:  # else the next holder does it
            outcome = Outcome("give up", done.refusal) if done.refusal else rollout.outcome
            rollout.verdicts[outcome.word] += 1
            rollout.end(outcome)

    def _see_to(self, scope: str, rollout: Rollout, standing: Standing) -> None:
        was, ended = rollout.one, None
        if self.settings.rollout == "off":
            rollout.champion, rollout.one, rollout.outcome = standing.champion or 0, None, None
        else:
            ended = rollout.follow(standing, time.time())
        one, ours = rollout.one, self._lease.holds(scope)
        last = self._publisher.published.last(scope, TRIAL)
        others = self._lease.holder_of(scope) not in ("", self._lease.holder)
        if one is not None and one is not was:
            log.info("scope %s: %s", scope, rollout.said)
        if one is not None and last is not None and last.version == one.version:
            rollout.published(last.number, time.time(), last.since)
            one.share = one.share if ours else last.share or SHARE
        elif one is not None and one.number and others:
            rollout.one, rollout.outcome, rollout.asked = None, None, 0  # its holder has ended it
        if ended is not None or not ours:
            self._handed.pop(scope, None)
        if ours and ended is not None:
            rollout.verdicts[ended[1].word] += 1
            self._registrar.move(self._told(scope, *ended))
        if ours:
            self._act(scope, rollout, lies=last is not None)

    def _act(self, scope: str, rollout: Rollout, *, lies: bool) -> None:
        """Have carried out what a comparison comes to, and withdraw what ``lies`` on the topic."""
        if rollout.decide(self.settings) is not None:
            log.info("scope %s: %s", scope, rollout.said)
        one, outcome = rollout.one, rollout.outcome
        if one is not None and outcome is not None and scope not in self._handed:
            self._handed[scope] = move = self._move(scope, one, outcome)
            self._registrar.move(move)
        over = one is None or outcome is not None
        lies = lies and not self._publisher.waits(scope, TRIAL)
        if over and lies and self._lease.holds(scope, MARGIN_SECONDS):
            try:
                self._publisher.withdraw(scope, TRIAL)
            except BrokerError as error:
                self._limited_log.warning("%s; tried again", error)

    def _give_up(self, scope: str, rollout: Rollout) -> None:
        """End a comparison that failed; called where an exception is handled. The champion stays,
        and what was on trial is withdrawn as after any end."""
        log.exception("scope %s: its comparison failed and is given up", scope)
        one = rollout.one
        if one is not None:  # without its pairs, which may be what failed
            bare = Comparison(one.kind, one.version, one.over, one.share, one.since, one.number)
            rollout.one, rollout.outcome = bare, FAULT

    def _move(self, scope: str, one: Comparison, outcome: Outcome) -> Move:
        """What is to be done about ``outcome``; who approves moves the champion himself."""
        move = self._told(scope, one, outcome)
        if outcome.word not in ("promote", "roll back") or self.settings.rollout == "approve":
            return move
        back = f"{ROLLED_BACK} {one.over}: " if outcome.word == "roll back" else ""
        first = beginning(scope, self.settings) if outcome.to_first else None
        return replace(move, over=one.over, to=one.version, first=first, why=back + outcome.why)

    def _told(self, scope: str, one: Comparison, outcome: Outcome) -> Move:
        """The end of its alias, and tags of the version that was put to the test: what became of
        it, who says so, why, and its rate over that of the version it was compared with."""
        found, trial, by = one.figures(), one.kind == "trial", self._lease.holder
        told = {
            "_against": str(one.other),
            "_by": by,
            "_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "_why": outcome.why,
            "_pairs": str(found.cost.pairs),
            "_minutes": f"{one.seconds / 60.0:.1f}",
        }
        ratios = {"_ratio": found.cost.ratio, "_wall_ratio": found.wall.ratio}
        if math.isfinite(found.cost.high):
            low, high = found.cost.low, found.cost.high
            ratios |= {"_low": low, "_high": high} if trial else {"_low": high, "_high": low}
        if found.cost.pairs:
            told |= {name: f"{r if trial else 1.0 / r:.4f}" for name, r in ratios.items()}
        # tags are set one after another: who sees the outcome finds the rest
        words = _WORDS.get(outcome.word, (outcome.word, outcome.word))
        told[""] = words[self.settings.rollout == "approve"]
        tags = {one.kind + name: text for name, text in told.items()}
        return Move(scope, by, outcome.why, {one.subject: tags}, ended=one.version)

    def status(self, scope: str) -> dict[str, object]:
        """Of ``scope``, as fields of a learner's status."""
        rollout = self.of.get(scope, Rollout())
        told: dict[str, object] = {
            "rollout_said": rollout.said,
            "rounds_refused": self.refused,
            "verdicts": dict(rollout.verdicts),
        }
        one = rollout.one
        if one is None:
            return told
        try:
            found, reach = one.figures().cost, one.reach(self.settings)
        except Exception:  # noqa: BLE001 -- as in follow
            self._give_up(scope, rollout)
            found, reach = UNKNOWN, ""
        known = math.isfinite(found.high)
        return told | {
            "rollout_said": rollout.said + (f": {reach}" if reach else ""),
            "rollout": one.kind,
            "trial_version": one.version,
            "trial_share": one.share,
            "trial_ratio": found.ratio if found.pairs else 0.0,
            "trial_low": found.low if known else 0.0,
            "trial_high": found.high if known else 0.0,
            "trial_pairs": found.pairs,
        }


_WORDS: Final = {
    "promote": ("promoted", "passed"),
    "drop": ("dropped", "dropped"),
    "roll back": ("rolled back", "found slower"),
    "keep": ("kept", "kept"),
    "give up": ("ended", "ended"),
}
"""What is done about an outcome, and what it comes to where a person moves the aliases."""
