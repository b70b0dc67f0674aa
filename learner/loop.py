"""The learner's loop: consume, learn, register candidates, publish policies, checkpoint, report.

One thread serves all scopes and waits for no server: MLflow, each topic and each producer have
threads of their own. While Kafka or MLflow is away, learned state is kept, and requests are
retried.
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
from learner.ingest.dead_letters import DeadLetters
from learner.ingest.group import GroupMember
from learner.ingest.records import DraftRecord, RecordReader
from learner.ingest.sampling import HeadSampler
from learner.ingest.source import EventSource, Fetched
from learner.ingest.statuses import StatusReader
from learner.lease import MARGIN_SECONDS, Lease
from learner.page import Health, serve_page
from learner.release.publisher import PolicyPublisher
from learner.release.registrar import Registrar
from learner.release.registrations import (
    INITIAL,
    Answer,
    MoveResult,
    first_registration,
    registration_of,
)
from learner.release.registry import AliasState, Registry
from learner.release.rollouts import Rollouts
from learner.scope import Scope
from learner.settings import LearnerSettings
from learner.state_dir import learner_id, locked
from learner.status import StatusProducer

log = logging.getLogger(__name__)

GROUP: Final = "hvd-learners"
POLL_SECONDS: Final = 0.25
TURN_SECONDS: Final = 1.0
"""For the records of one turn: leases and health must not wait for a backlog."""
FOLLOW_SECONDS: Final = 1.0
CHECKPOINT_SECONDS: Final = 10.0
CHECKPOINT_BYTES_A_SECOND: Final = 2 * 2**20
"""A larger checkpoint delays the next one; records read again are deduplicated."""
STATUS_SECONDS: Final = 1.0
SLICE: Final = 500  # inactive scopes whose aliases are looked at in one turn
ESTABLISHED: Final = 100
"""Drafts before a scope is registered: anybody may invent scope names, and until then its workers
run the first policy anyway."""


class Learner:
    """State of the process; :func:`run` calls :meth:`step` in a loop."""

    def __init__(self, settings: LearnerSettings, kafka: KafkaSettings) -> None:
        self.settings = settings
        self.process = f"learner-{socket.gethostname()}-{os.getpid()}"
        self.life = secrets.token_hex(8)
        stored = state.load(settings)
        self.scopes = stored.scopes
        self.faults = stored.faults
        holder = learner_id(settings.state_dir)
        self.group: GroupMember | None = None
        if settings.topic is LESSONS:
            self.group = GroupMember(kafka, LESSONS, GROUP, commits=False, instance=holder)
        self.source = EventSource(
            kafka, stored.offsets, stored.skipped, settings.topic, stored.marks, self.group
        )
        self.sampler = HeadSampler(settings.rows_per_second, stored.shares)
        self.statuses = StatusReader(kafka, self.process)
        self.unknown = 0
        self.reader = RecordReader(
            DeadLetters(kafka, settings.topic), stored.sequences, stored.refused, stored.repeated,
            self.sampler if self.group is None else {},  # training rows are sampled already
            relayed=self.group is not None,
        )  # fmt: skip
        self.lease = Lease(kafka, holder)
        self.registrar = Registrar(
            Registry.of(settings), self.lease.holds, stored.waiting,
            lambda scope: self.rollouts.busy(scope), by=holder,  # noqa: PLW0108 -- made below
            trial=settings.rollout != "off", keep=settings.keep_versions,
        )  # fmt: skip
        self.publisher = PolicyPublisher(kafka, stored.published)
        rounds = EventSource(
            kafka, stored.round_offsets, topic=TRIALS, fingerprints=stored.round_marks
        )
        self.rollouts = Rollouts(
            settings, self.lease, self.publisher, self.registrar, rounds,
            stored.rollouts, stored.round_sequences,
        )  # fmt: skip
        self.status = StatusProducer(kafka)
        self.health = Health()
        self.aliases: Mapping[str, AliasState] = {}
        self._unpublished, self._slice_at = set[str](), 0  # scopes missing on the policy topic
        self._limited_log = LimitedLog()
        self._aliases_known = False
        self._written_at = time.monotonic()
        self._checkpoint_at = self._written_at + CHECKPOINT_SECONDS
        self._follow_at = self._status_at = 0.0

    def step(self) -> None:
        """One turn; takes about ``POLL_SECONDS`` when idle."""
        # 1. Consume, and learn from each record once, in order of arrival.
        self._consume()
        self.rollouts.read()
        self.statuses.read()
        # 2. Adopt the sampling rates of scopes that others hold, and adjust our own.
        rates = self.statuses.sample_rates
        others = (s for s in rates if s in self.scopes.events and not self.lease.holds(s))
        self.sampler.adopt({scope: rates[scope] for scope in others})
        near, lag = self.source.is_near_the_end(), self.source.lag()
        self.sampler.adjust(time.monotonic(), near, self.lease.holds, lag)
        # 3. Renew leases, and take in acknowledged publications.
        self.lease.renew_in_background(self._wanted, self._owns)
        for policy in self.publisher.acknowledged():
            self._acknowledge(policy)
        # 4. Take in answers of the registry, and request policies to serve.
        for answer in self.registrar.answers():
            self._receive(answer)
        if time.monotonic() >= self._follow_at:
            self._follow()
        # 5. Scopes and offsets in one write: a crash before this line reads the same records again.
        if time.monotonic() >= self._checkpoint_at:
            self.checkpoint()
        # 6. Report.
        if time.monotonic() >= self._status_at:
            self._report()
        self.health.record_turn(self.lease.ready and self.source.caught_up)

    def checkpoint(self) -> None:
        """Save all state in one transaction; a full disk is logged."""
        self._checkpoint_at = time.monotonic() + CHECKPOINT_SECONDS
        reader, source, rollouts = self.reader, self.source, self.rollouts
        current = state.State(
            self.scopes,
            waiting=self.registrar.pending(),
            rollouts=rollouts.by_scope,
            offsets=source.offsets,
            marks=source.fingerprints,
            skipped=source.skipped,
            sequences=reader.sequences,
            refused=reader.refused,
            repeated=reader.repeated,
            faults=self.faults,
            published=dict(self.publisher.topic.numbers),
            round_offsets=rollouts.source.offsets,
            round_marks=rollouts.source.fingerprints,
            round_sequences=rollouts.sequences,
            shares=self.sampler,
        )
        try:
            written = state.save(self.settings, current)
        except OSError as error:
            log.error("checkpoint not written: %s", error)
            return
        self._written_at = now = time.monotonic()
        self._checkpoint_at = now + max(CHECKPOINT_SECONDS, written / CHECKPOINT_BYTES_A_SECOND)

    def close(self) -> None:
        """Release leases and disconnect; saves nothing."""
        for part in (
            self.registrar, self.lease, self.source, self.rollouts, self.statuses, self.reader.dead,
            self.publisher, self.status, self.group, self.scopes.store,
        ):  # fmt: skip
            if part is not None:
                part.close()

    def _consume(self) -> None:
        """Learn from new records, which are acknowledged once learned from or refused."""
        if not self.scopes.events and not self.statuses.ready:
            time.sleep(POLL_SECONDS)  # without known scopes, all records would be skipped
            return
        for record in self.source.records(POLL_SECONDS, TURN_SECONDS):
            decoded = self.reader.decode(record)
            if decoded is None:
                continue
            name, source = decoded.scope, decoded.batch.source
            is_known = name in self.scopes.events or self.statuses.is_known(name)
            if is_known is None:
                return  # the lookup is running: the record comes again
            if not self.reader.admit(record, decoded):
                continue
            if not is_known:
                self.unknown += decoded.events
                continue
            if source is not None and not self.lease.holds(name):
                self.sampler.adopt({name: source.share})
            self.sampler.count(name, decoded.drafts)
            self.rollouts.record_traffic(name)
            self._learn(decoded, record)

    def _learn(self, decoded: DraftRecord, record: Fetched) -> None:
        name = decoded.scope
        try:
            scope = self.scopes.get(name, decoded.events)
            scope.served = decoded.served or scope.served
            scope.predicted += decoded.predicted
            scope.accepted += decoded.accepted
            self.scopes.count_lost(name, "side", decoded.foreign)
            alarms = scope.update(decoded.rows, decoded.drafts)
            candidate = scope.take_candidate()
            offsets = self.source.offsets | {record.partition: record.offset + 1}
            if candidate is not None:
                self.registrar.submit(registration_of(scope, candidate, offsets))
                log.info("scope %s: a candidate won: %s", name, candidate.reason)
        except Exception:  # noqa: BLE001 -- one record must not end the learner, nor this scope
            self._limited_log.exception(
                "scope %s: learning from a record failed: back to the last checkpoint", name
            )
            self.faults += 1
            self.scopes.discard(name, "fault")
            return
        if alarms:
            log.info("scope %s: traffic changed, MAE %.2f", name, scope.skill.figures()["mae"])

    def _established(self) -> set[str]:
        """Scopes that belong in the registry."""
        active = {name for name, s in self.scopes.loaded.items() if s.total >= ESTABLISHED}
        return active | {each.policy.scope for each in self.registrar.pending()}

    def _wanted(self) -> dict[str, int]:
        """Scopes to lease, unpublished ones among them, with their last known terms."""
        term = self.publisher.topic.term
        wanted = self._established() | self._unpublished | self.rollouts.active()
        return {name: term(name) for name in sorted(wanted) if self._owns(name)}

    def _owns(self, scope: str) -> bool:
        """Whether the consumer group assigns ``scope`` to this learner."""
        return self.group is None or self.group.owns(scope)

    def _due(self, scope: str) -> dict[str, tuple[int, float]]:
        """By role, version and share of policies missing on the policy topic."""
        served = self.aliases.get(scope, AliasState(scope)).served
        due = {CHAMPION: (served, 0.0) if served else None, TRIAL: self.rollouts.due(scope)}
        return self.publisher.missing(scope, due)

    def _receive(self, answer: Answer) -> None:
        if isinstance(answer, dict):
            self.aliases, self._aliases_known = answer, True
            self._follow_at = 0.0
        elif isinstance(answer, Policy):
            self._serve(answer)
        elif isinstance(answer, MoveResult):
            if answer.aliases is not None:  # newer than the last listing
                self.aliases = {**self.aliases, answer.request.scope: answer.aliases}
            self.rollouts.resolve(answer)
            self._follow_at = self._checkpoint_at = 0.0
        else:
            self._checkpoint_at = 0.0

    def _follow(self) -> None:
        """Request served policies that are not yet in force here, or missing on the topic."""
        self._follow_at = time.monotonic() + FOLLOW_SECONDS
        self.publisher.read_in_background()
        if not self._aliases_known:
            return
        aliases = self._next_slice()
        if self.publisher.current:
            self.rollouts.take_back(self.statuses.returned, self.scopes.loaded)
            self.rollouts.follow(aliases)
            others = self._unpublished - aliases.keys()
            # an unreadable policy may be another release's, which must get the lease
            unreadable = self.registrar.is_unreadable
            self._unpublished = {name for name in others if name in self.aliases} | {
                name
                for name in aliases
                if any(not unreadable(name, version) for version, _ in self._due(name).values())
            }
        wanted = set()
        for name, scope in self.scopes.loaded.items():
            if (tried := self.rollouts.update_labels(scope)) is not None:
                wanted.add((name, tried))
        for name, current in aliases.items():
            loaded = self.scopes.loaded.get(name)
            if current.served and loaded is not None and loaded.version != current.served:
                wanted.add((name, current.served))
            if self.lease.holds(name):
                sendable = self.publisher.sendable(name, self._due(name))
                wanted |= {(name, version) for version, _ in sendable.values()}
        self.registrar.request(wanted)
        pending = {registration.key for registration in self.registrar.pending()}
        for name in self._established():
            served = self.aliases.get(name, AliasState(name)).served
            if served is None and self.lease.holds(name) and (name, INITIAL) not in pending:
                loaded = self.scopes.loaded.get(name)
                self.registrar.submit(first_registration(name, loaded, self.settings))

    def _next_slice(self) -> dict[str, AliasState]:
        """Aliases of active scopes, and of some others in turn: a registry may hold thousands."""
        names = [*self.aliases]
        at = self._slice_at if self._slice_at < len(names) else 0
        self._slice_at = at + SLICE
        active = self.scopes.loaded.keys() | self._unpublished | self.rollouts.active()
        chosen = {*names[at : at + SLICE], *active} & self.aliases.keys()
        return {name: self.aliases[name] for name in chosen}

    def _serve(self, policy: Policy) -> None:
        """Publish a requested policy if due, then put it in force here."""
        name, term = policy.scope, partial(self.lease.term, policy.scope, MARGIN_SECONDS)
        for role, (version, share) in self.publisher.sendable(name, self._due(name)).items():
            if version == policy.version and term():
                self.publisher.submit(name, role, term, replace(policy, share=share))
        if policy_key(name, CHAMPION) not in self.publisher.in_flight:
            self._apply(policy)

    def _acknowledge(self, policy: Policy) -> None:
        """Take in that ``policy`` was published."""
        fields = policy.scope, policy.version, policy.role, policy.publication
        log.info("scope %s: version %d published for %s, number %d", *fields)
        self._follow_at = 0.0
        if policy.role == TRIAL:
            self.rollouts.acknowledge(policy)
        else:
            self._apply(policy)

    def _apply(self, policy: Policy) -> None:
        """Make ``policy`` the scope's champion or policy on trial, if the aliases still say so."""
        name, version = policy.scope, policy.version
        scope = self.scopes.loaded.get(name)
        served = self.aliases.get(name, AliasState(name)).served
        if scope is not None and scope.version != version == served:
            self.scopes.get(name).promote(policy)
            self._checkpoint_at = 0.0
        elif scope is not None and self.rollouts.update_labels(scope) == version:
            self.scopes.get(name).put_on_trial(policy)

    def _report(self) -> None:
        self._status_at = time.monotonic() + STATUS_SECONDS
        common = LearnerStatus(
            process=self.process,
            life=self.life,
            **self.reader.status(self.source),
            events_unknown=self.unknown,
            faults=self.faults,
            waiting=len(self.registrar.pending()),
            registry_away_since=self.registrar.away_since,
            given_up=dict(self.registrar.given_up),
            checkpoint_age=time.monotonic() - self._written_at,
            scopes_awake=len(self.scopes.loaded),
            scopes_known=len(self.scopes.events),
        )
        self.health.statuses = [
            common.model_copy(update=self._scope_status(name, scope))
            for name, scope in self.scopes.loaded.items()
            if self._owns(name)
        ] or [common]
        for status in self.health.statuses:
            self.status.send(status)

    def _scope_status(self, name: str, scope: Scope) -> dict[str, object]:
        last = self.publisher.topic.last(name)
        return {
            "events_consumed": self.scopes.events[name],
            "losses": dict(self.scopes.lost.get(name, {})),
            "share": self.sampler.get(name, 1.0),
            "publication": 0 if last is None else last.number,
            "lease": self.lease.holder_of(name),
            "holds_lease": self.lease.holds(name),
            **scope.status(),
            **self.rollouts.status(name),
        }


def run(settings: LearnerSettings, kafka: KafkaSettings, stop: threading.Event) -> None:
    """Learn until ``stop`` is set; a last checkpoint is written before returning.

    Raises:
        SettingsError: another learner uses the state directory, or the page's port is taken.
        BrokerError: see :func:`learner.topics.wait_for_topics`.
    """
    health = Health()
    with locked(settings.state_dir), serve_page(settings, health):
        topics.wait_for_topics(kafka, stop)
        learner = Learner(settings, kafka)
        learner.health = health
        try:
            learner.registrar.start()
            while not stop.is_set():
                learner.step()
            learner.checkpoint()  # not after an error: unfinished work is repeated
        finally:
            learner.close()
