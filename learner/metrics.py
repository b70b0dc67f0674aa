"""A learner's Prometheus metrics: its status records, and what they add up to.

Of a worker what is named alike means the same. A scope that rests in the store has no series until
it is heard of again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from decoder.contracts.status import LearnerStatus

COUNTS: Final = {
    "dead_letters_failed": "Refused records that their topic did not take.",
    "events_unknown": "Draft events of scopes that no worker's status names: passed over.",
    "records_missing": "Gaps in the sequences of lives and partitions.",
    "records_duplicate": "Records with a sequence number that came before.",
    "records_skipped": "Records gone before they were read, or that cannot be unpacked.",
    "faults": "Records that could not be learned from though they keep the contract.",
    "rounds_refused": "Records of the trials topic that are no rounds.",
}
LEVELS: Final = {
    "lag": "Records behind the end of the topic.",
    "lag_events": "The same in draft events, by how many a record has held so far.",
    "lag_seconds": "How old what was read last is, or since when no broker answers; 0 at the end.",
    "waiting": "Policies that wait for the registry.",
    "checkpoint_age": "Seconds since a checkpoint was written.",
}
SCOPE_COUNTS: Final = {
    "events_consumed": "Distinct draft events.",
    "drafts_consumed": "Of these, the ones that train: their cache draft is the worker's own.",
    "predicted_tokens": "Accepted tokens foreseen, of drafts with a complete label.",
    "accepted_tokens": "Accepted tokens of the same drafts.",
    "drifts": "Alarms that the traffic changed.",
    "candidates": "Policies that won over the champion offline.",
    "promotions": "Of these, the ones that became champion.",
}
SCOPE_LEVELS: Final = {
    "share": "Part of its requests that is learned from.",
    "mae": "Absolute error of the champion on recent drafts, tokens.",
    "precision": "Share that brought six tokens, of recent drafts predicted to.",
    "recall": "Share predicted to, of recent drafts that brought six tokens.",
    "f1": "Harmonic mean of precision and recall.",
    "champion_version": "Version of the champion.",
    "publication": "Number of its last publication; 0 before the first.",
    "holds_lease": "1 while the scope is this learner's to promote and publish.",
    "trial_ratio": "Its rate over the champion's; 0: no pairs yet.",
    "trial_low": "Lower bound of the ratio; 0: too few pairs.",
    "trial_high": "Upper bound of the ratio; 0: too few pairs.",
}
PREFIX: Final = "hvd_learner_"


class StatusCollector(Collector):
    """Reads ``said``, the newest status of each awake scope, whenever the page is asked for."""

    def __init__(self, said: Callable[[], Sequence[LearnerStatus]]) -> None:
        self._said = said

    def collect(self) -> Iterator[Metric]:
        """The series of this moment; none before the first status."""
        said = self._said()
        if not said:
            return
        first, scopes = said[0], [status for status in said if status.scope]
        for kind, names in ((CounterMetricFamily, COUNTS), (GaugeMetricFamily, LEVELS)):
            for name, meaning in names.items():
                yield _family(kind, name, meaning, {(): getattr(first, name)})
        for kind, names in ((CounterMetricFamily, SCOPE_COUNTS), (GaugeMetricFamily, SCOPE_LEVELS)):
            for name, meaning in names.items():
                samples: Samples = {(s.scope,): getattr(s, name) for s in scopes}
                yield _family(kind, name, meaning, samples, "scope")
        away = first.registry_away_since
        yield _family(
            GaugeMetricFamily, "registry_away_seconds",
            "Since when MLflow does not answer; 0: it does.",
            {(): max(time.time() - away, 0.0) if away else 0.0},
        )  # fmt: skip
        for name, meaning, counts in (
            ("records_refused", "Records that keep no contract, by reason.", first.refusals),
            ("given_up", "Registrations and moves of aliases that were not made, by reason.",
             first.given_up),
        ):  # fmt: skip
            samples = {(reason,): count for reason, count in counts.items()}
            yield _family(CounterMetricFamily, name, meaning, samples, "reason")
        for name, meaning, field, label in (
            ("events_lost", "Of the events consumed, those whose lesson is gone, by reason.",
             "losses", "reason"),
            ("verdicts", "Comparisons with the champion that ended, by outcome.",
             "verdicts", "outcome"),
        ):  # fmt: skip
            samples = {(s.scope, key): n for s in scopes for key, n in getattr(s, field).items()}
            yield _family(CounterMetricFamily, name, meaning, samples, "scope", label)


Samples = dict[tuple[str, ...], float]


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
