"""Rollouts of all scopes: reads rounds, publishes trials to workers, has the registry move aliases.

Only the holder of a scope's lease publishes or moves. The others read the same aliases and rounds,
and so can take over with the same evidence.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Final

from decoder.contracts.bundle import TRIAL, Policy
from decoder.contracts.errors import ContractError
from decoder.contracts.trials import decode_round
from decoder.limited_log import LimitedLog
from learner.evaluation.contest import TRIED
from learner.evaluation.effect import UNKNOWN
from learner.ingest.sequences import Sequences
from learner.ingest.source import EventSource
from learner.lease import MARGIN_SECONDS, Lease
from learner.release.comparison import SHARE, Comparison, Outcome
from learner.release.publish import PolicyPublisher
from learner.release.registrar import Registrar
from learner.release.registrations import LOST, ROLLED_BACK, Move, Moved
from learner.release.registry import Standing
from learner.release.rollout import Event, Rollout, State
from learner.scope import Scope
from learner.scopes import beginning
from learner.settings import LearnerSettings

log = logging.getLogger(__name__)

ROUNDS_SECONDS: Final = 0.2
"""For the rounds of one turn."""


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
        self._returned: dict[str, int] = {}  # champions from which workers went back, by scope

    def busy(self, scope: str) -> bool:
        """Whether a policy of ``scope`` is on trial; what is watched gives way to the next. Any
        thread may ask."""
        rollout = self.of.get(scope)
        one = None if rollout is None else rollout.one
        return one is not None and one.kind == "trial"

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
        for record in self.source.taken(0.0, ROUNDS_SECONDS):
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
        comparing = one is not None and rollout.state is State.COMPARING
        return (one.version, one.share) if one is not None and comparing else None

    def judge(self, scope: Scope) -> int | None:
        """Take in what the labels of ``scope`` say of the policy on trial; its version, where the
        scope does not judge it yet. Mutates."""
        rollout = self.of.get(scope.name, Rollout())
        one, tried = rollout.one, scope.contest.seats[TRIED]
        if one is None or one.kind != "trial" or rollout.outcome is not None:
            scope.put_on_trial(None)
        elif tried is None or tried.policy.version != one.version:
            return one.version
        else:
            one.labels = tried.gain()
        return None

    def take_back(self, returned: Mapping[str, int], awake: Mapping[str, Scope]) -> None:
        """Take in from which publications workers went back to the policy before. Mutates.

        That one comes back for all, where it is watched; else the first policy does.
        """
        for scope, number in returned.items():
            last, rollout = self._publisher.published.last(scope), self.of.get(scope, Rollout())
            if last is None or not last.since <= number <= last.number:
                continue  # of a champion that is gone
            if not self._lease.holds(scope) or self._returned.get(scope) == last.since:
                continue
            self._returned[scope] = last.since
            one = rollout.one
            watched = one is not None and one.kind == "watch" and one.over == last.version
            if one is not None and watched and rollout.state is State.COMPARING:
                why = (
                    f"workers found it slower than version {one.version} before it, draft by draft"
                )
                rollout.step(Event.DECIDED, Outcome("roll back", why))
            elif scope in awake:
                awake[scope].give_way()

    def published(self, policy: Policy) -> None:
        """What was due lies there, unless something else is due by now."""
        if (policy.version, policy.share) == self.due(policy.scope):
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
            rollout.step(Event.CARRIED_OUT, outcome)

    def _see_to(self, scope: str, rollout: Rollout, standing: Standing) -> None:
        was, ended = rollout.one, None
        if self.settings.rollout == "off":
            rollout.champion = standing.champion or 0
            if rollout.one is not None:
                rollout.step(Event.GONE)
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
        elif one is not None and one.number and others:  # its holder has ended it
            rollout.step(Event.GONE)
            rollout.asked = 0
        if ended is not None or not ours:
            self._handed.pop(scope, None)
        if ours and ended is not None:
            rollout.verdicts[ended[1].word] += 1
            self._registrar.move(self._ending(scope, *ended))
        if ours:
            self._act(scope, rollout, lies=last is not None)

    def _act(self, scope: str, rollout: Rollout, *, lies: bool) -> None:
        """Have carried out what a comparison comes to, and withdraw what ``lies`` on the topic."""
        if rollout.decide(self.settings):
            log.info("scope %s: %s", scope, rollout.said)
        one, outcome = rollout.one, rollout.outcome
        if one is not None and outcome is not None and scope not in self._handed:
            self._handed[scope] = move = self._move(scope, one, outcome)
            self._registrar.move(move)
        over = one is None or outcome is not None
        lies = lies and not self._publisher.waits(scope, TRIAL)
        if over and lies and self._lease.holds(scope, MARGIN_SECONDS):
            term = partial(self._lease.term, scope, MARGIN_SECONDS)
            self._publisher.begin(scope, TRIAL, term)

    def _give_up(self, scope: str, rollout: Rollout) -> None:
        """End a comparison that failed; called where an exception is handled. The champion stays,
        and what was on trial is withdrawn as after any end."""
        log.exception("scope %s: its comparison failed and is given up", scope)
        rollout.fail()

    def _move(self, scope: str, one: Comparison, outcome: Outcome) -> Move:
        """What is to be done about ``outcome``; who approves moves the champion himself."""
        move = self._ending(scope, one, outcome)
        if outcome.word not in ("promote", "roll back") or self.settings.rollout == "approve":
            return move
        back = f"{ROLLED_BACK} {one.over}: " if outcome.word == "roll back" else ""
        first = beginning(scope, self.settings) if outcome.to_first else None
        return replace(move, over=one.over, to=one.version, first=first, why=back + outcome.why)

    def _ending(self, scope: str, one: Comparison, outcome: Outcome) -> Move:
        """The end of its alias, and tags of the version that was put to the test: what became of
        it, who says so, why, and its rate over that of the version it was compared with."""
        figures, trial, by = one.figures(), one.kind == "trial", self._lease.holder
        values = {
            "_against": str(one.other),
            "_by": by,
            "_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "_why": outcome.why,
            "_pairs": str(figures.cost.pairs),
            "_minutes": f"{one.seconds / 60.0:.1f}",
        }
        ratios = {"_ratio": figures.cost.ratio, "_wall_ratio": figures.wall.ratio}
        if math.isfinite(figures.cost.high):
            low, high = figures.cost.low, figures.cost.high
            ratios |= {"_low": low, "_high": high} if trial else {"_low": high, "_high": low}
        if figures.cost.pairs:
            values |= {name: f"{r if trial else 1.0 / r:.4f}" for name, r in ratios.items()}
        # tags are set one after another: who sees the outcome finds the rest
        words = _WORDS.get(outcome.word, (outcome.word, outcome.word))
        values[""] = words[self.settings.rollout == "approve"]
        tags = {one.kind + name: text for name, text in values.items()}
        return Move(scope, by, outcome.why, {one.subject: tags}, ended=one.version)

    def status(self, scope: str) -> dict[str, object]:
        """Of ``scope``, as fields of a learner's status."""
        rollout = self.of.get(scope, Rollout())
        fields: dict[str, object] = {
            "rollout_said": rollout.said,
            "rounds_refused": self.refused,
            "verdicts": dict(rollout.verdicts),
        }
        one = rollout.one
        if one is None:
            return fields
        try:
            effect, reach = one.figures().cost, one.reach(self.settings)
        except Exception:  # noqa: BLE001 -- as in follow
            self._give_up(scope, rollout)
            effect, reach = UNKNOWN, ""
        known = math.isfinite(effect.high)
        return fields | {
            "rollout_said": rollout.said + (f": {reach}" if reach else ""),
            "rollout": one.kind,
            "trial_version": one.version,
            "trial_share": one.share,
            "trial_ratio": effect.ratio if effect.pairs else 0.0,
            "trial_low": effect.low if known else 0.0,
            "trial_high": effect.high if known else 0.0,
            "trial_pairs": effect.pairs,
        }


_WORDS: Final = {
    "promote": ("promoted", "passed"),
    "drop": ("dropped", "dropped"),
    "roll back": ("rolled back", "found slower"),
    "keep": ("kept", "kept"),
    "give up": ("ended", "ended"),
}
"""What is done about an outcome, and what it comes to where a person moves the aliases."""
