"""Composition of one serving worker: router, telemetry and policy feed for one engine.

An engine adapter makes one :class:`Worker`, then calls its ``router`` only.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from decoder.admission import Admission, check_size
from decoder.contracts.bundle import TRIAL, Policy, frequency_policy
from decoder.contracts.errors import SettingsError
from decoder.contracts.events import Origin
from decoder.contracts.features import SCHEMA_ID
from decoder.contracts.settings import KafkaSettings
from decoder.contracts.status import SideSums, WorkerStatus
from decoder.contracts.trials import MODEL
from decoder.core.costs import LiveCosts
from decoder.core.events import Sink
from decoder.core.router import DraftRouter
from decoder.drafting.suffix import SuffixCache
from decoder.experiment.interleaver import Interleaver
from decoder.feed import PolicyFeed
from decoder.policy.first import first_or_counting
from decoder.policy.probes import from_bytes
from decoder.settings import WorkerSettings
from decoder.telemetry.metrics import MetricsPage
from decoder.telemetry.ring import DeliveryReport, Ring
from decoder.telemetry.supervisor import Supervisor

log = logging.getLogger(__name__)


@dataclass
class Worker:
    """What an engine adapter holds. ``faults`` counts steps in which hybrid decoding failed."""

    settings: WorkerSettings
    scope: str
    router: DraftRouter
    admission: Admission
    interleaver: Interleaver
    incarnation: str
    supervisor: Supervisor | None = None
    feed: PolicyFeed | None = None
    page: MetricsPage | None = None
    faults: int = 0

    def status(self) -> WorkerStatus:
        """The worker's present status record."""
        counters = self.router.counters
        return WorkerStatus(
            process=self.settings.name,
            scope=self.scope,
            life=self.incarnation,
            schema_id=SCHEMA_ID,
            time=time.time(),
            requests_started=counters.started,
            requests_stopped=counters.stopped,
            tokens=counters.tokens,
            cycles=dict(counters.cycles),
            accepted=dict(counters.accepted),
            drafted=dict(counters.drafted),
            drafts_labelled=counters.labelled,
            left_out=dict(counters.left_out),
            faults=self.faults,
            **self._policy_fields(),
            **self._cost_fields(),
            **self._delivery_fields(),
            **self._comparison_fields(),
        )

    def _policy_fields(self) -> dict[str, Any]:
        admission, floor = self.admission, self.router.controller.floor
        champion, probation = self.router.policy, self.router.probation
        policy = probation.serving(champion)
        returned = policy is not champion
        return {
            "policy_version": policy.version,
            "publication": policy.publication,
            "policy_role": policy.role,
            "policy_kind": policy.kind,
            "threshold": policy.threshold,
            "rate": self.router.rate.value,
            "policy_applied_at": probation.returned_at if returned else admission.applied_at,
            "swaps": admission.swaps,
            "swap_ms_max": admission.swap_ms_max,
            "refusals": dict(admission.refusals),
            "ignored": dict(admission.ignored),
            "fallback": "" if floor.serving == "policy" else floor.serving,
            "fallbacks": floor.fallbacks,
            "advantage": floor.advantage,
            "returned_from": champion.publication * returned,
        }

    def _cost_fields(self) -> dict[str, Any]:
        """Times of steps and of this plugin, and memory of the suffix cache."""
        router = self.router
        counters, cache, controller = router.counters, router.cache, router.controller
        costs = router.costs.table
        return {
            "setup": costs.setup,
            "step_us": {str(t): round(float(costs.dense[t])) for t in (1, 4, 16, 64)},
            "draft_us": costs.drafting(self.settings.model_draft_tokens, 1),
            "choose_us_p50": _median(counters.choose_us),
            "own_us_p50": _median(counters.own_us),
            "exposed_us_p50": _median(counters.exposed_us),
            "probes": controller.num_probes,
            "asleep": controller.num_paused,
            "undrafted": counters.undrafted,
            "cache_bytes": cache.held_bytes if cache else 0,
            "cache_evicted": cache.evicted if cache else 0,
            "cache_shed": cache.shed if cache else 0,
        }

    def _delivery_fields(self) -> dict[str, Any]:
        """Delivery counters of events and of rounds of trials."""
        events = self.supervisor.report() if self.supervisor else DeliveryReport()
        dropped = self.interleaver.rounds_dropped + events.rounds_dropped
        return {
            "events_made": events.made,
            "events_sent": events.sent,
            "events_in_doubt": events.in_doubt,
            "queue_depth": events.waiting,
            "events_dropped": sum(events.dropped.values()),
            "drops": events.dropped,
            "events_refused": events.refused,
            "events_failed": events.failed,
            "carrier_deaths": events.deaths,
            "rounds_sent": events.rounds_sent,
            "rounds_dropped": dropped if self.supervisor else 0,
        }

    def _comparison_fields(self) -> dict[str, Any]:
        trial, interleaver = self.admission.held.get(TRIAL), self.interleaver
        return {
            "sides": {
                name: SideSums(steps=s.steps, tokens=s.tokens, us=s.us, cost_us=s.cost_us)
                for name, s in interleaver.totals.items()
            },
            "side": interleaver.active,
            "sides_failed": dict(interleaver.failures),
            "rounds_made": interleaver.rounds_made,
            "trial_version": trial.version if trial else 0,
            "trial_publication": trial.publication if trial else 0,
            "trial_share": trial.share if trial else 0.0,
        }

    def close(self) -> None:
        """Label open drafts as censored, send the remaining events, stop the threads."""
        if self.feed is not None:
            self.feed.stop()  # only asked to: sending events comes first, as time may be short
        self.router.close()
        if self.supervisor is not None:
            self.supervisor.close()
        if self.feed is not None:
            self.feed.close()
        if self.page is not None:
            self.page.close()


