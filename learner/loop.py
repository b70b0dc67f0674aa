"""The learner: consume, learn, register, publish, checkpoint.

One thread, one step after another, several scopes. Kafka or MLflow going away is logged and tried
again later; what was learned until then is kept.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from dataclasses import dataclass, field
from typing import Any, Final

from decoder.contracts.bundle import frequency_policy
from decoder.contracts.errors import BrokerError, ContractError, RegistryError
from decoder.contracts.settings import KafkaSettings
from decoder.contracts.status import LearnerStatus
from learner import checkpoint
from learner.publish import PolicyPublisher, StatusProducer
from learner.registry import Registry, Standing
from learner.rows import from_events
from learner.scope import Candidate, Scope
from learner.sequences import Sequences
from learner.settings import LearnerSettings
from learner.source import EventSource, Received

log = logging.getLogger(__name__)

POLL_SECONDS: Final = 0.25
FOLLOW_SECONDS: Final = 3.0
"""How soon an alias that a person moved is noticed; one query of the registry."""
RETRY_SECONDS: Final = 15.0
CHECKPOINT_SECONDS: Final = 10.0
STATUS_SECONDS: Final = 1.0


@dataclass(frozen=True)
class Resumed:
    """What a checkpoint holds beside the scopes."""

    offsets: dict[int, int] = field(default_factory=dict)
    refused: int = 0
    sequences: Sequences = field(default_factory=Sequences)
    publications: dict[str, int] = field(default_factory=dict)


class Learner:
    """The process's state; :meth:`step` is its life. Start from :func:`run`."""

    def __init__(self, settings: LearnerSettings, kafka: KafkaSettings) -> None:
        self.settings = settings
        self.process = f"learner-{socket.gethostname()}-{os.getpid()}"
        self.scopes: dict[str, Scope] = {}
        self.registry = Registry(settings.mlflow_tracking_uri)
        self.status = StatusProducer(kafka)
        self.published: dict[str, int] = {}
        self.consumed: dict[str, int] = {}  # events by scope, since this process began
        self._standings: dict[str, Standing] = {}
        self._checkpoint_at = time.monotonic()
        self._follow_at = self._status_at = 0.0
        resumed = self._resume()
        self.publisher = PolicyPublisher(kafka, resumed.publications)
        self.source = EventSource(kafka, resumed.offsets, settings.refused_path, resumed.sequences)
        self.source.refused = resumed.refused

    def step(self) -> None:
        """One turn; takes about ``POLL_SECONDS`` when idle."""
        # 1. Consume. Offsets move in memory only.
        received = self.source.poll(POLL_SECONDS)
        # 2. Judge by the drafts, and learn from them, in order of arrival.
        for record in received:
            self._admit(record)
        # 3. Register who won.
        for scope in self.scopes.values():
            candidate = scope.candidate()
            if candidate is not None:
                self._propose(scope, candidate)
        # 4. Publish whatever the alias names, whoever moved it.
        if time.monotonic() >= self._follow_at:
            self._follow()
        # 5. Only now the offsets: a crash before this line replays events, whose ids are known.
        if time.monotonic() >= self._checkpoint_at:
            self.checkpoint()
        # 6. Say how it goes.
        if time.monotonic() >= self._status_at:
            self._report()

    def checkpoint(self) -> None:
        """Save scopes, offsets and counters in one write; a full disk is logged."""
        arrays: dict[str, Any] = {}
        states: dict[str, Any] = {}
        for index, (name, scope) in enumerate(self.scopes.items()):
            held, states[name] = scope.snapshot()
            arrays |= checkpoint.under(f"{index}.", held)
        numbers = {
            "offsets": {str(p): offset for p, offset in self.source.offsets.items()},
            "refused": self.source.refused,
            "sequences": self.source.sequences.known(),
            "missing": self.source.sequences.missing,
            "repeated": self.source.sequences.duplicates,
            "publications": self.publisher.publications,
            "scopes": states,
        }
        try:
            # the order of the scopes is that of their prefixes; JSON with sorted keys loses it
            numbers["order"] = list(self.scopes)
            checkpoint.save(self.settings.checkpoint_path, arrays, numbers)
        except OSError as error:
            log.error("checkpoint not written: %s", error)
        self._checkpoint_at = time.monotonic() + CHECKPOINT_SECONDS

    def close(self) -> None:
        """Last checkpoint, then leave the broker."""
        self.checkpoint()
        for part in (self.source, self.publisher, self.status):
            part.close()

    def _resume(self) -> Resumed:
        """Restore the scopes; what else the checkpoint says."""
        loaded = checkpoint.load(self.settings.checkpoint_path)
        if loaded is None:
            log.info("no checkpoint at %s: starting anew", self.settings.checkpoint_path)
            return Resumed()
        arrays, numbers = loaded
        try:
            for index, name in enumerate(numbers["order"]):
                held = checkpoint.within(f"{index}.", arrays), numbers["scopes"][name]
                self.scopes[name] = Scope.restored(name, self.settings, held)
            sequences = Sequences((str(li), int(p), int(n)) for li, p, n in numbers["sequences"])
            sequences.missing = int(numbers["missing"])
            sequences.duplicates = int(numbers["repeated"])
            return Resumed(
                {int(p): int(offset) for p, offset in numbers["offsets"].items()},
                int(numbers["refused"]),
                sequences,
                {str(key): int(n) for key, n in numbers["publications"].items()},
            )
        except (KeyError, ValueError, TypeError, ContractError) as error:
            log.error("checkpoint is not of this version (%s): starting anew", error)
            self.scopes.clear()
            return Resumed()

    def _admit(self, record: Received) -> None:
        name = record.batch.origin.scope
        if name not in self.scopes:
            self.scopes[name] = Scope(name, self.settings, frequency_policy(name))
            self._follow_at = 0.0  # is there a champion already?
        scope = self.scopes[name]
        self.consumed[name] = self.consumed.get(name, 0) + len(record.batch.events)
        for alarm in scope.feed(from_events(record.batch.events)):
            log.info("scope %s: the traffic changed for %s drafts", name, alarm.stream)

    def _propose(self, scope: Scope, candidate: Candidate) -> None:
        """Register who won, and promote it where no person decides."""
        held = self._standings.get(scope.name)
        by_hand = held is not None and held.manual
        try:
            version = self._register(scope, candidate)
            if not by_hand:
                self.registry.promote(scope.name, version)
                self._follow_at = self._checkpoint_at = 0.0
        except RegistryError as error:
            log.warning("%s; the next candidate tries again", error)
            return
        word = "left to a person" if by_hand else "promoted"
        log.info("scope %s: version %d %s: %s", scope.name, version, word, candidate.verdict.reason)

    def _register(self, scope: Scope, candidate: Candidate) -> int:
        return self.registry.register(
            candidate.policy,
            params={"learner": candidate.origin, "champion": scope.version},
            metrics=candidate.verdict.metrics(),
            tags={"verdict": candidate.verdict.reason, "origin": "learner"},
            window=scope.window(),
        )

    def _follow(self) -> None:
        """Publish each scope's champion if it is not the one published last, and take it over."""
        self._follow_at = time.monotonic() + FOLLOW_SECONDS
        try:
            self._standings = self.registry.standings()
        except RegistryError as error:
            log.warning("%s; what was published stays", error)
            self._follow_at = time.monotonic() + RETRY_SECONDS
            return
        for standing in self._standings.values():
            try:
                self._serve(standing)
            except (RegistryError, BrokerError) as error:
                log.warning("%s; what was published stays", error)
                self._follow_at = time.monotonic() + RETRY_SECONDS

    def _serve(self, standing: Standing) -> None:
        scope = self.scopes.get(standing.scope)
        if standing.champion is None:
            return
        behind = scope is not None and scope.version != standing.champion
        if self.published.get(standing.scope) == standing.champion and not behind:
            return
        policy = self.registry.load(standing.scope, standing.champion)
        policy = self.publisher.publish(policy)
        self.published[standing.scope] = standing.champion
        if scope is not None:
            scope.crown(policy)
        log.info(
            "scope %s: version %d published, number %d",
            standing.scope, standing.champion, policy.publication,
        )  # fmt: skip

    def _report(self) -> None:
        self._status_at = time.monotonic() + STATUS_SECONDS
        common: dict[str, Any] = {
            "process": self.process,
            "time": time.time(),
            "records_refused": self.source.refused,
            "records_missing": self.source.sequences.missing,
            "records_duplicate": self.source.sequences.duplicates,
            "lag": self.source.lag(),
        }
        if not self.scopes:
            self.status.send(LearnerStatus(scope="", **common))
        for scope in self.scopes.values():
            self.status.send(
                LearnerStatus(
                    scope=scope.name,
                    events_consumed=self.consumed.get(scope.name, 0),
                    drafts_consumed=scope.total,
                    buffer=len(scope.buffer),
                    updates=scope.updates,
                    drifts=sum(scope.alarms.values()),
                    last_drift_at=scope.last_alarm_at,
                    mae=scope.mae,
                    candidates=scope.candidates,
                    promotions=scope.promotions,
                    champion_version=scope.version,
                    publication=self.publisher.number_of(scope.name),
                    parameter=scope.champion.threshold,
                    parameter_name="threshold",
                    **common,
                )
            )


def run(settings: LearnerSettings, kafka: KafkaSettings, stop: threading.Event) -> None:
    """Learn until ``stop`` is set; a last checkpoint is written before returning."""
    learner = Learner(settings, kafka)
    try:
        if learner.source.connect(stop):
            while not stop.is_set():
                learner.step()
    finally:
        learner.close()
