"""Prometheus metrics of a learner, from its status records.

A name that a worker uses, too, means the same. A scope that is not loaded has no series.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from decoder.contracts.status import LearnerStatus

COUNTS: Final = {
    "dead_letters_failed": "Refused records that the dead-letter topic did not accept.",
    "events_unknown": "Draft events of scopes that no worker's status names: skipped.",
    "records_missing": "Gaps in the sequences of lives and partitions.",
    "records_duplicate": "Records with a sequence number that came before.",
    "records_skipped": "Records removed before they were read, or that cannot be decompressed.",
    "faults": "Valid records that could not be learned from.",
    "rounds_refused": "Records of the trials topic that are no rounds.",
}
LEVELS: Final = {
    "lag": "Records behind the end of the topic.",
    "lag_events": "Lag in draft events, by the mean number in a record so far.",
    "lag_seconds": "Age of the newest record read, or time since a broker answered; 0 at the end.",
    "waiting": "Policies that wait for the registry.",
    "checkpoint_age": "Seconds since a checkpoint was written.",
}
SCOPE_COUNTS: Final = {
    "events_consumed": "Distinct draft events.",
    "drafts_consumed": "Draft events that train: their cache draft is the worker's own.",
    "predicted_tokens": "Predicted accepted tokens, of drafts with a complete label.",
    "accepted_tokens": "Accepted tokens of the same drafts.",
    "drifts": "Alarms of drift detection.",
    "candidates": "Policies that passed the offline gate.",
    "promotions": "Candidates that became champion.",
}
SCOPE_LEVELS: Final = {
    "share": "Share of its requests that is learned from.",
    "mae": "Mean absolute error of the champion on recent drafts, tokens.",
    "precision": "Share with six accepted tokens, of recent drafts predicted to have them.",
    "recall": "Share predicted to have six accepted tokens, of recent drafts that have them.",
    "f1": "Harmonic mean of precision and recall.",
    "champion_version": "Version of the champion.",
    "publication": "Number of its last publication; 0 before the first.",
    "holds_lease": "1 while this learner holds the scope's lease.",
    "trial_ratio": "Rate on trial over the champion's; 0: no pairs yet.",
    "trial_low": "Lower bound of the ratio; 0: too few pairs.",
    "trial_high": "Upper bound of the ratio; 0: too few pairs.",
}
BY_REASON: Final = {
    "records_refused": ("refusals", "Records that violate the contract, by reason."),
    "given_up": ("given_up", "Registrations and alias moves that were abandoned, by reason."),
}
SCOPE_BY_LABEL: Final = {
    "events_lost": ("losses", "reason", "Consumed events whose training row is lost, by reason."),
    "verdicts": ("verdicts", "outcome", "Comparisons with the champion that ended, by outcome."),
}
PREFIX: Final = "hvd_learner_"

Samples = dict[tuple[str, ...], float]


class StatusCollector(Collector):
    """Collects the newest status of each loaded scope, given by ``statuses``."""

    def __init__(self, statuses: Callable[[], Sequence[LearnerStatus]]) -> None:
        self._statuses = statuses

    def collect(self) -> Iterator[Metric]:
        """The current series; none before the first status."""
        statuses = self._statuses()
        if not statuses:
            return
        first, scopes = statuses[0], [status for status in statuses if status.scope]
        for kind, names in ((CounterMetricFamily, COUNTS), (GaugeMetricFamily, LEVELS)):
            for name, meaning in names.items():
                yield _family(kind, name, meaning, {(): getattr(first, name)})
        for kind, names in ((CounterMetricFamily, SCOPE_COUNTS), (GaugeMetricFamily, SCOPE_LEVELS)):
            for name, meaning in names.items():
                samples: Samples = {(s.scope,): getattr(s, name) for s in scopes}
                yield _family(kind, name, meaning, samples, "scope")
        away = first.registry_away_since
        seconds = max(time.time() - away, 0.0) if away else 0.0
        meaning = "Time since MLflow stopped answering; 0 while it answers."
        yield _family(GaugeMetricFamily, "registry_away_seconds", meaning, {(): seconds})
        for name, (field, meaning) in BY_REASON.items():
            samples = {(reason,): count for reason, count in getattr(first, field).items()}
            yield _family(CounterMetricFamily, name, meaning, samples, "reason")
        for name, (field, label, meaning) in SCOPE_BY_LABEL.items():
            samples = {(s.scope, key): n for s in scopes for key, n in getattr(s, field).items()}
            yield _family(CounterMetricFamily, name, meaning, samples, "scope", label)


def _family(
    kind: type[CounterMetricFamily | GaugeMetricFamily],
    name: str,
    meaning: str,
    samples: Samples,
    *labels: str,
) -> Metric:
    family = kind(PREFIX + name, meaning, labels=labels)
    for values, value in samples.items():
        family.add_metric(values, float(value))
    return family
