"""Rollouts of all scopes: reads rounds, publishes trials to workers, has the registry move aliases.

Only the holder of a scope's lease publishes or moves. Others read the same aliases and rounds, and
can take over with the same evidence.
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
from learner.evaluation.challengers import TRIED
from learner.evaluation.effect import UNKNOWN
from learner.ingest.sequences import Sequences
from learner.ingest.source import EventSource
from learner.lease import MARGIN_SECONDS, Lease
from learner.release.comparison import SHARE, Comparison, Outcome
from learner.release.publisher import PolicyPublisher
from learner.release.registrar import Registrar
from learner.release.registrations import LEASE_LOST, ROLLED_BACK, MoveRequest, MoveResult
from learner.release.registry import AliasState
from learner.release.rollout import Event, Rollout, State
from learner.scope import Scope
from learner.scopes import initial_policy
from learner.settings import LearnerSettings

log = logging.getLogger(__name__)

ROUNDS_SECONDS: Final = 0.2  # for the rounds of one turn


class Rollouts:
    """Rollouts by scope; ``refused`` counts records of the trials topic that are no rounds."""

    def __init__(
        self,
        settings: LearnerSettings,
        lease: Lease,
        publisher: PolicyPublisher,
        registrar: Registrar,
        source: EventSource,
        by_scope: Mapping[str, Rollout],
        sequences: Sequences,
    ) -> None:
        """``source`` reads the trials topic; ``by_scope`` and ``sequences`` are a checkpoint's."""
        self.settings = settings
        self.by_scope = dict(by_scope)
        self.sequences = sequences
        self.source = source
        self.refused = 0
        self._limited_log = LimitedLog()
        self._lease, self._publisher = lease, publisher
        self._registrar = registrar
        self._followed = False
        self._moving: dict[str, MoveRequest] = {}
        self._returned: dict[str, int] = {}  # first publications of returned champions

    def busy(self, scope: str) -> bool:
        """Whether a policy of ``scope`` is on trial; one on watch gives way. Thread-safe."""
        rollout = self.by_scope.get(scope)
        current = None if rollout is None else rollout.comparison
        return current is not None and current.kind == "trial"

    def active(self) -> set[str]:
        """Scopes with a comparison, or with a trial on the topic."""
        last = self._publisher.topic.last
        return {s for s, rollout in self.by_scope.items() if rollout.comparison or last(s, TRIAL)}

    def close(self) -> None:
        """Disconnect."""
        self.source.close()

    def record_traffic(self, scope: str) -> None:
        """Record that drafts of ``scope`` arrived."""
        rollout = self.by_scope.get(scope)
        if rollout is not None and rollout.comparison is not None:
            rollout.comparison.record_traffic(time.time())

    def read(self) -> None:
        """Read new rounds, once aliases are known."""
        if not self._followed:
            return
        for record in self.source.records(0.0, ROUNDS_SECONDS):
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
            rollout = self.by_scope.get(played.scope)
            if rollout is not None:
                rollout.update(played, time.time())

    def follow(self, states: Mapping[str, AliasState]) -> None:
        """Take in aliases, decide comparisons, and withdraw ended trials.

        The policy topic must have been read to its end.
        """
        self._followed = True
        for scope, aliases in states.items():
            rollout = self.by_scope.setdefault(scope, Rollout())
            try:
                self._follow_scope(scope, rollout, aliases)
            except Exception:  # noqa: BLE001 -- one scope's rounds must not end the learner
                self._give_up(scope, rollout)

    def due(self, scope: str) -> tuple[int, float] | None:
        """Version and share of the trial that belongs on the policy topic."""
        rollout = self.by_scope.get(scope, Rollout())
        current = rollout.comparison
        comparing = current is not None and rollout.state is State.COMPARING
        return (current.version, current.share) if current is not None and comparing else None

    def update_labels(self, scope: Scope) -> int | None:
        """Take in the gain of the policy on trial by the labels of ``scope``; its version, if the
        scope does not evaluate it yet. Mutates."""
        rollout = self.by_scope.get(scope.name, Rollout())
        current, tried = rollout.comparison, scope.challengers.slots[TRIED]
        if current is None or current.kind != "trial" or rollout.outcome is not None:
            scope.put_on_trial(None)
        elif tried is None or tried.policy.version != current.version:
            return current.version
        else:
            current.labels = tried.gain()
        return None

    def take_back(self, returned: Mapping[str, int], loaded: Mapping[str, Scope]) -> None:
        """Take in publications from which workers returned to the former policy. Mutates.

        That policy is promoted if it is on watch, otherwise the first policy.
        """
        for scope, number in returned.items():
            last, rollout = self._publisher.topic.last(scope), self.by_scope.get(scope, Rollout())
            if last is None or not last.since <= number <= last.number:
                continue  # of a former champion
            if not self._lease.holds(scope) or self._returned.get(scope) == last.since:
                continue
            self._returned[scope] = last.since
            watch = rollout.comparison
            watched = watch is not None and (watch.kind, watch.over) == ("watch", last.version)
            if watch is not None and watched and rollout.state is State.COMPARING:
                former = f"version {watch.version} before it"
                why = f"workers found it slower than {former}, draft by draft"
                rollout.step(Event.DECIDED, Outcome("roll back", why))
            elif scope in loaded:
                loaded[scope].give_way()

    def acknowledge(self, policy: Policy) -> None:
        """Take in that a trial was published, if it is still due."""
        if (policy.version, policy.share) == self.due(policy.scope):
            self.by_scope[policy.scope].acknowledge(policy.publication, time.time())

    def resolve(self, result: MoveResult) -> None:
        """Take in the result of a move."""
        scope = result.request.scope
        if result.refusal:
            log.warning("scope %s: %s", scope, result.refusal)
        if self._moving.get(scope) is not result.request:
            return
        del self._moving[scope]
        rollout = self.by_scope[scope]
        if rollout.outcome is not None and result.refusal != LEASE_LOST:
            refused = Outcome("give up", result.refusal)
            outcome = refused if result.refusal else rollout.outcome
            rollout.verdicts[outcome.verdict] += 1
            rollout.step(Event.CARRIED_OUT, outcome)

    def _follow_scope(self, scope: str, rollout: Rollout, aliases: AliasState) -> None:
        was, ended = rollout.comparison, None
        if self.settings.rollout == "off":
            rollout.champion = aliases.champion or 0
            if rollout.comparison is not None:
                rollout.step(Event.GONE)
        else:
            ended = rollout.follow(aliases, time.time())
        current, ours = rollout.comparison, self._lease.holds(scope)
        last = self._publisher.topic.last(scope, TRIAL)
        others = self._lease.holder_of(scope) not in ("", self._lease.holder)
        if current is not None and current is not was:
            log.info("scope %s: %s", scope, rollout.summary)
        if current is not None and last is not None and last.version == current.version:
            rollout.acknowledge(last.number, time.time(), last.since)
            current.share = current.share if ours else last.share or SHARE
        elif current is not None and current.number and others:  # its holder has ended it
            rollout.step(Event.GONE)
            rollout.asked = 0
        if ended is not None or not ours:
            self._moving.pop(scope, None)
        if ours and ended is not None:
            rollout.verdicts[ended[1].verdict] += 1
            self._registrar.move(self._end_request(scope, *ended))
        if ours:
            self._act(scope, rollout, published=last is not None)

    def _act(self, scope: str, rollout: Rollout, *, published: bool) -> None:
        """Carry out the outcome of a comparison; withdraw a ``published`` trial that is over."""
        if rollout.decide(self.settings):
            log.info("scope %s: %s", scope, rollout.summary)
        current, outcome = rollout.comparison, rollout.outcome
        if current is not None and outcome is not None and scope not in self._moving:
            self._moving[scope] = request = self._move_request(scope, current, outcome)
            self._registrar.move(request)
        over = current is None or outcome is not None
        withdraws = over and published and not self._publisher.must_wait(scope, TRIAL)
        if withdraws and self._lease.holds(scope, MARGIN_SECONDS):
            term = partial(self._lease.term, scope, MARGIN_SECONDS)
            self._publisher.submit(scope, TRIAL, term)

    def _give_up(self, scope: str, rollout: Rollout) -> None:
        """End a comparison that raised the exception being handled; the champion stays."""
        log.exception("scope %s: its comparison failed and is given up", scope)
        rollout.fail()

    def _move_request(self, scope: str, ended: Comparison, outcome: Outcome) -> MoveRequest:
        """Moves that ``outcome`` asks for; with ``approve``, a person moves the champion."""
        request = self._end_request(scope, ended, outcome)
        if outcome.verdict not in ("promote", "roll back") or self.settings.rollout == "approve":
            return request
        back = f"{ROLLED_BACK} {ended.over}: " if outcome.verdict == "roll back" else ""
        first = initial_policy(scope, self.settings) if outcome.to_first else None
        why = back + outcome.why
        return replace(request, over=ended.over, to=ended.version, first=first, why=why)

    def _end_request(self, scope: str, ended: Comparison, outcome: Outcome) -> MoveRequest:
        """Removal of alias trial, and tags of the tested version: result, holder, reason, and its
        rate over the version that it was compared with."""
        figures, trial, by = ended.figures(), ended.kind == "trial", self._lease.holder
        values = {
            "_against": str(ended.other),
            "_by": by,
            "_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "_why": outcome.why,
            "_pairs": str(figures.cost.pairs),
            "_minutes": f"{ended.seconds / 60.0:.1f}",
        }
        ratios = {"_ratio": figures.cost.ratio, "_wall_ratio": figures.wall.ratio}
        if math.isfinite(figures.cost.high):
            low, high = figures.cost.low, figures.cost.high
            ratios |= {"_low": low, "_high": high} if trial else {"_low": high, "_high": low}
        if figures.cost.pairs:
            values |= {name: f"{r if trial else 1.0 / r:.4f}" for name, r in ratios.items()}
        # set last, as tags are set one after another
        results = _RESULTS.get(outcome.verdict, (outcome.verdict, outcome.verdict))
        values[""] = results[self.settings.rollout == "approve"]
        tags = {ended.kind + name: text for name, text in values.items()}
        return MoveRequest(scope, by, outcome.why, {ended.subject: tags}, ended=ended.version)

    def status(self, scope: str) -> dict[str, object]:
        """Status fields of ``scope``."""
        rollout = self.by_scope.get(scope, Rollout())
        fields: dict[str, object] = {
            "rollout_said": rollout.summary,
            "rounds_refused": self.refused,
            "verdicts": dict(rollout.verdicts),
        }
        current = rollout.comparison
        if current is None:
            return fields
        try:
            effect, forecast = current.figures().cost, current.forecast(self.settings)
        except Exception:  # noqa: BLE001 -- as in follow
            self._give_up(scope, rollout)
            effect, forecast = UNKNOWN, ""
        known = math.isfinite(effect.high)
        return fields | {
            "rollout_said": rollout.summary + (f": {forecast}" if forecast else ""),
            "rollout": current.kind,
            "trial_version": current.version,
            "trial_share": current.share,
            "trial_ratio": effect.ratio if effect.pairs else 0.0,
            "trial_low": effect.low if known else 0.0,
            "trial_high": effect.high if known else 0.0,
            "trial_pairs": effect.pairs,
        }


_RESULTS: Final = {
    "promote": ("promoted", "passed"),
    "drop": ("dropped", "dropped"),
    "roll back": ("rolled back", "found slower"),
    "keep": ("kept", "kept"),
    "give up": ("ended", "ended"),
}
"""Tag of an outcome that is carried out, and that a person has to carry out."""