def _median(times: Iterable[float]) -> float:
    values = list(times)
    return float(np.median(values)) if values else 0.0


def initial_policy(settings: WorkerSettings, scope: str) -> Policy:
    """The policy bundle that the settings name, else the start policy that they choose.

    The start policy is the first policy, or counting where that is unusable or counting is chosen.

    Raises:
        PolicyRefused: the named bundle is unusable; a person chose it, so it is not ignored.
        SettingsError: it cannot be read.
    """
    if settings.policy_file is not None:
        try:
            data = settings.policy_file.read_bytes()
        except OSError as error:
            raise SettingsError(
                f"the policy in {settings.policy_file} cannot be read: {error.strerror}. Correct "
                "HVD_WORKER_POLICY_FILE, or unset it."
            ) from error
        chosen = from_bytes(data, scope)
        check_size(chosen)
        return replace(chosen, scope=scope)
    return frequency_policy(scope) if settings.start == "counting" else first_or_counting(scope)


def _variants(settings: WorkerSettings, has_model: bool) -> tuple[str, ...]:
    """The variants in the settings that this engine can run."""
    if has_model or MODEL not in settings.variants:
        return settings.variants
    log.warning("there is no model drafter: the variant %r is left out", MODEL)
    return tuple(name for name in settings.variants if name != MODEL)


def make_worker(
    settings: WorkerSettings,
    kafka: KafkaSettings,
    scope: str,
    token_classes: NDArray[np.float32],
    has_model: bool,
    longest: int = 64,
    names: tuple[str, str] = ("", ""),
) -> Worker:
    """Make a worker, and start the threads that its settings switch on.

    Args:
        token_classes: float32 [vocabulary, classes].
        has_model: whether the engine has a model drafter.
        longest: longest draft that the engine was started for, in tokens.
        names: of target and drafter, for telemetry; "" where there is none.
    """
    ring = Ring(settings.queue_size) if settings.telemetry else None
    policy, incarnation = initial_policy(settings, scope), secrets.token_hex(8)
    router = DraftRouter(
        SuffixCache(settings), policy, token_classes, Sink(ring),
        model_len=settings.model_draft_tokens * has_model, longest=longest,
        guarded=settings.floor,
    )  # fmt: skip
    admission = Admission(scope, partial(setattr, router, "policy"), policy)
    interleaver = Interleaver(
        _variants(settings, has_model), settings.holdout, admission.held, first_or_counting(scope),
        incarnation, settings.start == "first",
    )  # fmt: skip
    router.costs, router.interleaver = LiveCosts(), interleaver
    worker = Worker(settings, scope, router, admission, interleaver, incarnation)
    if ring is not None:
        origin = Origin(scope, settings.name, incarnation, *names)
        worker.supervisor = Supervisor(
            kafka, ring, origin, worker.status, interleaver.rounds, settings.events_per_s
        )
        worker.feed = PolicyFeed(kafka, scope, admission)
        worker.supervisor.start()
        worker.feed.start()
    if settings.metrics:
        worker.page = MetricsPage(worker.status)
        worker.page.start()
    log.info("hybrid verified decoding: scope %s, policy version %d", scope, policy.version)
    return worker
