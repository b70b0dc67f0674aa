"""The learner: consume, detect drift, train, tune, gate, register, publish, checkpoint.

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

import torch

from decoder.contracts.errors import BrokerError, ContractError, RegistryError
from decoder.contracts.settings import KafkaSettings
from decoder.contracts.status import LearnerStatus
from learner import checkpoint
from learner.publish import PolicyPublisher, StatusProducer
from learner.registry import Registry, Standing
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
BURST_SECONDS: Final = 1.0
"""Optimiser steps saved up while waiting, so that a pause is not followed by a long burst."""


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
        self._standings: dict[str, Standing] = {}
        self._allowance = 0.0
        now = time.monotonic()
        self._learned_at = self._checkpoint_at = now
        self._follow_at = self._status_at = self._candidate_at = 0.0
        resumed = self._resume()
        self.publisher = PolicyPublisher(kafka, resumed.publications)
        self.source = EventSource(kafka, resumed.offsets, settings.refused_path, resumed.sequences)
        self.source.refused = resumed.refused

    def step(self) -> None:
        """One turn; takes about ``POLL_SECONDS`` when idle."""
        # 1. Consume. Offsets move in memory only.
        received = self.source.poll(POLL_SECONDS)
        # 2. Store each event once, and 3. compare the champion with what really was accepted, in
        #    order of arrival: a detector that saw the events later would date the change wrongly.
        for record in received:
            self._admit(record)
        # 4. Train, within the allowance of CPU the serving processes leave us.
        self._learn()
        # 5. Tune, gate and register, where enough was learned since the last time.
        for scope in self.scopes.values():
            if scope.is_due() and time.monotonic() >= self._candidate_at:
                self._candidate_at = time.monotonic() + self.settings.candidate_seconds
                self._propose(scope)
        # 6. Publish whatever the alias names, whoever moved it.
        if time.monotonic() >= self._follow_at:
            self._follow()
        # 7. Only now the offsets: a crash before this line replays events, whose ids are known.
        if time.monotonic() >= self._checkpoint_at:
            self.checkpoint()
        # 8. Say how it goes.
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
        name, life = record.batch.origin.scope, record.batch.origin.life
        if name not in self.scopes:
            self.scopes[name] = Scope(name, self.settings)
            self._follow_at = 0.0  # is there a champion already?
        scope = self.scopes[name]
        rows = scope.admit(record.batch.events, life)
        if scope.watch(rows, time.time()):
            log.info("scope %s: traffic changed, MAE now %.2f tokens", name, scope.mae)

    def _learn(self) -> None:
        now = time.monotonic()
        earned = (now - self._learned_at) * self.settings.updates_per_second
        most = self.settings.updates_per_second * BURST_SECONDS
        self._allowance = min(self._allowance + earned, most)
        self._learned_at = now
        for scope in self.scopes.values():
            done = scope.learn(int(self._allowance), seed=scope.buffer.total + scope.updates)
            self._allowance -= done

    def _propose(self, scope: Scope) -> None:
        """Tune and judge the network as it is; register it, and promote it if it won."""
        candidate = scope.propose()
        if not candidate.verdict.decided:
            log.info("scope %s: no verdict yet, %s", scope.name, candidate.verdict.reason)
            return
        try:
            version = self._register(scope, candidate)
            scope.candidates += 1
            held = self._standings.get(scope.name)
            by_hand = held is not None and held.manual
            if candidate.verdict.promote and not by_hand:
                self.registry.promote(scope.name, version)
                scope.promotions += 1
                self._follow_at = self._checkpoint_at = 0.0
        except RegistryError as error:
            log.warning("%s; the next candidate tries again", error)
            return
        word = "refused"
        if candidate.verdict.promote:
            word = "left to a person" if by_hand else "promoted"
        log.info("scope %s: version %d %s: %s", scope.name, version, word, candidate.verdict.reason)

    def _register(self, scope: Scope, candidate: Candidate) -> int:
        return self.registry.register(
            candidate.policy,
            params={"note": candidate.tuning.note, "champion": scope.version},
            metrics={**candidate.verdict.metrics(), "tuned_speed": candidate.tuning.speed},
            tags={"verdict": candidate.verdict.reason, "origin": "learner"},
            window=scope.window(),
        )

    def _follow(self) -> None:
        """Publish each scope's champion if it is not the one published last, and take it over."""
        self._follow_at = time.monotonic() + FOLLOW_SECONDS
        try:
            self._standings = self.registry.standings()
            for name in self.scopes.keys() - self._standings.keys():
                self.scopes[name].crown(None)
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
            if scope is not None:
                scope.crown(None)
            return
        behind = scope is not None and (
            not scope.champion_known or scope.version != standing.champion
        )
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
                    events_consumed=scope.buffer.total + scope.buffer.plain,
                    events_duplicate=scope.buffer.duplicates,
                    drafts_consumed=scope.buffer.total,
                    buffer=len(scope.buffer),
                    updates=scope.updates,
                    drifts=scope.drifts,
                    last_drift_at=scope.last_drift_at,
                    mae=scope.mae,
                    candidates=scope.candidates,
                    promotions=scope.promotions,
                    champion_version=scope.version,
                    publication=self.publisher.number_of(scope.name),
                    parameter=scope.champion.parameter,
                    parameter_name=scope.champion.parameter_name,
                    **common,
                )
            )


def run(settings: LearnerSettings, kafka: KafkaSettings, stop: threading.Event) -> None:
    """Learn until ``stop`` is set; a last checkpoint is written before returning.

    Sets torch to one thread in this process: the cores belong to the model that serves.
    """
    torch.set_num_threads(1)
    learner = Learner(settings, kafka)
    try:
        if learner.source.connect(stop):
            while not stop.is_set():
                learner.step()
    finally:
        learner.close()
