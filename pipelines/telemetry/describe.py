"""What lies on the topics: how much, of when, how fast it comes, and what is missing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from kafka.errors import UnknownTopicOrPartitionError

from decoder.contracts.errors import ContractError
from decoder.contracts.settings import KafkaSettings
from decoder.contracts.status import LearnerStatus, decode_status
from decoder.contracts.topics import DRAFTS, STATUS, TOPICS, Topic
from pipelines.telemetry.reading import reading, records, spans
from pipelines.telemetry.rows import Intake

SAMPLE: Final = 1_000
"""Last records of each partition that are read: of events some two hundred thousand."""


@dataclass(frozen=True)
class Lying:
    """A topic. Times in seconds since the epoch, rates a second, bytes as they are when read."""

    topic: str
    cleanup: str
    partitions: int
    records: int
    first: float  # of the records that were read; 0: there are none
    last: float
    sampled: int
    bytes_a_record: float

    @property
    def rate(self) -> float:
        """Records a second over the sample."""
        return self.sampled / (self.last - self.first) if self.last > self.first else 0.0


@dataclass(frozen=True)
class Described:
    """The topics, and what the sampled draft events and statuses say."""

    topics: list[Lying]
    counts: dict[str, int]  # of sampled draft records: see pipelines.telemetry.rows.Counts
    seconds: float  # between the first and the last choice of the sampled events
    bytes_an_event: float
    by: dict[str, dict[str, int]] = field(default_factory=dict)  # rows by worker, arm, ...
    lag: dict[str, int] = field(default_factory=dict)  # records, by learner

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"topics": [asdict(t) | {"rate": t.rate} for t in self.topics]}


def describe(kafka: KafkaSettings, sample: int = SAMPLE) -> Described:
    """Look at every topic, and at the last ``sample`` records of each partition.

    Raises:
        BrokerError: the broker does not answer.
    """
    intake = Intake()
    by: dict[str, Counter[str]] = {name: Counter() for name in ("worker", "arm", "workload")}
    times: list[float] = []
    lag: dict[str, int] = {}
    topics, raw = [], 0
    with reading(kafka, "describe") as consumer:
        for topic in TOPICS:
            try:
                lying = spans(consumer, topic)
            except UnknownTopicOrPartitionError:
                lying = {}  # shown as one without partitions
            wanted = {p: range(max(s.start, s.stop - sample), s.stop) for p, s in lying.items()}
            sent, sizes = [], []
            for fetched in records(consumer, topic, wanted):
                for record in fetched:
                    sent.append(record.timestamp / 1e3)
                    sizes.append(len(record.value or b""))
                    if topic is DRAFTS:
                        times += _counted(intake, record, by)
                    elif topic is STATUS:
                        lag |= _lag(record.value)
            topics.append(_lying(topic, lying, sent, sizes))
            raw = sum(sizes) if topic is DRAFTS else raw
    return Described(
        topics,
        intake.counts.as_dict(),
        max(times, default=0.0) - min(times, default=0.0),
        raw / max(intake.counts.rows, 1),
        {name: dict(counter.most_common(20)) for name, counter in by.items()},
        lag,
    )


def _lying(topic: Topic, lying: Mapping[int, range], sent: list[float], sizes: list[int]) -> Lying:
    return Lying(
        topic.name,
        topic.cleanup,
        len(lying),
        sum(map(len, lying.values())),
        min(sent, default=0.0),
        max(sent, default=0.0),
        len(sent),
        sum(sizes) / max(len(sizes), 1),
    )


def _counted(intake: Intake, record: Any, by: Mapping[str, Counter[str]]) -> list[float]:
    """Count the record's events; when the first and the last of them were decided."""
    rows = intake.take(record.partition, record.value)
    if rows is None or not rows.wanted.any():
        return []
    fresh = int(rows.wanted.sum())
    by["worker"][rows.batch.origin.worker] += fresh
    for name in ("arm", "workload"):
        for value, wanted in zip(rows.batch.names[name], rows.wanted.tolist(), strict=True):
            by[name][value or "-"] += wanted
    times = rows.batch.numbers["time"][rows.wanted]
    return [float(times.min()), float(times.max())]


def _lag(value: bytes | None) -> dict[str, int]:
    """A learner's, by its name; nothing of whatever else."""
    try:
        status = decode_status(value or b"")
    except ContractError:
        return {}
    return {status.process: status.lag} if isinstance(status, LearnerStatus) else {}
