"""What lies on the topics: how much, of when, how fast it comes, and what is missing."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from kafka.errors import UnknownTopicOrPartitionError

from decoder.contracts.errors import ContractError
from decoder.contracts.settings import KafkaSettings
from decoder.contracts.status import LearnerStatus, WorkerStatus, decode_status
from decoder.contracts.topics import DRAFTS, STATUS, TOPICS, Topic
from pipelines.telemetry.reading import reading, records, spans
from pipelines.telemetry.rows import Intake

SAMPLE: Final = 1_000
"""Last records of each partition that are read: of events some two hundred thousand."""
HEARD_S: Final = 60.0
"""Before the newest status: who said nothing since has gone."""

Times = defaultdict[int, list[float]]
"""Seconds since the epoch, by partition."""


@dataclass(frozen=True)
class Lying:
    """A topic. Times in seconds since the epoch, bytes as they are when read. A rate is the sum of
    the partitions' rates, each over its own sample: equal samples reach back differently far.
    """

    topic: str
    cleanup: str
    partitions: int
    records: int
    first: float  # of the records that were read; 0: there are none
    last: float
    sampled: int
    bytes_a_record: float
    rate: float  # records a second
    unreadable: int = 0  # records, of the same sample, that cannot be unpacked


@dataclass(frozen=True)
class Described:
    """The topics, and what the sampled draft events and statuses say."""

    topics: list[Lying]
    counts: dict[str, int]  # of sampled draft records: see pipelines.telemetry.rows.Counts
    seconds: float  # between the first and the last choice of the sampled events
    events_per_s: float  # of the topic, see Lying
    bytes_an_event: float
    by: dict[str, dict[str, int]] = field(default_factory=dict)  # rows by worker, arm, ...
    lag: dict[str, int] = field(default_factory=dict)  # records, by learner heard of late

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def describe(kafka: KafkaSettings, sample: int = SAMPLE) -> Described:
    """Look at every topic, and at the last ``sample`` records of each partition.

    Raises:
        BrokerError: the broker does not answer.
    """
    intake = Intake()
    by: dict[str, Counter[str]] = {name: Counter() for name in ("worker", "arm", "workload")}
    decided: Times = defaultdict(list)
    spoke: dict[str, LearnerStatus] = {}
    last_status = 0.0
    topics, raw = [], 0
    with reading(kafka, "describe") as consumer:
        for topic in TOPICS:
            try:
                lying = spans(consumer, topic)
            except UnknownTopicOrPartitionError:
                lying = {}  # shown as one without partitions
            wanted = {p: range(max(s.start, s.stop - sample), s.stop) for p, s in lying.items()}
            sent: Times = defaultdict(list)
            sizes = []
            passed: list[int] = []
            for fetched in records(consumer, topic, wanted, passed.append):
                for record in fetched:
                    sent[record.partition].append(record.timestamp / 1e3)
                    sizes.append(len(record.value or b""))
                    if topic is DRAFTS:
                        decided[record.partition] += _counted(intake, record, by)
                    elif topic is STATUS and (status := _status(record.value)) is not None:
                        last_status = max(last_status, status.time)
                        if isinstance(status, LearnerStatus):
                            spoke[status.process] = status
            topics.append(replace(_lying(topic, lying, sent, sizes), unreadable=sum(passed)))
            intake.counts.unreadable += sum(passed) if topic is DRAFTS else 0
            raw = sum(sizes) if topic is DRAFTS else raw
    times = [at for each in decided.values() for at in each]
    return Described(
        topics,
        intake.counts.as_dict(),
        max(times, default=0.0) - min(times, default=0.0),
        _rate(decided),
        raw / max(intake.counts.rows, 1),
        {name: dict(counter.most_common(20)) for name, counter in by.items()},
        {n: s.lag for n, s in spoke.items() if s.time >= last_status - HEARD_S},
    )


def _rate(times: Times) -> float:
    found = 0.0
    for each in times.values():
        lasted = max(each, default=0.0) - min(each, default=0.0)
        found += len(each) / lasted if lasted > 0 else 0.0
    return found


def _lying(topic: Topic, lying: Mapping[int, range], sent: Times, sizes: list[int]) -> Lying:
    times = [at for each in sent.values() for at in each]
    return Lying(
        topic.name,
        topic.cleanup,
        len(lying),
        sum(map(len, lying.values())),
        min(times, default=0.0),
        max(times, default=0.0),
        len(times),
        sum(sizes) / max(len(sizes), 1),
        _rate(sent),
    )


def _counted(intake: Intake, record: Any, by: Mapping[str, Counter[str]]) -> list[float]:
    """Count the record's events; when each of them was decided."""
    rows = intake.take(record.partition, record.value)
    if rows is None or not rows.wanted.any():
        return []
    fresh = int(rows.wanted.sum())
    by["worker"][rows.batch.origin.worker] += fresh
    for name in ("arm", "workload"):
        for value, wanted in zip(rows.batch.names[name], rows.wanted.tolist(), strict=True):
            by[name][value or "-"] += wanted
    times: list[float] = rows.batch.numbers["time"][rows.wanted].tolist()
    return times


def _status(value: bytes | None) -> WorkerStatus | LearnerStatus | None:
    try:
        return decode_status(value or b"")
    except ContractError:
        return None
