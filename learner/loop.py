"""The learner: consume, learn, register what won, publish what is served, checkpoint, report.

One thread, one step after another, several scopes. It waits for no server: MLflow, each topic that
is followed and each producer have threads of their own. Kafka or MLflow going away is logged and
tried again later; what was learned until then is kept.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Final

from decoder.contracts.bundle import CHAMPION, TRIAL, Policy
from decoder.contracts.settings import KafkaSettings
from decoder.contracts.status import LearnerStatus
from decoder.contracts.topics import LESSONS, TRIALS, policy_key
from decoder.limited_log import LimitedLog
from learner import state, topics
from learner.home import holder_of, occupied
from learner.ingest.dead_letters import DeadLetters
from learner.ingest.group import Group
from learner.ingest.lessons import Intake, Lessons
from learner.ingest.shares import Shares
from learner.ingest.source import EventSource, Fetched
from learner.ingest.workers import Workers
from learner.lease import MARGIN_SECONDS, Lease
from learner.page import Vitals, serving
from learner.release.publish import PolicyPublisher
from learner.release.registrar import Registrar
from learner.release.registrations import (
    INITIAL,
    Answer,
    Moved,
    first_registration,
    registration_of,
)
from learner.release.registry import Registry, Standing
from learner.release.rollouts import Rollouts
from learner.scope import Scope
from learner.settings import LearnerSettings
from learner.status import StatusProducer

log = logging.getLogger(__name__)

GROUP: Final = "hvd-learners"
POLL_SECONDS: Final = 0.25
TURN_SECONDS: Final = 1.0
"""For the records of one turn: leases and health must not wait for a backlog."""
FOLLOW_SECONDS: Final = 1.0
CHECKPOINT_SECONDS: Final = 10.0
CHECKPOINT_BYTES_A_SECOND: Final = 2 * 2**20
"""After one that was larger the next one is later; what is read again is known by its sequence."""
STATUS_SECONDS: Final = 1.0
SLICE: Final = 500
"""Scopes that nothing happens in which are looked at in one turn of following the registry."""
ESTABLISHED: Final = 100
"""Drafts before a scope enters the registry: its name comes from the topic, where anybody may make
one up, and until then its workers have the first policy anyway."""


class Learner:
    """The process's state; :meth:`step` is its life. Start from :func:`run`."""

    def __init__(self, settings: LearnerSettings, kafka: KafkaSettings) -> None:
        self.settings = settings
        self.process = f"learner-{socket.gethostname()}-{os.getpid()}"
        self.life = secrets.token_hex(8)
        resumed = state.resumed(settings)
        self.scopes = resumed.scopes
        self.faults = resumed.faults
        self.group: Group | None = None
        holder = holder_of(settings.state_dir)
        if settings.topic is LESSONS:
            self.group = Group(kafka, LESSONS, GROUP, keeps=False, instance=holder)
        self.source = EventSource(
            kafka, resumed.offsets, resumed.skipped, settings.topic, resumed.marks, self.group
        )
        self.dead = DeadLetters(kafka, settings.topic)
        self.shares = Shares(settings.rows_per_second, resumed.shares)
        self.workers = Workers(kafka, self.process)
        self.unknown = 0
        shares = self.shares if self.group is None else {}  # of lessons all are learned from
        self.intake = Intake(
            self.dead, resumed.sequences, resumed.refused,
            resumed.repeated, shares, relayed=self.group is not None,
        )  # fmt: skip
        self.lease = Lease(kafka, holder)
        registry = Registry.of(settings)
        self.registrar = Registrar(
            registry, self.lease.holds, resumed.waiting, self._busy, by=self.lease.holder,
            trial=settings.rollout != "off", keep=settings.keep_versions,
        )  # fmt: skip
        self.publisher = PolicyPublisher(kafka, resumed.published)
        rounds = EventSource(kafka, resumed.round_offsets, topic=TRIALS, marks=resumed.round_marks)
        self.rollouts = Rollouts(
            settings, self.lease, self.publisher, self.registrar, rounds,
            resumed.rollouts, resumed.round_sequences,
        )  # fmt: skip
        self.status = StatusProducer(kafka)
        self.vitals = Vitals()
        self.standings: Mapping[str, Standing] = {}
        self._unpublished = set[str]()  # scopes of which something is to lie on the policy topic
        self._slice_at = 0
        self._limited_log = LimitedLog()
        self._seen = False  # whether the registry has said, once, what stands in it
        self._checkpoint_at = time.monotonic() + CHECKPOINT_SECONDS
        self._written_at = time.monotonic()
        self._follow_at = self._status_at = 0.0

    def step(self) -> None:
        """One turn; takes about ``POLL_SECONDS`` when idle."""
        # 1. Consume, and learn from each record once, in order of arrival.
        self._consume()
        self.rollouts.read()
        self.workers.read()
        # 2. Follow the holders of scopes in how much is learned from.
        said = self.workers.shares
        others = (s for s in said if s in self.scopes.entries and not self.lease.holds(s))
        self.shares.follow({s: said[s] for s in others})
        near, lag = self.source.is_near_the_end(), self.source.lag()
        self.shares.look(time.monotonic(), near, self.lease.holds, lag)
        # 3. Keep what is ours to promote and publish.
        self.lease.keep(self._wanted, self._ours)
        for sent in self.publisher.acknowledged():
            self._published(sent)
        # 4. Take what the registry's thread has found out; ask it for what is to be served.
        for answer in self.registrar.answers():
            self._take(answer)
        if time.monotonic() >= self._follow_at:
            self._follow()
        # 5. Scopes and offsets in one write: a crash before this line reads the same records again.
        if time.monotonic() >= self._checkpoint_at:
            self.checkpoint()
        # 6. Say how it goes.
        if time.monotonic() >= self._status_at:
            self._report()
        self.vitals.turned(self.lease.known and self.source.caught_up)

    def checkpoint(self) -> None:
        """Save scopes, offsets, counters and what waits in one write; a full disk is logged."""
        self._checkpoint_at = time.monotonic() + CHECKPOINT_SECONDS
        intake, source = self.intake, self.source
        try:
            written = state.save(
                self.settings,
                state.State(
                    self.scopes,
                    waiting=self.registrar.waiting(),
                    rollouts=self.rollouts.of,
                    offsets=source.offsets,
                    marks=source.marks,
                    skipped=source.skipped,
                    sequences=intake.sequences,
                    refused=intake.refused,
                    repeated=intake.repeated,
                    faults=self.faults,
                    published=dict(self.publisher.published.numbers),
                    round_offsets=self.rollouts.source.offsets,
                    round_marks=self.rollouts.source.marks,
                    round_sequences=self.rollouts.sequences,
                    shares=self.shares,
                ),
            )
        except OSError as error:
            log.error("checkpoint not written: %s", error)
            return
        self._written_at = now = time.monotonic()
        self._checkpoint_at = now + max(CHECKPOINT_SECONDS, written / CHECKPOINT_BYTES_A_SECOND)

    def close(self) -> None:
        """Let go of leases, broker, registry and store; saves nothing."""
        for part in (
            self.registrar, self.lease, self.source, self.rollouts, self.workers, self.dead,
            self.publisher, self.status, self.group,
        ):  # fmt: skip
            if part is not None:
                part.close()
        self.scopes.store.close()

    def _consume(self) -> None:
        """Learn from what has come. What is learned from, or refused for good, counts as read."""
        if not self.scopes.entries and not self.workers.begun:
            time.sleep(POLL_SECONDS)  # whom workers serve is not known: all would be passed over
            return
        for record in self.source.taken(POLL_SECONDS, TURN_SECONDS):
            lessons = self.intake.read(record)
            if lessons is None:
                continue
            is_known = lessons.scope in self.scopes.entries or self.workers.knows(lessons.scope)
            if is_known is None:
                return  # it is looked up: the record comes again
            if not self.intake.is_new(record, lessons):
                continue
            if not is_known:
                self.unknown += lessons.events
                continue
            if lessons.batch.source is not None and not self.lease.holds(lessons.scope):
                self.shares.follow({lessons.scope: lessons.batch.source.share})
            self.shares.count(lessons.scope, lessons.drafts)
            self.rollouts.hear(lessons.scope)
            self._learn(lessons, record)

    def _learn(self, admitted: Lessons, record: Fetched) -> None:
        name = admitted.scope
        try:
            scope = self.scopes.of(name, admitted.events)
            scope.served = admitted.served or scope.served
            scope.predicted += admitted.predicted
            scope.accepted += admitted.accepted
            self.scopes.pass_over(name, "side", admitted.passed)
            alarms = scope.feed(admitted.rows, admitted.drafts)
            won = scope.candidate()
            read = self.source.offsets | {record.partition: record.offset + 1}
            winner = registration_of(scope, won, read) if won is not None else None
        except Exception:  # noqa: BLE001 -- one record must not end the learner, nor this scope
            self._limited_log.exception(
                "scope %s: a record could not be learned from: back to what was saved", name
            )
            self.faults += 1
            self.scopes.abandon(name, "fault")
            return
        if alarms:
            log.info(
                "scope %s: traffic changed, MAE now %.2f tokens", name, scope.skill.figures()["mae"]
            )
        if won is not None and winner is not None:
            log.info("scope %s: a candidate won: %s", name, won.reason)
            self.registrar.hand(winner)

    def _established(self) -> set[str]:
        """Scopes that belong into the registry."""
        heard = {name for name, s in self.scopes.awake.items() if s.total >= ESTABLISHED}
        return heard | {each.policy.scope for each in self.registrar.waiting()}

    def _wanted(self) -> dict[str, int]:
        """Scopes to hold, those that wait to be published among them, and their known terms."""
        term = self.publisher.published.term
        wanted = self._established() | self._unpublished | self.rollouts.open()
        wanted = {name for name in wanted if self._ours(name)}
        return {name: term(name) for name in sorted(wanted)}

    def _ours(self, scope: str) -> bool:
        """Whether it is for this learner to hold, if it can."""
        return self.group is None or self.group.owns(scope)

    def _due(self, scope: str) -> dict[str, tuple[int, float]]:
        """By role, version and share of what is to lie on the policy topic and does not."""
        served = self.standings.get(scope, Standing(scope)).served
        due = {CHAMPION: (served, 0.0) if served else None, TRIAL: self.rollouts.due(scope)}
        lain = {role: self.publisher.published.last(scope, role) for role in due}
        there = {role: last and (last.version, last.share) for role, last in lain.items()}
        return {role: one for role, one in due.items() if one and one != there[role]}

    def _sendable(self, scope: str) -> dict[str, tuple[int, float]]:
        """What is due but for what is on its way, or was sent and does not stay there."""
        waits = self.publisher.waits
        due = self._due(scope) if self.publisher.current else {}
        return {r: one for r, one in due.items() if not waits(scope, r, *one)}

    def _busy(self, scope: str) -> bool:
        return self.rollouts.busy(scope)

    def _take(self, answer: Answer) -> None:
        if isinstance(answer, dict):
            self.standings, self._seen = answer, True
            self._follow_at = 0.0
        elif isinstance(answer, Policy):
            self._serve(answer)
        elif isinstance(answer, Moved):
            if answer.standing is not None:  # what was seen before it is not what stands now
                self.standings = {**self.standings, answer.move.scope: answer.standing}
            self.rollouts.moved(answer)
            self._follow_at = self._checkpoint_at = 0.0
        else:
            self._checkpoint_at = 0.0

    def _follow(self) -> None:
        """Ask for every policy that is served and not yet in force here or on the topic."""
        self._follow_at = time.monotonic() + FOLLOW_SECONDS
        self.publisher.follow()
        if not self._seen:
            return
        part = self._slice()
        if self.publisher.current:
            self.rollouts.take_back(self.workers.returned, self.scopes.awake)
            self.rollouts.follow(part)
            left = {name for name in self._unpublished - part.keys() if name in self.standings}
            # what cannot be read may be another release's: its lease is not to be kept from it
            unreadable = self.registrar.is_unreadable
            self._unpublished = left | {
                name
                for name in part
                if any(not unreadable(name, version) for version, _ in self._due(name).values())
            }
        wanted = set()
        for name, learned in self.scopes.awake.items():
            if (tried := self.rollouts.judge(learned)) is not None:
                wanted.add((name, tried))
        for name, standing in part.items():
            scope = self.scopes.awake.get(name)
            if standing.served and scope is not None and scope.version != standing.served:
                wanted.add((name, standing.served))
            if self.lease.holds(name):
                wanted |= {(name, version) for version, _ in self._sendable(name).values()}
        self.registrar.ask(wanted)
        waiting = {registration.name for registration in self.registrar.waiting()}
        for name in self._established():
            served = self.standings.get(name, Standing(name)).served
            if served is None and self.lease.holds(name) and (name, INITIAL) not in waiting:
                scope = self.scopes.awake.get(name)
                self.registrar.hand(first_registration(name, scope, self.settings))

    def _slice(self) -> dict[str, Standing]:
        """The aliases of the scopes in which something happens, and of others in turn: a registry
        may hold those of years."""
        names = [*self.standings]
        at = self._slice_at if self._slice_at < len(names) else 0
        self._slice_at = at + SLICE
        busy = self.scopes.awake.keys() | self._unpublished | self.rollouts.open()
        chosen = {*names[at : at + SLICE], *busy} & self.standings.keys()
        return {name: self.standings[name] for name in chosen}

    def _serve(self, policy: Policy) -> None:
        """Have a policy published where the topic lacks it, if the scope is ours; then judge
        against it."""
        name, term = policy.scope, partial(self.lease.term, policy.scope, MARGIN_SECONDS)
        for role, (due, share) in self._sendable(name).items():
            if due == policy.version and term():
                self.publisher.begin(name, role, term, replace(policy, share=share))
        if policy_key(name, CHAMPION) not in self.publisher.pending:
            self._crown(policy)

    def _published(self, sent: Policy) -> None:
        """What was begun lies on the topic now."""
        log.info(
            "scope %s: version %d published for %s, number %d",
            sent.scope, sent.version, sent.role, sent.publication,
        )  # fmt: skip
        self._follow_at = 0.0
        if sent.role == TRIAL:
            self.rollouts.published(sent)
        else:
            self._crown(sent)

    def _crown(self, policy: Policy) -> None:
        """Judge against ``policy`` from now on, unless its alias was moved on meanwhile."""
        name, version = policy.scope, policy.version
        scope = self.scopes.awake.get(name)
        served = self.standings.get(name, Standing(name)).served
        if scope is not None and scope.version != version == served:
            self.scopes.of(name).crown(policy)
            self._checkpoint_at = 0.0
        elif scope is not None and self.rollouts.judge(scope) == version:
            self.scopes.of(name).put_on_trial(policy)

    def _report(self) -> None:
        self._status_at = time.monotonic() + STATUS_SECONDS
        common = LearnerStatus(
            process=self.process,
            life=self.life,
            **self.intake.said(self.source),
            events_unknown=self.unknown,
            faults=self.faults,
            waiting=len(self.registrar.waiting()),
            registry_away_since=self.registrar.away_since,
            given_up=dict(self.registrar.given_up),
            checkpoint_age=time.monotonic() - self._written_at,
            scopes_awake=len(self.scopes.awake),
            scopes_known=len(self.scopes.entries),
        )
        said = [
            common.model_copy(update=self._of_scope(name, scope))
            for name, scope in self.scopes.awake.items()
            if self._ours(name)
        ] or [common]
        for status in said:
            self.status.send(status)
        self.vitals.said = said

    def _of_scope(self, name: str, scope: Scope) -> dict[str, object]:
        last = self.publisher.published.last(name)
        return {
            "events_consumed": self.scopes.entries[name],
            "losses": dict(self.scopes.lost.get(name, {})),
            "share": self.shares.get(name, 1.0),
            "publication": 0 if last is None else last.number,
            "lease": self.lease.holder_of(name),
            "holds_lease": self.lease.holds(name),
            **scope.status(),
            **self.rollouts.status(name),
        }


def run(settings: LearnerSettings, kafka: KafkaSettings, stop: threading.Event) -> None:
    """Learn until ``stop`` is set; a last checkpoint is written before returning.

    Raises:
        SettingsError: another learner works in the same folder, or the page's port is taken.
        BrokerError: see :func:`learner.topics.wait_until_right`.
    """
    vitals = Vitals()
    with occupied(settings.state_dir), serving(settings, vitals):
        topics.wait_until_right(kafka, stop)
        learner = Learner(settings, kafka)
        learner.vitals = vitals
        try:
            learner.registrar.start()
            while not stop.is_set():
                learner.step()
            learner.checkpoint()  # not after an error: what was half done is done again
        finally:
            learner.close()
