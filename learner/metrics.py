"""A learner's Prometheus metrics: its status records, and what they add up to.

Of a worker what is named alike means the same. A scope that rests in its file has no series until
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
    "events_duplicate": "Draft events of records that came again.",
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
    "scopes_awake": "Scopes in memory.",
    "scopes_known": "Scopes in memory or in files.",
}
SCOPE_COUNTS: Final = {
    "events_consumed": "Distinct draft events.",
    "drafts_consumed": "Of these, the ones that train: their cache draft is the worker's own.",
    "predicted_tokens": "Accepted tokens foreseen, of drafts with a complete label.",
    "accepted_tokens": "Accepted tokens of the same drafts.",
    "updates": "Optimiser steps of each network.",
    "drifts": "Alarms that the traffic changed.",
    "candidates": "Policies that won over the champion offline.",
    "promotions": "Of these, the ones that became champion.",
}
SCOPE_LEVELS: Final = {
    "share": "Part of its requests that is learned from.",
    "buffer": "Drafts held for training.",
    "mae": "Absolute error of the champion on recent drafts, tokens.",
    "champion_version": "Version of the champion.",
    "publication": "Number of its last publication; 0 before the first.",
    "holds_lease": "1 while the scope is this learner's to promote and publish.",
    "trial_version": "Version that is compared with the champion; 0: none.",
    "trial_share": "Part of a worker's steps that it decides.",
    "trial_ratio": "Its rate over the champion's; 0: no pairs yet.",
    "trial_low": "Lower bound of the ratio; 0: too few pairs.",
    "trial_high": "Upper bound of the ratio; 0: too few pairs.",
    "trial_pairs": "Rounds in which both took part.",
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
        scopes = [status for status in said if status.scope]
        for name, meaning in COUNTS.items():
            yield _counter(name, meaning, [((), getattr(said[0], name))])
        for name, meaning in LEVELS.items():
            yield _gauge(name, meaning, [((), getattr(said[0], name))])
        away = said[0].registry_away_since
        yield _gauge(
            "registry_away_seconds", "Since when MLflow does not answer; 0: it does.",
            [((), max(time.time() - away, 0.0) if away else 0.0)],
        )  # fmt: skip
        for name, meaning in SCOPE_COUNTS.items():
            yield _counter(name, meaning, [((s.scope,), getattr(s, name)) for s in scopes], "scope")
        for name, meaning in SCOPE_LEVELS.items():
            yield _gauge(name, meaning, [((s.scope,), getattr(s, name)) for s in scopes], "scope")
        yield _gauge(
            "lease_known", "1 where some learner holds the scope, as far as is known.",
            [((s.scope,), bool(s.lease)) for s in scopes], "scope",
        )  # fmt: skip
        yield _counter(
            "records_refused", "Records that keep no contract, by reason.",
            [((reason,), count) for reason, count in said[0].refusals.items()], "reason",
        )  # fmt: skip
        yield _counter(
            "given_up", "Registrations and moves of aliases that were not made, by reason.",
            [((reason,), count) for reason, count in said[0].given_up.items()], "reason",
        )  # fmt: skip
        yield _counter(
            "events_lost", "Of the events consumed, those whose lesson is gone, by reason.",
            [((s.scope, reason), n) for s in scopes for reason, n in s.losses.items()],
            "scope", "reason",
        )  # fmt: skip
        yield _counter(
            "verdicts", "Comparisons with the champion that ended, by outcome.",
            [((s.scope, word), n) for s in scopes for word, n in s.verdicts.items()],
            "scope", "outcome",
        )  # fmt: skip


Samples = Sequence[tuple[tuple[str, ...], float]]


def _counter(name: str, meaning: str, samples: Samples, *labels: str) -> Metric:
    return _with(CounterMetricFamily(PREFIX + name, meaning, labels=labels), samples)


def _gauge(name: str, meaning: str, samples: Samples, *labels: str) -> Metric:
    return _with(GaugeMetricFamily(PREFIX + name, meaning, labels=labels), samples)


def _with(family: CounterMetricFamily | GaugeMetricFamily, samples: Samples) -> Metric:
    for values, value in samples:
        family.add_metric(values, float(value))
    return family
